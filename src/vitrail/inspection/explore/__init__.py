"""What the page of `vitrail serve` asks a model for: the figures of one photo or sentence, as one file."""
