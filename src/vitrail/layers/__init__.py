"""The layers that every architecture is built from: tensors in, tensors out; scalars only, no config."""
