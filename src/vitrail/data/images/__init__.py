"""Images: data sets, decoding, augmentation, batches."""
