"""Our own format: a folder of model.safetensors and config.json.

The weights carry a copy of the description in their header, and both copies the number of the save they come from.
Replacing one file is atomic, replacing two is not: if a save was cut off between them the numbers differ, and the
weights' own copy is used, since it is the one that fits them.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail import __version__
from vitrail.checkpoint.atomic import write_whole
from vitrail.checkpoint.description import Description, Preprocessing
from vitrail.checkpoint.fit import adapted, fit
from vitrail.checkpoint.report import LoadReport
from vitrail.checkpoint.resample import RULES, Policy
from vitrail.errors import CheckpointError, ConfigError, unknown
from vitrail.models.catalog import families
from vitrail.models.family import Family

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADER = "vitrail"  # the key of the description in the weights' header
LARGEST_CONFIG = 2**24  # bytes


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    family: Family | None = None,
) -> None:
    """Writes the model and its description; `family` only for one from outside the package."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    family = family or family_of(model)
    config: Any = model.config
    try:
        description = Description(
            family=family.name,
            config=asdict(config),
            preprocessing=preprocessing,
            labels=None if labels is None else tuple(labels),
            provenance={"vitrail": __version__, **(provenance or {})},
            save=uuid4().hex,
        )
        text = description.to_json()
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}; expected labels and provenance of texts") from None
    check_labels(Description.from_json(text, "the description"), "the description")
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        check_tensors(family.build(config), tensors, "the model")
    place = as_folder(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot make the folder {place}: {getattr(error, 'strerror', error)}") from error
    write_whole(place / WEIGHTS, lambda path: save_file(tensors, path, {HEADER: text}))
    write_whole(place / CONFIG, lambda path: path.write_text(text, "utf-8"))


def load(folder: str | Path, *, family: Family | None = None, policy: Policy = "timm", **fields: Any) -> Any:
    """The model that `save` wrote, or one made from it for another use: load(path, image_size=384, classes=37).

    Positions are resampled to another image size by the named policy, the patch kernel to another patch size as
    FlexiViT does it, and a head for other classes starts at zero. `family` is for a model from outside the package:
    nothing in the folder is run, so a family is looked up by name among those of the package and never imported.
    """
    return read(folder, family=family, policy=policy, **fields)[0]


def read(
    folder: str | Path, *, family: Family | None = None, policy: Policy = "timm", **fields: Any
) -> tuple[Any, LoadReport]:
    """`load`, and what it did with every tensor."""
    if policy not in tuple(RULES):
        raise unknown("position policy", policy, RULES)
    place = as_folder(folder)
    with opened(place) as file:
        description = description_of(place, file)
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    family = family or known_family(description.family, place)
    if family.name != description.family:
        raise CheckpointError(f"{place} is of the family {description.family!r}; family={family.name!r} was given")
    try:
        config = family.configure(**description.config)
        blocks = getattr(config, "depth", 0) + sum(getattr(config, "stages", ()))
        if blocks > len(tensors):  # before a model of a million blocks is built for nothing
            raise CheckpointError(f"{place}: {blocks} blocks and {len(tensors)} tensors; expected more tensors")
        with torch.device("meta"):
            source = family.build(config)
    except (ConfigError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{place / CONFIG}: {str(error)[:200]}") from None
    check_tensors(source, tensors, str(place / WEIGHTS))
    model = source
    if fields:
        with torch.device("meta"):
            model = family.build(adapted(config, family.configure(config, **fields)))
    fitted, report = fit(tensors, source, model, policy)
    model.load_state_dict(fitted, assign=True)
    return model, report


def describe(folder: str | Path) -> Description:
    """What the folder says of itself: family, config, preprocessing, labels, provenance."""
    place = as_folder(folder)
    with opened(place) as file:
        return description_of(place, file)


def as_folder(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"the folder is {folder!r}; expected a path")
    return Path(folder)


@contextmanager
def opened(folder: Path) -> Generator[Any]:
    """The weights' file; what is wrong with it, then or while it is read, is a CheckpointError."""
    path = folder / WEIGHTS
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; expected a folder that `vitrail.save` wrote")
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be read: {reason}; it may be truncated or not safetensors") from None


def description_of(folder: Path, file: Any) -> Description:
    """config.json, as a person may have edited it; but family and config only as the weights were saved with them."""
    header: str | None = (file.metadata() or {}).get(HEADER)
    inside = None if header is None else Description.from_json(header, f"the header of {folder / WEIGHTS}")
    path = folder / CONFIG
    if inside is not None and not path.exists():
        return inside
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
            raise CheckpointError(f"{path} is missing, no file, or too large; expected what `vitrail.save` wrote")
        beside = Description.from_json(path.read_text("utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; expected what `vitrail.save` wrote") from None
    if inside is None:
        return beside
    if beside.save not in ("", inside.save):  # of another save: this one was cut off before it reached config.json
        return inside
    for name, value in {"family": beside.family, **beside.config}.items():
        saved = inside.family if name == "family" else inside.config.get(name)
        if value != saved:
            given = f"{name} {repr(value)[:40]}, but the weights were saved with {repr(saved)[:40]}"
            raise CheckpointError(f"{path} says {given}; expected the same (load can adapt: load(path, image_size=…))")
    check_labels(beside, str(path))
    return replace(beside, config=inside.config)


def check_labels(description: Description, where: str) -> None:
    classes = description.config.get("classes")
    if description.labels is not None and len(description.labels) != classes:
        raise CheckpointError(f"{where}: {len(description.labels)} labels for {classes} classes; expected one a class")


def family_of(model: nn.Module) -> Family:
    for family in families():
        if type(getattr(model, "config", None)) is family.config:
            return family
    kind = type(model).__name__
    raise CheckpointError(f"{kind} is of no family of the package; expected family=…, the FAMILY of its module")


def known_family(name: str, folder: Path) -> Family:
    known = {family.name: family for family in families()}
    if name not in known:
        hint = unknown("family", name, known)
        raise CheckpointError(f"{folder}: {hint} (for one from outside, give family=…)")
    return known[name]


def check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Every tensor of the model is there, of its shape, and no other."""
    expected = model.state_dict()
    wrong = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [n for n, t in tensors.items() if n in expected and t.shape != expected[n].shape],
        "not of floats": [name for name, tensor in tensors.items() if not tensor.is_floating_point()],
        "without values": [name for name, tensor in tensors.items() if tensor.is_meta],
    }
    found = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for what, names in wrong.items()
        if names
    ]
    if found:
        raise CheckpointError(f"{where} does not fit its config: {'; '.join(found)} of {len(expected)} tensors")
