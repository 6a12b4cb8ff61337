"""Models on disk: our own folder and the public layouts, both ways; written whole, and read without running code."""

from vitrail.checkpoint.reading import Checkpoint, describe, load, read
from vitrail.checkpoint.writing import save, write

__all__ = ["Checkpoint", "describe", "load", "read", "save", "write"]
