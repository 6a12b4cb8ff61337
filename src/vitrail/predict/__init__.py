"""Answers out: a model with its preprocessing and class names, from a picture to the likeliest classes."""
