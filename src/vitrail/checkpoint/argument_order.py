"""Recognise an image that is given as a model, and a model that is given as an image. torch is not imported."""

import os
from pathlib import Path

from vitrail.base.errors import CheckpointError, DataError
from vitrail.base.files import WEIGHTS_FILE_SUFFIXES, open_regular_file_descriptor
from vitrail.checkpoint.bundled import list_bundled_models
from vitrail.checkpoint.run_files import PLAN_FILE
from vitrail.data.images.decoding.image_formats import detect_image_format
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.models.catalog.preset_list import resolve_alias

ORDER = "The model comes first, then the images"
MODEL_FILES = (PLAN_FILE, "model.safetensors", "pytorch_model.bin", "model.onnx", "model.pt2")  # of a folder


def refuse_image_as_model(path: str | Path) -> None:
    if str(path).startswith(EXAMPLE_PREFIX) or is_image_file(path):
        raise image_as_model_error(path)


def image_as_model_error(path: str | Path) -> CheckpointError:
    return CheckpointError(f"{path} is an image. {ORDER}")


def is_image_file(path: str | Path) -> bool:
    """Whether the first bytes of a file are those of an image."""
    try:
        with os.fdopen(open_regular_file_descriptor(path), "rb") as file:
            return detect_image_format(file.read(16)) is not None
    except (OSError, ValueError):
        return False


def model_as_image_error(argument: str) -> DataError | None:
    """The error for a model that is given as an image; None if it is not a model."""
    return DataError(f"{argument} is a model. {ORDER}") if is_model(argument) else None


def is_model(argument: str) -> bool:
    """Whether an argument is the name of a model, a file of weights, or a folder with a model in it."""
    if not os.path.lexists(argument):
        return is_model_name(argument)
    if os.path.isdir(argument):  # noqa: PTH112  # Path.is_dir raises if a name is too long
        return any((Path(argument) / name).is_file() for name in MODEL_FILES)
    return argument.endswith((*WEIGHTS_FILE_SUFFIXES, ".onnx"))


def is_model_name(name: str) -> bool:
    return name in list_bundled_models() or resolve_alias(name.partition(".")[0]) is not None
