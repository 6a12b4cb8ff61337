"""vitrail summary: a model layer by layer."""

import json
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.options.values import parse_field, parse_size


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
