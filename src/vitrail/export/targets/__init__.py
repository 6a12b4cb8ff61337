"""What `vitrail export --for` writes: an exported model with the files of the system that serves it, one file each."""
