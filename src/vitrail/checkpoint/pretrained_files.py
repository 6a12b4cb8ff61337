"""Find or download the public weights that a name stands for, and what the table says about a file of weights."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import CheckpointError, CheckpointWarning
from vitrail.base.files import get_cache_folder
from vitrail.checkpoint import hub
from vitrail.checkpoint.files.weight_folders import WEIGHT_SUFFIXES
from vitrail.data.images.class_names import list_imagenet_labels
from vitrail.models.catalog.pretrained import PretrainedWeights, read_pretrained_table

if TYPE_CHECKING:
    from vitrail.checkpoint.files.raw_contents import RawContents

RESTRICTED_LICENSES = {
    "cc-by-nc-4.0": "which forbids commercial use",
    "fair-noncommercial-research-license": "which allows non-commercial research only",
    "dinov3-license": "which forbids some uses and must be passed on with the weights",
    "cvnets-license": "which is Apple's own and must be passed on with the weights",
}


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
    """Say once, when weights are downloaded, that their licence restricts their use."""
    if restriction := RESTRICTED_LICENSES.get(weights.license):
        page = f"https://huggingface.co/{weights.repository}"
        text = f"{name} is under the licence {weights.license}, {restriction}; read it at {page}"
        warnings.warn(CheckpointWarning(text), stacklevel=2)


def list_local_folders(weights: PretrainedWeights) -> list[Path]:
    """Folders in which a user can put the weights: by preset for the default ones, and by preset and tag for all."""
    is_default = read_pretrained_table()[weights.preset][0] == weights
    return [get_cache_folder() / name for name in ([weights.preset] if is_default else []) + [weights.name]]


def format_path(path: Path) -> str:
    """The path, with ~ for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def add_timm_config(contents: "RawContents", weights: PretrainedWeights) -> "RawContents":
    """The contents with the architecture and preprocessing of the table in config.json, as far as it lacks them."""
    config = contents.config or {}
    known: dict[str, Any] = {
        "input_size": [len(weights.mean), weights.image_size, weights.image_size],
        "crop_pct": weights.crop,
        "crop_mode": "squash" if weights.fit == "squash" else "center",
        "interpolation": weights.interpolation,
        "mean": list(weights.mean),
        "std": list(weights.std),
    }
    given = config.get("pretrained_cfg")
    if isinstance(given, dict):
        known |= {name: value for name, value in given.items() if value is not None}
    return replace(contents, config={"architecture": weights.preset, **config, "pretrained_cfg": known})


def get_known_labels(weights: PretrainedWeights | None, classes: int) -> tuple[str, ...] | None:
    """The names of ImageNet's classes for weights that were trained on it."""
    if weights is None or not weights.has_imagenet_classes or classes != len(list_imagenet_labels()):
        return None
    return list_imagenet_labels()
