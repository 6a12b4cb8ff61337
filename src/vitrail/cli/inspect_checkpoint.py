"""vitrail inspect-checkpoint: show the contents of a checkpoint."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import CheckpointError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_model_exists, parse_fields
from vitrail.cli.output.messages import print_text


def inspect_checkpoint(
    file: Annotated[str, Parameter(name="MODEL", validator=check_model_exists)],
    /,
    *,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    fields: flags.ConfigFields = None,
    tensors: Annotated[bool, Parameter(negative=())] = False,
    as_json: flags.Json = False,
) -> None:
    """Show the contents of a checkpoint.

    Shows layout, architecture, shapes, dtypes, head, checksums and suspicious values. Nothing in the file is
    executed. If the layout is unknown or no model can be built from the file, the reason and the tensors are shown.
    Suspicious values, such as NaN, are named. For a run or an exported folder, the checksum of every file is
    verified. Exits with code 2 if a file is damaged.

    Examples::

        vitrail inspect-checkpoint vit_fashion
        vitrail inspect-checkpoint runs/demo
        vitrail inspect-checkpoint vit_fashion --tensors --json

    Parameters
    ----------
    file
        A file (.safetensors, .pth, .bin, .npz), a folder, a run, an export, a name of `vitrail models`, or hf-hub:….
    source
        Layout: vitrail, timm, deit, google, hf, torchvision, dino, mae, moco. [default: detected]
    tensors
        List every tensor with its mean, deviation, minimum and maximum instead of grouping the blocks.
    """
    known = parse_fields(fields)

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
            print_text(found.format_report(every_tensor=tensors))
    damaged = [each for each in checks if each.verdict == "damaged"]
    if damaged:
        names = ", ".join(each.file for each in damaged)
        raise CheckpointError(f"{file} is damaged ({names}: {damaged[0].reason}); restore it from a copy")
