"""Kinds of models, one file each: what differs between models of images, text and captions. Each ends in its KIND."""
