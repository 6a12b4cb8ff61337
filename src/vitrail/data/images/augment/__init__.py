"""Augmentation: its config, transforms of one image, policies, and transforms of a batch."""
