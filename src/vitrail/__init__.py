"""vitrail, a Vision Transformer toolbox in code that can be read in one sitting.

The public names, resolved on first use: importing this package imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail import checkpoint, machine
    from vitrail.checkpoint.reading import describe, load
    from vitrail.checkpoint.writing import save
    from vitrail.data.datasets import open_data
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.errors import CheckpointError, ConfigError, DataError, VitrailError
    from vitrail.export.export import export_model
    from vitrail.inspection.explain import Explainer
    from vitrail.inspection.model_figures import look
    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog import create, list_models
    from vitrail.predict.predictor import Predictor
    from vitrail.study.compare import compare
    from vitrail.train.evaluate import evaluate
    from vitrail.train.fit import fit
    from vitrail.train.recipe import open_recipe
    from vitrail.train.teacher import Teacher

__version__ = "0.1.0"

_MODULES_BY_NAME = {
    "CheckpointError": "vitrail.errors",
    "ConfigError": "vitrail.errors",
    "DataError": "vitrail.errors",
    "VitrailError": "vitrail.errors",
    "Explainer": "vitrail.inspection.explain",
    "Predictor": "vitrail.predict.predictor",
    "Preprocessing": "vitrail.data.preprocessing",
    "Teacher": "vitrail.train.teacher",
    "compare": "vitrail.study.compare",
    "create": "vitrail.models.catalog",
    "describe": "vitrail.checkpoint.reading",
    "evaluate": "vitrail.train.evaluate",
    "export_model": "vitrail.export.export",
    "fit": "vitrail.train.fit",
    "list_models": "vitrail.models.catalog",
    "load": "vitrail.checkpoint.reading",
    "look": "vitrail.inspection.model_figures",
    "open_data": "vitrail.data.datasets",
    "open_recipe": "vitrail.train.recipe",
    "save": "vitrail.checkpoint.writing",
    "summarize": "vitrail.inspection.summary",
}
__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Explainer",
    "Predictor",
    "Preprocessing",
    "Teacher",
    "VitrailError",
    "checkpoint",
    "compare",
    "create",
    "describe",
    "evaluate",
    "export_model",
    "fit",
    "list_models",
    "load",
    "look",
    "machine",
    "open_data",
    "open_recipe",
    "save",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "machine"):
        return import_module(f"vitrail.{name}")
    if name not in _MODULES_BY_NAME:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    return getattr(import_module(_MODULES_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES_BY_NAME, "checkpoint", "machine"]
