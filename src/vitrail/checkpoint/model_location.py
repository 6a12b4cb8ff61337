"""From the name of a model to its place on this machine: a path, a bundled model, hf-hub:… or a preset.

torch is not imported, so that a wrong name and a missing network are reported at once.
"""

import os
from pathlib import Path

from vitrail.base.errors import CheckpointError, find_nearest_name
from vitrail.base.files import suggest_sibling
from vitrail.checkpoint import hub
from vitrail.checkpoint.argument_order import image_as_model_error, is_model_name
from vitrail.checkpoint.bundled import find_bundled_model, list_bundled_models
from vitrail.checkpoint.pretrained_files import locate_pretrained_weights
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.models.catalog.pretrained import (
    PretrainedWeights,
    find_pretrained_weights,
    find_weights_by_repository,
    list_model_names,
)

UNVERIFIED = "its weights were not verified"


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
