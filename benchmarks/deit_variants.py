"""Images per second of the DeiT variants by resolution, with and without the distillation token, ours and timm's.

    make bench

The four models of a size alternate, round after round, so that a busy moment of the machine affects all of them. Images
per second are the median of the rounds. Ratios are computed within each round; the median is printed with the
quartiles. Only a forward pass; no images are decoded.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split
import timm
import torch
from cyclopts import Parameter, run
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from throughput import make_inference_step, time_step

import vitrail

BATCHES = {"tiny": 16, "small": 8, "base": 4}
PIXELS = (224, 384)
HEADING = ("", "parameters", "pixels", "batch", "images/s", "to timm", "to the plain model")


def main(
    *,
    rounds: int = 10,
    threads: int = 2,
    sizes: Sequence[str] = tuple(BATCHES),
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure the variants and print the table."""
    torch.set_num_threads(threads)
    rows = [row for size in sizes for pixels in PIXELS for row in measure_size(size, pixels, rounds)]
    run_line = describe_run("deit_variants.py", f"--rounds {rounds}", threads)
    present("variants", (markdown_table(HEADING, rows, "lrrrrrr"), run_line), page)


def measure_size(size: str, pixels: int, rounds: int) -> list[tuple[str, ...]]:
    """The rows of a plain and a distilled model."""
    batch, names = BATCHES[size], [f"deit_{size}{token}_patch16_224" for token in ("", "_distilled")]
    ours = [vitrail.create(name, image_size=pixels) for name in names]
    models = [*ours, *(timm.create_model(name, img_size=pixels) for name in names)]
    steps = [make_inference_step(model, batch, pixels) for model in models]
    for step in steps:
        time_step(step, 2)
    label = f"{size}, {pixels} pixels"
    times = [[time_step(step, 1) for step in steps] for _ in track(range(rounds), label, transient=True)]
    plain, distilled, timm_plain, timm_distilled = zip(*times, strict=True)
    rows = list[tuple[str, ...]]()
    for name, model, mine, its in zip(names, ours, (plain, distilled), (timm_plain, timm_distilled), strict=True):
        millions = sum(weight.numel() for weight in model.parameters()) / 1e6
        speed = f"{batch / statistics.median(mine):.1f}"
        to_plain = "" if mine is plain else format_ratio(plain, mine)
        place = (name.removesuffix("_224"), f"{millions:.1f} M", str(pixels), str(batch))
        rows.append((*place, speed, format_ratio(its, mine), to_plain))
    return rows


if __name__ == "__main__":
    run(main)
