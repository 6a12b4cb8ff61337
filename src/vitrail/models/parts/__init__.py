"""Leaves that families share: scalars and tensors in, no config; a part never imports a family."""
