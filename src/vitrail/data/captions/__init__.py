"""Images with captions: data sets, batches, generated collages."""
