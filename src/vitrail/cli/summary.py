"""vitrail summary: a model layer by layer."""

import json as jsonlib
from dataclasses import asdict
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from vitrail.errors import ConfigError


def summary(
    model: str,
    /,
    *,
    image_size: str | None = None,
    classes: int | None = None,
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    batch: int = 1,
    depth: int = 2,
    json: bool = False,
) -> None:
    """Show a model layer by layer: output shape, parameters, MACs; totals with bare parameters, memory estimate.

    Nothing is computed or downloaded, so the largest models take no longer than the smallest.

    Examples::

        vitrail summary ViT-B/16
        vitrail summary vit_base_patch16_224 --image-size 384x256 --classes 10
        vitrail summary DeiT-Ti-distilled --depth 4
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
    set
        Any other field of the model's config, as FIELD=VALUE; may be repeated.
    batch
        Images in the batch that shapes, MACs and memory are given for.
    depth
        How deep to go into modules: 1 shows the parts of the model, 2 its blocks, 4 every layer.
    json
        Print JSON instead of a table.
    """
    fields: dict[str, Any] = dict(parse_field(item) for item in set or ())
    if image_size is not None:
        fields["image_size"] = parse_size(image_size)
    if classes is not None:
        fields["classes"] = classes
    if batch < 1 or depth < 1:
        raise ConfigError(f"--batch {batch} --depth {depth}; expected both to be 1 or more")

    import torch

    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog import create

    with torch.device("meta"):
        found = summarize(create(model, **fields), batch=batch, depth=depth)
    print(jsonlib.dumps(asdict(found), indent=2) if json else found)


def parse_size(text: str) -> tuple[int, int]:
    parts = text.replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--image-size {text!r}; expected pixels such as 384, or rows x columns such as 384x256")
    return (int(parts[0]), int(parts[-1]))


def parse_field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if name and equals:
            return name.replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise ConfigError(f"--set {text!r}; expected FIELD=VALUE, such as pool=mean or stages=[3,4,9]")
