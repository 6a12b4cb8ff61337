"""vitrail caption: describe images."""

import json
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import SPEED
from vitrail.cli.options.predict_flags import Images
from vitrail.cli.output.messages import print_error
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.usage_errors import check_arguments
from vitrail.errors import ConfigError
from vitrail.output_streams import get_binary_buffer
from vitrail.text import escape_unprintable

RunOfCaptions = Annotated[
    str, Parameter(name="MODEL", help="Run folder of `vitrail train --task caption`, or the folder of its model.")
]


def caption(
    model: RunOfCaptions,
    /,
    *images: Images,
    beam: int = 4,
    n_best: int = 1,
    penalty: Literal["gnmt", "length"] = "gnmt",
    alpha: float = 0.6,
    length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    out: flags.OptionalOut = None,
    layer: int | None = None,
    overwrite: flags.Overwrite = False,
    svg: flags.Svg = False,
    arrays: flags.Arrays = False,
    batch: Annotated[int, Parameter(group=SPEED, help="Images per batch.")] = 16,
    device: flags.Device = "auto",
    as_json: flags.Json = False,
) -> None:
    """Describe images.

    Prints a caption per image, in order. With -o, a figure per image shows what the model attended to when it wrote
    each word. An image that cannot be read is reported and skipped; the exit code is then 2.

    Examples::

        vitrail caption runs/captions photos
        vitrail caption runs/captions photos --beam 1 --json
        vitrail caption runs/captions photos -o words --arrays

    Parameters
    ----------
    beam
        Beginnings of a caption that are kept at each step; 1 is greedy search.
    n_best
        Captions per image.
    penalty
        Length penalty: gnmt is ((5 + length)/6)^alpha, length is length^alpha.
    alpha
        Exponent of the length penalty; 0 disables it.
    length
        Tokens of a caption, at most. [default: 60]
    temperature
        Draw tokens at random with this temperature instead of searching; so do --top-k and --top-p.
    top_k
        Draw from the most probable tokens, as many as this.
    top_p
        Draw from the most probable tokens that together have this probability.
    seed
        Seed of the draws.
    out
        Folder for PHOTO.words.png.
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

    from vitrail.inspection.caption_figures import DescribedImage, describe_arguments
    from vitrail.predict.captioner import Caption, Captioner
    from vitrail.predict.translator import SearchSettings

    search = SearchSettings(
        beam=beam,
        n_best=n_best,
        penalty=penalty,
        alpha=alpha,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )

    def print_caption(found: Caption | DescribedImage) -> None:
        best = found if isinstance(found, Caption) else found.caption
        files = "" if isinstance(found, Caption) or not found.written else f"  {', '.join(map(str, found.written))}"
        for number, each in enumerate((best, *best.alternatives)):
            score = f"{each.score:7.3f}  " if n_best > 1 else ""
            print(escape_unprintable(f"{best.image}: {score}{each.text}{'' if number else files}"))

    result = describe_arguments(
        Captioner(model, device=device, batch=batch),
        images,
        search,
        out,
        layer=layer,
        stdin=get_binary_buffer(sys.stdin),
        suffixes=(".png", ".svg") if svg else (".png",),
        arrays=arrays,
        overwrite=overwrite,
        on_described=ignore if as_json else print_caption,
        on_error=print_error,
        progress=progress_bar,
    )
    if as_json:
        print(json.dumps(result.report, indent=2, ensure_ascii=False))
    result.raise_if_failed()


def ignore(_: object) -> None:
    """Print nothing: JSON is printed at the end."""
