"""The contract of a model file: family, config checks, initialization, checkpoint names."""
