"""From the name of a model to its place on this machine: a path, a bundled model, hf-hub:… or a preset.

An image that is given as a model, and a model that is given as an image, are recognized here, too. torch is not
imported, so that a wrong name and a missing network are reported at once.
"""

import os
import warnings
from pathlib import Path

from vitrail.base.errors import CheckpointError, CheckpointWarning, DataError, find_nearest_name
from vitrail.base.files import WEIGHTS_FILE_SUFFIXES, get_cache_folder, open_regular_file_descriptor, suggest_sibling
from vitrail.checkpoint import hub
from vitrail.checkpoint.run_files import PLAN_FILE
from vitrail.checkpoint.weight_folders import WEIGHT_SUFFIXES, find_bundled_model, list_bundled_models
from vitrail.data.images.decoding.image_formats import detect_image_format
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.models.catalog.external_families import is_external_family_name
from vitrail.models.catalog.preset_costs import resolve_alias
from vitrail.models.catalog.pretrained import (
    PretrainedWeights,
    find_pretrained_weights,
    find_weights_by_repository,
    list_model_names,
    list_weights_of_preset,
)

UNVERIFIED = "its weights were not verified"
ORDER = "The model comes first, then the images"
MODEL_FILES = (PLAN_FILE, "model.safetensors", "pytorch_model.bin", "model.onnx", "model.pt2")  # of a folder
RESTRICTED_LICENSES = {
    "cc-by-nc-4.0": "which forbids commercial use",
    "fair-noncommercial-research-license": "which allows non-commercial research only",
    "dinov3-license": "which forbids some uses and must be passed on with the weights",
    "cvnets-license": "which is Apple's own and must be passed on with the weights",
}


def locate_or_download_checkpoint(path: str | Path) -> Path:
    """The file or folder of a model, which is downloaded if it is on the hub."""
    check_is_path(path)
    if str(path).startswith(EXAMPLE_PREFIX):
        raise image_as_model_error(path)
    if hub.is_hub_name(path):
        return hub.download_model(str(path))
    if (weights := find_named_weights(path)) is not None:
        return locate_pretrained_weights(weights, str(path))
    if (bundled := find_bundled_model(path)) is not None:
        return bundled
    refuse_missing_path(path)
    return Path(path)


def check_model_exists(name: str) -> None:
    """Refuse a path that does not exist; a name with a colon is not a path, but checked when it is opened."""
    if name and ":" not in name and not is_model_name(name):
        refuse_missing_path(name)


def refuse_missing_path(path: str | Path) -> None:
    """An error for a path that does not exist, with the nearest file next to it or the nearest name of a model."""
    try:
        Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # not a name that is too long
        pass
    else:
        return
    if is_external_family_name(str(path)):
        raise CheckpointError(f"{path} has no weights; expected a run or a checkpoint: train it with `model` {path}")
    hint = suggest_sibling(path)
    nearest = None if hint else find_nearest_name(str(path), (*list_bundled_models(), *list_model_names()))
    if nearest is not None:
        raise CheckpointError(f"{path} is neither a file nor the name of a model; did you mean {nearest!r}?")
    raise CheckpointError(f"{path} does not exist; expected a checkpoint file or folder{hint}")


def check_is_path(path: object) -> None:
    if not isinstance(path, str | Path) or not str(path):
        given = repr(path) if isinstance(path, str | int | float | None) else f"a {type(path).__name__}"
        raise CheckpointError(f"the checkpoint is {given}; expected a path or a name")


def find_named_weights(name: str | Path) -> PretrainedWeights | None:
    """The public weights of a name; None for another name. An existing path and a bundled model win over a preset."""
    check_is_path(name)
    if hub.is_hub_name(name):
        return find_weights_by_repository(str(name).removeprefix(hub.HUB_PREFIX).partition("@")[0])
    if os.path.lexists(name) or find_bundled_model(name) is not None:
        return None
    return find_pretrained_weights(str(name))


def find_location_warnings(path: str | Path, place: Path) -> tuple[str, ...]:
    """What to say about where the files of a model are; files that differ from those on the hub are an error."""
    if os.path.lexists(path):
        hidden = f"it is a file or folder here, which is used instead of the model of this name; write ./{path}"
        return (hidden,) if is_model_name(str(path)) else ()
    weights = find_named_weights(path)
    if weights is None and not hub.is_hub_name(path):
        return ()
    repository = hub.parse_hub_name(str(path))[0] if weights is None else weights.repository
    unverified = hub.verify_weights(place, repository)
    return (f"{UNVERIFIED}, since the SHA-256 of {unverified} on the hub is not known",) if unverified else ()


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


def locate_pretrained_weights(weights: PretrainedWeights, name: str) -> Path:
    """The folder with the weights: in vitrail's cache, else in that of the hub, else downloaded to it."""
    folders = list_local_folders(weights)
    for folder in folders:
        if folder.is_dir() and any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()):
            return folder
    hub_name = f"{hub.HUB_PREFIX}{weights.repository}"
    file = f"{weights.file} from https://huggingface.co/{weights.repository} into {format_path(folders[0])}/"
    try:
        if not is_downloaded(weights):
            warn_about_license(weights, name)
        return hub.download_model(hub_name, prefer_cache=True)
    except hub.HubUnreachableError as error:
        raise CheckpointError(f"{name} is not downloaded and {error.reason}. Put {file}") from None
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{hub_name}: ")
        raise CheckpointError(f"{name} cannot be downloaded: {reason}. Or put {file}") from None


def is_downloaded(weights: PretrainedWeights) -> bool:
    """Whether the weights are in the hub's cache; True if its package is missing, which the download reports."""
    try:
        return hub.find_cached_model(weights.repository, None) is not None
    except ImportError:
        return True


def warn_about_license(weights: PretrainedWeights, name: str) -> None:
    """Say once, when weights are downloaded, that their license restricts their use."""
    if restriction := RESTRICTED_LICENSES.get(weights.license):
        page = f"https://huggingface.co/{weights.repository}"
        text = f"{name} is under the license {weights.license}, {restriction}; read it at {page}"
        warnings.warn(CheckpointWarning(text), stacklevel=2)


def list_local_folders(weights: PretrainedWeights) -> list[Path]:
    """Folders in which a user can put the weights: by preset for the default ones, and by preset and tag for all."""
    is_default = list_weights_of_preset(weights.preset)[0] == weights
    return [get_cache_folder() / name for name in ([weights.preset] if is_default else []) + [weights.name]]


def format_path(path: Path) -> str:
    """The path, with ~ for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
