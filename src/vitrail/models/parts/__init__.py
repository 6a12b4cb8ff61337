"""Leaves that several model files share; they take scalars and tensors, never a config."""
