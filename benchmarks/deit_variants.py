"""Images per second of the DeiT variants by resolution, with and without the distillation token, ours and timm's.

    make bench

The four models of a size alternate, round after round, so that a busy moment of the machine affects all of them. Images
per second are the median of the rounds. Ratios are computed within each round; the median is printed with the
quartiles. Only a forward pass; no images are decoded.
"""

import statistics
from collections.abc import Sequence

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split
import timm
import torch
from cyclopts import run
from rich.progress import track
from throughput import make_inference_step, time_step

import vitrail
from vitrail.base.text import format_table

BATCHES = {"tiny": 16, "small": 8, "base": 4}
HEADING = ("model", "parameters", "pixels", "batch", "images/s", "to timm", "to the plain one")


def main(*, rounds: int = 10, threads: int = 2, sizes: Sequence[str] = tuple(BATCHES)) -> None:
    """Measure the variants at 224 and 384 pixels and print the table."""
    torch.set_num_threads(threads)
    rows = [row for size in sizes for pixels in (224, 384) for row in measure_size(size, pixels, rounds)]
    print("\n".join(format_table(HEADING, rows, "lrrrrrr")))


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


def format_ratio(other: Sequence[float], own: Sequence[float]) -> str:
    """How many times as fast as the other, within a round: the median and the quartiles."""
    low, middle, high = statistics.quantiles([theirs / mine for theirs, mine in zip(other, own, strict=True)], n=4)
    return f"{middle:.3f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    run(main)
