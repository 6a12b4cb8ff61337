"""vitrail summary: show a model layer by layer."""

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import parse_field, parse_fields, parse_size


def summary(
    model: str,
    /,
    *,
    image_size: Annotated[str | None, Parameter(help="Image size: 384, or rows x columns: 384x256.")] = None,
    classes: str | None = None,
    fields: Annotated[
        list[str] | None,
        Parameter(name="--set", negative=(), help="Set a config field, as FIELD=VALUE. May be repeated."),
    ] = None,
    batch: int = 1,
    depth: int = 2,
    as_json: flags.Json = False,
) -> None:
    """Show a model layer by layer: output shape, parameters, MACs; totals with bare parameters, memory estimate.

    Nothing is computed or downloaded, so large models take no longer than small ones. The summary lists all config
    fields.

    Examples::

        vitrail summary ViT-B/16
        vitrail summary vit_base_patch16_224 --image-size 384x256 --classes 10
        vitrail summary DeiT-Ti-distilled --depth 9
        vitrail summary ViT-S/16 --set positions=rotary --set pool=mean
        vitrail summary examples/own_family.py:mixer_tiny

    Parameters
    ----------
    model
        A name or alias that `vitrail models` lists, a run or a checkpoint, or a family of your own:
        package.module:preset, file.py:preset.
    classes
        Number of outputs of the head.
    batch
        Batch size for shapes, MACs and memory.
    depth
        Nesting depth: 1 shows the parts of the model, 2 its blocks, 9 every layer.
    """
    given = parse_fields(fields)
    if image_size is not None:
        given["image_size"] = parse_size(image_size)
    if classes is not None:
        given |= [parse_field(f"classes={classes}")]

    from vitrail.inspection.summary import summarize
    from vitrail.loading import build_without_weights

    found = summarize(build_without_weights(model, given), batch=batch, depth=depth)
    print(json.dumps(asdict(found), indent=2) if as_json else found)
