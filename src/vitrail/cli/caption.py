"""vitrail caption: describe images."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import Images
from vitrail.cli.options.search_flags import SearchFlags
from vitrail.cli.output.job import check_job_options, run_job
from vitrail.cli.output.messages import print_error, write_to_stdout
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import open_figure_output
from vitrail.cli.output.streams import get_binary_buffer
from vitrail.cli.usage_errors import check_arguments

if TYPE_CHECKING:
    from vitrail.base.figures import FigureFolder
    from vitrail.predict.search.settings import SearchSettings

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
    how = (search or SearchFlags()).make_settings()
    if out is not None and not of_rows:
        title = f"What {Path(model).name} looked at"
        output = open_figure_output(out, title, svg=svg, arrays=arrays, overwrite=overwrite)
        draw_captions(model, images, how, output, layer=layer, batch=batch, device=device, as_json=as_json)
        return

    from vitrail.opening import run_command

    lines, kind = list[str](), "jsonl" if as_json else None
    rows = run_command("caption", model, inputs=images, format=kind, search=how, batch=batch, device=device)
    write_text = lines.append if as_json else write_to_stdout
    result = run_job(rows, out, resume=resume, overwrite=overwrite, write_text=write_text)
    if as_json:
        print_json([row for line in lines if "error" not in (row := json.loads(line))])
    result.raise_if_failed()


def draw_captions(
    model: str,
    images: Sequence[str],
    search: "SearchSettings",
    output: "FigureFolder",
    *,
    layer: int | None,
    batch: int,
    device: str,
    as_json: bool,
) -> None:
    """Write the figures, and print the captions with the names of the files."""
    from vitrail.inspection.sentences.word_attention import DescribedImage, describe_arguments
    from vitrail.predict.captioner import Captioner
    from vitrail.predict.text_rows import format_caption_lines

    def print_caption(found: DescribedImage) -> None:
        if not as_json:
            print(format_caption_lines(found.caption, with_scores=search.n_best > 1, files=found.written), end="")

    result = describe_arguments(
        Captioner(model, device=device, batch=batch),
        images,
        search,
        output,
        layer=layer,
        stdin=get_binary_buffer(sys.stdin),
        on_described=print_caption,
        on_error=print_error,
        progress=progress_bar,
    )
    if as_json:
        print_json(result.report)
    result.raise_if_failed()


def print_json(report: object) -> None:
    print(json.dumps(report, indent=2, ensure_ascii=False))
