"""Read and write models on disk, in vitrail's own format and the public layouts.

Writes are atomic, and reading never runs code from a file. Names are resolved on first use, so that modules without
torch can be imported where torch is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.checkpoint.reading import Checkpoint, describe, load, read
    from vitrail.checkpoint.writing import save, write

__all__ = ["Checkpoint", "describe", "load", "read", "save", "write"]


def __getattr__(name: str) -> Any:  # importing the package imports neither torch nor safetensors
    if name not in __all__:
        raise AttributeError(f"module 'vitrail.checkpoint' has no attribute {name!r}")
    module = import_module(f"vitrail.checkpoint.{'writing' if name in ('save', 'write') else 'reading'}")
    return getattr(module, name)  # one of __all__
