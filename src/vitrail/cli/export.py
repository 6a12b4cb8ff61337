"""vitrail export: a model for a machine without torch."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.summary import parse_field, parse_fields, parse_size
from vitrail.errors import ConfigError
from vitrail.files import check_output_paths


def export(
    checkpoint: str,
    out: Path,
    /,
    *,
    to: Literal["onnx", "onnx-int8", "torch-export"] = "onnx",
    features: Literal["class", "mean", "tokens"] | None = None,
    image_size: str | None = None,
    dynamic: Annotated[bool, Parameter(negative=())] = False,
    portable: Annotated[bool, Parameter(negative=())] = False,
    merge: int = 0,
    labels: Path | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    preprocessing: Annotated[list[str] | None, Parameter(negative=())] = None,
    check: Annotated[list[str] | None, Parameter(negative=())] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write a model as a folder that predicts without torch: model.onnx, config.json with classes and preprocessing.

    The file takes pixels as Pillow gives them, uint8 (batch, rows, columns, channels), any batch; normalising is in its
    first layer. Before the folder appears it is run beside torch on eight built-in photos, views of them and noise, and
    on the pictures of --check. An exact export differs by less than 1e-4; of 8 bits it is told how often they agree.

    Examples::

        vitrail export my_model for_the_box
        vitrail export my_model small --to onnx-int8 --check photos/val/bees
        vitrail export my_model of_any_size --dynamic --features mean

    Parameters
    ----------
    checkpoint
        The folder of a run, or anything that `vitrail convert` reads: a file, a folder, hf-hub:owner/model.
    out
        The folder to write.
    to
        onnx; onnx-int8, smaller and about twice as fast, not exact; torch-export, for torch.export.load.
    features
        Give features instead of classes, for `vitrail embed`: the class token, the mean of the patches, or all tokens.
    image_size
        Another size of the pictures: 384, or rows x columns: 384x256; positions are resampled.
    dynamic
        Take any multiple of the patch size; unless said, the size is fixed, which is faster by a little.
    portable
        Only operators of the ONNX standard, for other runtimes than ONNX Runtime.
    merge
        Merge so many tokens in each layer: faster and less exact.
    labels
        A text with the names of the classes, one a line, where the checkpoint has none.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    preprocessing
        A field of the preprocessing to change, as FIELD=VALUE: crop=0.875; may be repeated.
    check
        Pictures, or folders of them, to check the export on besides; may be repeated.
    overwrite
        Replace an export that is there already.
    """
    how = dict(parse_field(item, "--preprocessing") for item in preprocessing or ())
    known = parse_fields(fields)
    if image_size is not None:
        known["image_size"] = parse_size(image_size)
    if to == "torch-export" and portable:
        raise ConfigError("--portable with --to torch-export; expected it with onnx or onnx-int8")
    if merge < 0:
        raise ConfigError(f"--merge {merge}; expected 0 or more")
    if dynamic and merge:
        raise ConfigError("--dynamic with --merge, which counts the patches of one size; expected one of them")
    check_output_paths([out], overwrite=overwrite)

    from vitrail.export.atomic_folder import check_target_folder

    check_target_folder(out, overwrite=overwrite)  # before a model is read, and again when it is written

    from vitrail.checkpoint.reading import describe, read, warn_about_report
    from vitrail.checkpoint.run_files import find_finished_run
    from vitrail.cli.convert import read_labels_file
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.export.export import export_model
    from vitrail.predict.viewer import Viewer

    run = find_finished_run(Path(checkpoint))
    weights = checkpoint if run is None else run.model
    if dynamic and "dynamic" in describe(weights, **known).config:
        known["dynamic"] = True
    found = read(weights, **known)
    warn_about_report(found, checkpoint, ("preprocessing",) if how else ())
    about, config = found.description, found.model.config
    if dynamic and not getattr(config, "dynamic", False):
        kind = type(found.model).__name__
        print(f"vitrail: note: {kind} takes one size only: {config.image_size} is baked in", file=sys.stderr)
    seen_as = about.preprocessing
    if how or seen_as is not None:
        seen_as = (seen_as or Preprocessing(image_size=config.image_size)).with_fields(how)
        seen_as = replace(seen_as, image_size=config.image_size)
    viewer = Viewer(found.model, preprocessing=seen_as, labels=read_labels_file(labels) if labels else about.labels)
    exported, checked = export_model(
        viewer.model,
        out,
        preprocessing=viewer.preprocessing,
        labels=viewer.labels,
        to=to,
        output=features or "logits",
        dynamic=dynamic and getattr(config, "dynamic", False),
        portable=portable,
        merge=merge,
        provenance={"checkpoint": str(checkpoint), **about.provenance},
        images=load_check_images(check, viewer.preprocessing) if check else None,
        overwrite=overwrite,
    )
    rows, columns = viewer.preprocessing.image_size  # pyright: ignore[reportGeneralTypeIssues]
    size = f"any multiple of {exported.multiple}" if exported.multiple else f"{rows}×{columns}"
    print(f"{out}: {to}, {exported.output}, pictures of {size}, any batch")
    if to == "onnx-int8":
        print(f"agrees with fp32 on {checked.same} of {checked.images} pictures")
    else:
        print(f"equals torch on {checked.images} pictures within {checked.difference:.1e}")
    if to != "torch-export":
        print(f"use it: vitrail {'embed' if features else 'predict'} {out} photo.jpg")


def load_check_images(paths: list[str], preprocessing: Any) -> Any:
    """The pictures as the model sees them; one that cannot be read is named and left out."""
    import numpy as np

    from vitrail.data.decoding.model_input import decode_for_model
    from vitrail.errors import DataError
    from vitrail.predict.image_list import collect_images

    images, problems = collect_images(paths)
    found, faults = list[Any](), [DataError(each) for each in problems]
    for each in images:
        try:
            found.append(decode_for_model(each.source, preprocessing))
        except DataError as error:
            faults.append(error)
    if not found:
        raise DataError(f"--check has no image that can be read: {faults[0]}")
    for error in faults:
        print(f"vitrail: {error}", file=sys.stderr)
    return np.stack(found)
