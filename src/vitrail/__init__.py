"""vitrail, a Vision Transformer toolbox in code that can be read in one sitting.

The public names, resolved on first use: importing this package imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.checkpoint.description import Preprocessing
    from vitrail.checkpoint.folder import describe, load, save
    from vitrail.errors import CheckpointError, ConfigError, VitrailError
    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog import create, list_models

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "vitrail.errors",
    "ConfigError": "vitrail.errors",
    "VitrailError": "vitrail.errors",
    "Preprocessing": "vitrail.checkpoint.description",
    "create": "vitrail.models.catalog",
    "describe": "vitrail.checkpoint.folder",
    "list_models": "vitrail.models.catalog",
    "load": "vitrail.checkpoint.folder",
    "save": "vitrail.checkpoint.folder",
    "summarize": "vitrail.inspection.summary",
}
__all__ = [
    "CheckpointError",
    "ConfigError",
    "Preprocessing",
    "VitrailError",
    "create",
    "describe",
    "list_models",
    "load",
    "save",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
