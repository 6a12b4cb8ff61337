"""vitrail inspect-checkpoint: what is in a file of weights."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.values import parse_field
from vitrail.errors import CheckpointError


def inspect_checkpoint(
    file: str,
    /,
    *,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    tensors: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show what is in a checkpoint: layout, architecture, shapes, types, head, checksums, and what is suspicious.

    Nothing in the file is run. Where no layout is recognised, or a model cannot be made of the file, it says why and
    shows the tensors all the same. For a run or an exported folder, the checksum of every file is verified. Exits with
    code 2 if a file is damaged.

    Examples::

        vitrail inspect-checkpoint my_model
        vitrail inspect-checkpoint runs/demo
        vitrail inspect-checkpoint weights.pth --tensors
        vitrail inspect-checkpoint weights.pth --from deit --set heads=3 --json

    Parameters
    ----------
    file
        A file (.safetensors, .pth, .bin, .npz), a folder, a run, an exported folder, or hf-hub:owner/model.
    source
        The layout, where it should not be found out: vitrail, timm, deit, google, hf, torchvision, dino, mae, moco.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated. trained_size=32x128 is the size
        of the images that its positions were trained for.
    tensors
        List every tensor with its mean, deviation, minimum and maximum, not grouped over the blocks.
    as_json
        Print JSON instead of a page.
    """
    known = dict(parse_field(item) for item in fields or ())

    from vitrail.checkpoint.run_files import is_run_folder
    from vitrail.export.description import is_exported
    from vitrail.inspection.checkpoints.checksum_verification import verify_checksums
    from vitrail.inspection.checkpoints.report import format_checksum_table

    if is_run_folder(Path(file)) or is_exported(file):
        checks = verify_checksums(Path(file))
        print(json.dumps([asdict(each) for each in checks], indent=2) if as_json else format_checksum_table(checks))
    else:
        from vitrail.inspection.checkpoints.file_inspection import inspect_file

        found = inspect_file(file, **{"source": source, **known})
        checks = found.checksums
        if as_json:
            data = asdict(found)
            print(json.dumps(data if tensors else {name: data[name] for name in data if name != "tensors"}, indent=2))
        else:
            print(found.format_report(every_tensor=tensors))
    damaged = [each for each in checks if each.verdict == "damaged"]
    if damaged:
        names = ", ".join(each.file for each in damaged)
        raise CheckpointError(f"{file} is damaged ({names}: {damaged[0].reason}); restore it from a copy")
