"""Tasks, one file each: what can be trained."""
