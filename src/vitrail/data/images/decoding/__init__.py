"""Image files to pixels: formats, limits, JPEG, crops, and the size that a model expects."""
