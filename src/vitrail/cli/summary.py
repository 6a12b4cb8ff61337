"""vitrail summary: a model layer by layer."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.errors import ConfigError
from vitrail.json_yaml import parse_yaml


def summary(
    model: str,
    /,
    *,
    image_size: str | None = None,
    classes: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    batch: int = 1,
    depth: int = 2,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show a model layer by layer: output shape, parameters, MACs; totals with bare parameters, memory estimate.

    Nothing is computed or downloaded, so the largest models take no longer than the smallest.

    Examples::

        vitrail summary ViT-B/16
        vitrail summary vit_base_patch16_224 --image-size 384x256 --classes 10
        vitrail summary DeiT-Ti-distilled --depth 9
        vitrail summary ViT-S/16 --set positions=rotary --set pool=mean
        vitrail summary examples/own_family.py:mixer_tiny

    Parameters
    ----------
    model
        A name or alias that `vitrail models` lists, or a family of your own: package.module:preset, file.py:preset.
    image_size
        Pixels: 384, or rows x columns: 384x256.
    classes
        Outputs of the head.
    fields
        Any field of the model's config, as FIELD=VALUE; may be repeated. The summary begins with all fields.
    batch
        Images in the batch that shapes, MACs and memory are given for.
    depth
        How deep to go into modules: 1 shows the parts of the model, 2 its blocks, 9 every layer.
    as_json
        Print JSON instead of a table.
    """
    given: dict[str, Any] = dict(parse_field(item) for item in fields or ())
    if image_size is not None:
        given["image_size"] = parse_size(image_size)
    if classes is not None:
        given |= [parse_field(f"classes={classes}")]

    import torch

    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog import create

    with torch.device("meta"):
        found = summarize(create(model, **given), batch=batch, depth=depth)
    print(json.dumps(asdict(found), indent=2) if as_json else found)


def parse_size(text: str, option: str = "--image-size") -> tuple[int, int]:
    parts = text.replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"{option} {text!r}; expected pixels such as 384, or rows x columns such as 384x256")
    return (int(parts[0]), int(parts[-1]))


def parse_fields(items: Iterable[str] | None) -> dict[str, Any]:
    """The values of --set for a checkpoint: config fields, or trained_size."""
    given = dict(parse_field(item) for item in items or ())
    if no_fields := given.keys() & {"path", "source", "family", "policy"}:  # other arguments of `read`
        raise ConfigError(f"--set {min(no_fields)}=…; expected a field of the config, such as heads=3")
    return given


def parse_field(text: str, option: str = "--set") -> tuple[str, Any]:
    """FIELD=VALUE; a value is read as YAML, but 1e-5 as the number that everyone means by it, and 32x128 as a size."""
    name, equals, value = text.partition("=")
    if name and equals:
        if re.fullmatch(r"\d{1,9}[x×]\d{1,9}", value):
            return name.replace("-", "_"), parse_size(value)
        with suppress(ValueError):
            return name.replace("-", "_"), float(value) if set(value) & set(".eE") else int(value)
        with suppress(ValueError):
            return name.replace("-", "_"), parse_yaml(value)
    raise ConfigError(f"{option} {text[:60]!r}; expected FIELD=VALUE, such as pool=mean or stages=[3,4,9]")
