"""Prediction: images to top classes or features, on the fastest engine, with results in files that can be resumed."""
