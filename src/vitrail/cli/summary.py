"""vitrail summary: show a model layer by layer, and what its file holds."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.base.errors import CheckpointError, ConfigError, VitrailError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import MAX_BATCH, at_most, check_model_exists, parse_field, parse_fields, parse_size
from vitrail.cli.output.messages import print_text


def summary(
    model: Annotated[str, Parameter(validator=check_model_exists)],
    /,
    *,
    image_size: str | None = None,
    classes: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    batch: Annotated[int, Parameter(validator=at_most(MAX_BATCH))] = 1,
    depth: int = 2,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    tensors: Annotated[bool, Parameter(negative=())] = False,
    as_json: flags.Json = False,
) -> None:
    """Show a model layer by layer, and what its file holds.

    Shows output shapes, parameters and MACs of each layer, their totals, and a memory estimate. Nothing is computed
    or downloaded, so large models take no longer than small ones. The config fields, which --set changes, are
    listed above the layers.

    Of a file it also shows layout, architecture, head, tensors with shapes and dtypes, checksums and suspicious values
    such as NaN. Nothing in the file is executed. If the layout is unknown or no model can be built from the file, the
    reason and the tensors are shown. For a run or an exported folder, the checksum of every file is verified. Exits
    with code 2 if a file is damaged.

    Examples::

        vitrail summary ViT-B/16
        vitrail summary vit_base_patch16_224 --image-size 384x256 --classes 10
        vitrail summary ViT-S/16 --set positions=rotary --set pool=mean
        vitrail summary runs/demo
        vitrail summary vit_fashion --tensors --json

    Parameters
    ----------
    model
        Name or alias that `vitrail models` lists, run, export, checkpoint of any layout (.safetensors, .pth, .bin,
        .npz or a folder), hf-hub:OWNER/NAME, or your own family: file.py:preset.
    image_size
        Image size: 384, or rows x columns: 384x256. [default: that of the model]
    classes
        Number of outputs of the head. [default: that of the model]
    fields
        Set a config field, of a file also one that it does not specify: heads=3. May be repeated.
    batch
        Batch size for shapes, MACs and memory.
    depth
        Nesting depth: 1 shows the parts of the model, 2 its blocks, 9 every layer.
    source
        Layout of the file: vitrail, timm, deit, google, hf, torchvision, dino, mae, moco. [default: detected]
    tensors
        List every tensor with its mean, deviation, minimum and maximum instead of grouping the blocks. For a name, its
        public weights are downloaded.
    """
    known = parse_fields(fields)
    given = dict(known)
    if image_size is not None:
        given["image_size"] = parse_size(image_size)
    if classes is not None:
        given |= [parse_field(f"classes={classes}")]

    from vitrail.checkpoint.run_files import is_run_folder
    from vitrail.checkpoint.weight_adaptation import CHANGEABLE_FIELDS
    from vitrail.checkpoint.weight_folders import find_bundled_model
    from vitrail.export.description import is_exported
    from vitrail.inspection.file_inspection import (
        build_inspected_model,
        format_checksum_table,
        inspect_file,
        verify_checksums,
    )
    from vitrail.inspection.summary import summarize
    from vitrail.models.catalog.external_families import is_external_family_name
    from vitrail.opening import build_without_weights

    report, texts, found = dict[str, Any](), list[str](), None
    is_exported_model = is_exported(model)
    if is_exported_model or is_run_folder(Path(model)):
        checks = verify_checksums(Path(model))
        report["checksums"] = [asdict(each) for each in checks]
        texts.append(format_checksum_table(checks))
    elif not is_external_family_name(model) and (
        tensors or model.startswith("hf-hub:") or find_bundled_model(model) is not None or os.path.lexists(model)
    ):
        unspecified = {name: value for name, value in known.items() if name not in CHANGEABLE_FIELDS}
        found = inspect_file(model, **{"source": source, **unspecified})
        report = asdict(found)
        if not tensors:
            report.pop("tensors")
        texts.append(found.format_report(every_tensor=tensors))
    elif source is not None:
        raise ConfigError(f"--from {source} is the layout of a file, but {model} is a name; leave it out")
    damaged = [each for each in report.get("checksums", ()) if each["verdict"] == "damaged"]
    if not damaged and not is_exported_model and (found is None or not found.reason):
        try:
            built = build_without_weights(model, given) if found is None else build_inspected_model(found, given)
            layers = summarize(built, batch=batch, depth=depth)
        except VitrailError as error:
            if not texts or given or (batch, depth) != (1, 2):
                raise
            texts.append(f"no layers: {error}")
        else:
            report |= asdict(layers)
            texts.append(str(layers))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_text("\n\n".join(texts))
    if damaged:
        names = ", ".join(each["file"] for each in damaged)
        raise CheckpointError(f"{model} is damaged ({names}: {damaged[0]['reason']}); restore it from a copy")
