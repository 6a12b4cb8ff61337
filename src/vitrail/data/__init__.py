"""Image data: reading files and arrays, preprocessing, augmentation, data sets and batches."""
