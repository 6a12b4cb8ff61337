"""Our own format: a folder of model.safetensors and config.json.

The weights carry a copy of the description in their header, and both copies the number of the save they come from.
Replacing one file is atomic, replacing two is not: if a save was cut off between them the numbers differ, and the
weights' own copy is used, since it is the one that fits them.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
from vitrail.checkpoint.resample import Policy
from vitrail.errors import CheckpointError, ConfigError, unknown
from vitrail.models.catalog import families
from vitrail.models.family import Family

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADER = "vitrail"  # the key of the description in the weights' header


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
    family = family or family_of(model)
    config: Any = model.config
    if labels is not None and len(labels) != config.classes:
        raise CheckpointError(f"{len(labels)} labels for {config.classes} classes; expected one a class")
    description = Description(
        family=family.name,
        config=asdict(config),
        preprocessing=preprocessing,
        labels=None if labels is None else tuple(labels),
        provenance={"vitrail": __version__, **(provenance or {})},
        save=uuid4().hex,
    )
    try:
        text = description.to_json()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"provenance cannot be written as JSON: {error}; expected texts and numbers") from None
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror}") from error
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    write_whole(folder / WEIGHTS, lambda path: save_file(tensors, path, {HEADER: text}))
    write_whole(folder / CONFIG, lambda path: path.write_text(text, "utf-8"))


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
    folder = Path(folder)
    with opened(folder) as file:
        description = description_of(folder, file)
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    family = family or known_family(description.family, folder)
    try:
        config = family.configure(**description.config)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    with torch.device("meta"):
        model = source = family.build(config)
        check_tensors(source, tensors, folder / WEIGHTS)
        if fields:
            model = family.build(adapted(config, family.configure(config, **fields)))
    fitted, report = fit(tensors, source, model, policy)
    model.load_state_dict(fitted, assign=True)
    return model, report


def describe(folder: str | Path) -> Description:
    """What the folder says of itself: family, config, preprocessing, labels, provenance."""
    with opened(Path(folder)) as file:
        return description_of(Path(folder), file)


@contextmanager
def opened(folder: Path) -> Generator[Any]:
    """The weights' file; what is wrong with it, then or while it is read, is a CheckpointError."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a folder that `vitrail.save` wrote")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; it may be truncated or not safetensors") from None


def description_of(folder: Path, file: Any) -> Description:
    header: str | None = (file.metadata() or {}).get(HEADER)
    inside = None if header is None else Description.from_json(header, f"the header of {folder / WEIGHTS}")
    try:
        beside = Description.from_json((folder / CONFIG).read_text("utf-8"), str(folder / CONFIG))
    except (FileNotFoundError, CheckpointError):
        if inside is None:
            raise
        return inside
    return beside if inside is None or beside.save == inside.save else inside


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


def check_tensors(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor of the model is there, of its shape, and no other."""
    expected = model.state_dict()
    wrong = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [n for n, t in tensors.items() if n in expected and t.shape != expected[n].shape],
        "not of floats": [name for name, tensor in tensors.items() if not tensor.is_floating_point()],
    }
    found = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for what, names in wrong.items()
        if names
    ]
    if found:
        raise CheckpointError(f"{path} does not fit its config: {'; '.join(found)} of {len(expected)} tensors")
