"""vitrail, the Vision Transformer toolbox: learn it, load it, train it, look inside it, ship it.

The public names, resolved on first use: importing this package imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.errors import ConfigError, VitrailError
    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog import create, list_models

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "vitrail.errors",
    "VitrailError": "vitrail.errors",
    "create": "vitrail.models.catalog",
    "list_models": "vitrail.models.catalog",
    "summarize": "vitrail.inspection.summary",
}
__all__ = ["ConfigError", "VitrailError", "create", "list_models", "summarize"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
