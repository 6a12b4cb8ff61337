"""A model into a checkpoint of any layout that can hold it, whole or not at all."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.reading import (
    check_tensors_fit_model,
    get_family,
    get_layout,
    list_layouts,
    read_translated_checkpoint,
)
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.models.catalog import load_families
from vitrail.models.checks import pair
from vitrail.models.family import Family

GELU_NAMES = ("gelu", "gelu_tanh")


def write(
    model: nn.Module,
    path: str | Path,
    to: str = "vitrail",
    *,
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    resampling: ResamplingPolicy = "timm",
    family: Family | None = None,
) -> None:
    """Writes the model and what is known of it, in our own layout or the one that `to` names.

    Warns of what is lost, and where whoever reads it would compute something else, of how much. `family` is only for a
    model from outside the package.
    """
    if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(f"the place is {path!r}; expected a path")
    layout = get_layout(to)
    if family is not None and to != "vitrail":
        raise CheckpointError(f"{to} holds families of the package; expected to='vitrail' for {family.name!r}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    family = family or find_model_family(model)
    config: Any = model.config
    if to != "vitrail" and family.name not in layout.families:
        holding = ", ".join(
            each.name for each in list_layouts() if each.name == "vitrail" or family.name in each.families
        )
        raise CheckpointError(f"{to} has no place for a model of the family {family.name!r}; expected one of {holding}")
    try:
        description = Description(
            family=family.name,
            config=asdict(config),
            preprocessing=preprocessing,
            labels=None if labels is None else tuple(labels),
            provenance={"vitrail": __version__, **(provenance or {})},
            resampling=resampling,
        )
        text = description.to_json()
        text.encode("utf-8")  # half a surrogate pair is JSON, but cannot be written
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be written as JSON: {error}; expected labels and provenance of texts") from None
    check_label_count(Description.from_json(text, "the description"))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        check_tensors_fit_model(family.build(config), tensors, "the model")
    assumed = layout.write({name: tensor.cpu() for name, tensor in tensors.items()}, description, Path(path))
    warn_of_losses(to, Path(path), description)
    for name, theirs in assumed.items():
        ours = getattr(config, name, "gelu" if (name, family.name) == ("activation", "deit") else theirs)
        if ours != theirs and (name != "activation" or ours in GELU_NAMES):
            apart, deviation = measure_output_difference(family, config, {name: theirs}, tensors)
            warnings.warn(
                f"{to} cannot say {name} {ours!r}, and its readers run with {theirs!r}: "
                f"outputs differ by up to {apart:.1e} (their deviation is {deviation:.1e}) on random images",
                stacklevel=2,
            )


save = write  # the package's own word for it, beside load


def warn_of_losses(to: str, path: Path, description: Description) -> None:
    """Reads back what was written and warns of what the layout cannot store: heads, size, preprocessing, labels."""
    if to == "vitrail":
        return
    how, config = description.preprocessing, description.config
    known = {"heads": config.get("heads"), "trained_size": pair(config["image_size"])}
    known = {name: value for name, value in known.items() if value is not None}
    try:
        back = read_translated_checkpoint(path, to, known).description
    except CheckpointError as error:
        warnings.warn(f"written, but cannot be read back without more being said: {error}", stacklevel=3)
        return
    with suppress(CheckpointError):  # a reader that asks or warns is not silently wrong
        alone = read_translated_checkpoint(path, to, {})
        for name, said_as in (("heads", "heads"), ("image_size", "trained_size")):
            ours, theirs = config.get(name), alone.description.config.get(name)
            if name in config and ours != theirs and said_as not in alone.assumed:
                warnings.warn(f"{to} cannot say {name} {ours!r}, and its readers take {theirs!r}: {path}", stacklevel=3)
    if description.labels is not None and back.labels is None:
        warnings.warn(f"{to} has no place for {len(description.labels)} labels in {path}: left out", stacklevel=3)
    if how is None or back.preprocessing is None:
        return
    for name in ("mean", "std", "fit", "interpolation", "crop"):
        ours, theirs = getattr(how, name), getattr(back.preprocessing, name)
        side = pair(how.image_size)[0]
        if ours != theirs and not (name == "crop" and floor(side / ours) == floor(side / theirs)):
            warnings.warn(f"{to} cannot say {name} {ours!r}, and its readers take {theirs!r}: {path}", stacklevel=3)


@torch.no_grad()
def measure_output_difference(
    family: Family, config: Any, change: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[float, float]:
    """The largest difference that a changed field makes to outputs, and the outputs' own deviation."""
    size = (2, config.channels, *config.image_size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    outputs = list[Tensor]()
    if not all(hasattr(config, name) for name in change):  # a DeiT is a ViT that says less
        family = get_family("vit", "the model")
        names = family.config.__dataclass_fields__
        config = family.configure(**{name: value for name, value in asdict(config).items() if name in names})
    for each in (config, family.configure(config, **change)):
        with torch.device("meta"):
            model = family.build(each)
        model.load_state_dict({name: tensor.float().cpu() for name, tensor in tensors.items()}, assign=True)
        outputs.append(model.eval()(images))
    return (outputs[0] - outputs[1]).abs().max().item(), outputs[0].std().item()


def check_label_count(description: Description) -> None:
    classes = description.config.get("classes")
    if description.labels is not None and len(description.labels) != classes:
        raise CheckpointError(f"{len(description.labels)} labels for {classes} classes; expected one a class")


def find_model_family(model: nn.Module) -> Family:
    for family in load_families():
        if type(getattr(model, "config", None)) is family.config:
            return family
    kind = type(model).__name__
    raise CheckpointError(f"{kind} is of no family of the package; expected family=…, the FAMILY of its module")
