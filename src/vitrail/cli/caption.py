"""vitrail caption: describe images."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import Images
from vitrail.cli.options.search_flags import SearchFlags
from vitrail.cli.output.job import check_job_options, run_job
from vitrail.cli.output.messages import write_to_stdout
from vitrail.cli.output.results import make_message_callbacks, open_figure_output
from vitrail.cli.usage_errors import check_arguments

ROW_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")


def caption(
    model: flags.TextModel,
    /,
    *images: Images,
    search: Annotated[SearchFlags | None, Parameter(name="*")] = None,
    out: flags.OptionalOut = None,
    layer: int | None = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    batch: flags.Batch = 16,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Describe images, and draw what each word attends to.

    Prints a caption per image, in order, or writes them to a file. If -o is a folder, a figure per image shows what the
    model attended to when it wrote each word. An image that cannot be read is reported and skipped; the exit code is
    then 2.

    Examples::

        vitrail caption runs/captions photos
        vitrail caption runs/captions photos --beam 1 --json
        vitrail caption runs/captions photos -o captions.csv --resume
        vitrail caption runs/captions photos -o words --arrays

    Parameters
    ----------
    model
        Run folder of `vitrail train --task caption`, or the folder of its model.
    out
        File for the captions (.jsonl, .csv, .tsv, .txt); it appears when it is complete, and until then finished rows
        are in OUT.partial. Or a folder for PHOTO.words.png; a page for a name that ends in .html, and one figure for
        .png, .svg or .pdf.
    layer
        Layer of the decoder whose attention is drawn, from 0. [default: the mean of all layers]
    resume
        Continue a file of captions from OUT.partial.
    """
    check_arguments("caption", model, images)
    of_rows = out is not None and out.suffix.lower() in ROW_SUFFIXES and not out.is_dir()
    for name, given in (("--layer", layer is not None), ("--svg", svg), ("--arrays", arrays)):
        if given and (out is None or of_rows):
            raise ConfigError(f"{name} needs -o OUT, the folder for the figures")
    check_job_options(out, resume=resume, overwrite=overwrite)
    if resume and not of_rows:
        raise ConfigError(f"--resume with the figures of {out}; expected a file of captions: {', '.join(ROW_SUFFIXES)}")
    if as_json and of_rows:
        raise ConfigError(f"--json with -o {out}; expected one of them: a file that ends in .jsonl has JSON")
    how, kind = (search or SearchFlags()).make_settings(), "jsonl" if as_json else None

    from vitrail.kinds.caption import explain
    from vitrail.opening import run_command

    if out is not None and not of_rows:
        output = open_figure_output(
            out, f"What {Path(model).name} looked at", svg=svg, arrays=arrays, overwrite=overwrite
        )
        messages = make_message_callbacks(on_result=(lambda _: None) if as_json else print)
        place = None if layer is None else str(layer)
        result = explain(model, images, output, search=how, layer=place, batch=batch, device=device, messages=messages)
        if as_json:
            print_json(result.report)
    else:
        lines = list[str]()
        rows = run_command("caption", model, inputs=images, format=kind, search=how, batch=batch, device=device)
        write_text = lines.append if as_json else write_to_stdout
        result = run_job(rows, out, resume=resume, overwrite=overwrite, write_text=write_text)
        if as_json:
            print_json([row for line in lines if "error" not in (row := json.loads(line))])
    result.raise_if_failed()


def print_json(report: object) -> None:
    print(json.dumps(report, indent=2, ensure_ascii=False))
