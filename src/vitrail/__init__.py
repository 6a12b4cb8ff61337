"""vitrail trains, explains and exports Vision Transformers.

The public names are imported on first use: importing this package imports nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrail.base.machine import bound_spinning

if TYPE_CHECKING:
    from vitrail import checkpoint
    from vitrail.base import machine
    from vitrail.base.errors import CheckpointError, ConfigError, DataError, VitrailError
    from vitrail.checkpoint.reading import create, describe, load
    from vitrail.checkpoint.writing import save
    from vitrail.data.images.datasets import open_data
    from vitrail.data.images.preprocessing import Preprocessing
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.probes.probe import probe
    from vitrail.export.export import export_model
    from vitrail.inspection.explain.explainer import Explainer
    from vitrail.inspection.model_figures import look
    from vitrail.inspection.representation.nearest_neighbors import find_neighbors
    from vitrail.inspection.representation.patch_pca import draw_patch_pca
    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog.families import list_models
    from vitrail.opening import open_model
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.predictor import Predictor
    from vitrail.predict.search.settings import SearchSettings
    from vitrail.predict.translator import Translator
    from vitrail.recipes.recipe import open_recipe
    from vitrail.study.compare import compare
    from vitrail.tasks.teacher import Teacher
    from vitrail.train.fit import fit

__version__ = "0.1.0"

_MODULES = ("checkpoint", "machine")  # the public names that are modules
_MODULES_BY_NAME = {
    "Captioner": "predict.captioner",
    "CheckpointError": "base.errors",
    "ConfigError": "base.errors",
    "DataError": "base.errors",
    "Explainer": "inspection.explain.explainer",
    "Predictor": "predict.predictor",
    "Preprocessing": "data.images.preprocessing",
    "SearchSettings": "predict.search.settings",
    "Teacher": "tasks.teacher",
    "Translator": "predict.translator",
    "VitrailError": "base.errors",
    "checkpoint": "checkpoint",
    "compare": "study.compare",
    "create": "checkpoint.reading",
    "describe": "checkpoint.reading",
    "draw_patch_pca": "inspection.representation.patch_pca",
    "evaluate": "evaluation.evaluate",
    "export_model": "export.export",
    "find_neighbors": "inspection.representation.nearest_neighbors",
    "fit": "train.fit",
    "list_models": "models.catalog.families",
    "load": "checkpoint.reading",
    "look": "inspection.model_figures",
    "machine": "base.machine",
    "open_data": "data.images.datasets",
    "open_model": "opening",
    "open_recipe": "recipes.recipe",
    "probe": "evaluation.probes.probe",
    "save": "checkpoint.writing",
    "summarize": "inspection.summary",
}
__all__ = [  # a list of its own, which type checkers can read
    "Captioner",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Explainer",
    "Predictor",
    "Preprocessing",
    "SearchSettings",
    "Teacher",
    "Translator",
    "VitrailError",
    "checkpoint",
    "compare",
    "create",
    "describe",
    "draw_patch_pca",
    "evaluate",
    "export_model",
    "find_neighbors",
    "fit",
    "list_models",
    "load",
    "look",
    "machine",
    "open_data",
    "open_model",
    "open_recipe",
    "probe",
    "save",
    "summarize",
]


bound_spinning()  # before torch is imported, which reads the setting once


def __getattr__(name: str) -> Any:  # importing the package imports no public name
    name = "find_neighbors" if name == "find_neighbours" else name  # the former name
    if name not in _MODULES_BY_NAME:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    module = import_module(f"vitrail.{_MODULES_BY_NAME[name]}")
    return module if name in _MODULES else getattr(module, name)  # a public name, listed above


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
