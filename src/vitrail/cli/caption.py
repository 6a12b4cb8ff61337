"""vitrail caption: describe images."""

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.text import escape_unprintable
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import SPEED
from vitrail.cli.options.predict_flags import Images
from vitrail.cli.options.search_flags import SearchFlags
from vitrail.cli.output.messages import print_error
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import open_figure_output
from vitrail.cli.output.streams import get_binary_buffer
from vitrail.cli.usage_errors import check_arguments


def caption(
    model: flags.TextModel,
    /,
    *images: Images,
    search: Annotated[SearchFlags | None, Parameter(name="*")] = None,
    out: flags.OptionalOut = None,
    layer: int | None = None,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    batch: Annotated[int, Parameter(group=SPEED, help="Images per batch.")] = 16,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Describe images, and draw what each word attends to.

    Prints a caption per image, in order. With -o, a figure per image shows what the model attended to when it wrote
    each word. An image that cannot be read is reported and skipped; the exit code is then 2.

    Examples::

        vitrail caption runs/captions photos
        vitrail caption runs/captions photos --beam 1 --json
        vitrail caption runs/captions photos -o words --arrays

    Parameters
    ----------
    model
        Run folder of `vitrail train --task caption`, or the folder of its model.
    out
        Folder for PHOTO.words.png; a page for a name that ends in .html, and one figure for .png, .svg or .pdf.
    layer
        Layer of the decoder whose attention is drawn, from 0. [default: the mean of all layers]
    """
    check_arguments("caption", model, images)
    for name, given in (
        ("--layer", layer is not None),
        ("--svg", svg),
        ("--arrays", arrays),
        ("--overwrite", overwrite),
    ):
        if given and out is None:
            raise ConfigError(f"{name} needs -o OUT, the folder for the figures")

    title = f"What {Path(model).name} looked at"
    output = None if out is None else open_figure_output(out, title, svg=svg, arrays=arrays, overwrite=overwrite)

    from vitrail.inspection.sentences.caption_figures import DescribedImage, describe_arguments
    from vitrail.predict.captioner import Caption, Captioner

    how = search or SearchFlags()

    def print_caption(found: Caption | DescribedImage) -> None:
        best = found if isinstance(found, Caption) else found.caption
        files = "" if isinstance(found, Caption) or not found.written else f"  {', '.join(map(str, found.written))}"
        for number, each in enumerate((best, *best.alternatives)):
            score = f"{each.score:7.3f}  " if how.n_best > 1 else ""
            print(escape_unprintable(f"{best.image}: {score}{each.text}{'' if number else files}"))

    result = describe_arguments(
        Captioner(model, device=device, batch=batch),
        images,
        how.make_settings(),
        output,
        layer=layer,
        stdin=get_binary_buffer(sys.stdin),
        on_described=ignore if as_json else print_caption,
        on_error=print_error,
        progress=progress_bar,
    )
    if as_json:
        print(json.dumps(result.report, indent=2, ensure_ascii=False))
    result.raise_if_failed()


def ignore(_: object) -> None:
    """Print nothing: JSON is printed at the end."""
