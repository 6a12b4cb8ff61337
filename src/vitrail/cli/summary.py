"""vitrail summary: show a model layer by layer."""

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_model_exists, parse_field, parse_fields, parse_size


def summary(
    model: Annotated[str, Parameter(validator=check_model_exists)],
    /,
    *,
    image_size: str | None = None,
    classes: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    batch: int = 1,
    depth: int = 2,
    as_json: flags.Json = False,
) -> None:
    """Show a model layer by layer.

    Shows output shapes, parameters and MACs of each layer, their totals, and a memory estimate. Nothing is computed
    or downloaded, so large models take no longer than small ones. The config fields, which --set changes, are
    listed at the end.

    Examples::

        vitrail summary ViT-B/16
        vitrail summary vit_base_patch16_224 --image-size 384x256 --classes 10
        vitrail summary ViT-S/16 --set positions=rotary --set pool=mean

    Parameters
    ----------
    model
        Name or alias that `vitrail models` lists, run, checkpoint, or family of your own: file.py:preset.
    image_size
        Image size: 384, or rows x columns: 384x256. [default: that of the model]
    classes
        Number of outputs of the head. [default: that of the model]
    fields
        Set a config field. May be repeated.
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
    from vitrail.opening import build_without_weights

    found = summarize(build_without_weights(model, given), batch=batch, depth=depth)
    print(json.dumps(asdict(found), indent=2) if as_json else found)
