"""Tasks that learn from images without labels, one file each."""
