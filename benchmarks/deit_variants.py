"""Images per second of the DeiT variants by resolution, ours and timm's alternating, as in DeiT's tables.

    make bench

Only a forward pass; no images are decoded. Images per second depend on the machine; the ratio is comparable.
"""

import statistics

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split
import timm
import torch
from cyclopts import run
from rich.progress import track
from throughput import make_inference_step, time_step

import vitrail
from vitrail.text import format_table

VARIANTS = (
    *(("deit_tiny_patch16_224", 16), ("deit_tiny_distilled_patch16_224", 16), ("deit_small_patch16_224", 8)),
    *(("deit_small_distilled_patch16_224", 8), ("deit_base_patch16_224", 4), ("deit_base_distilled_patch16_224", 4)),
)


def main(*, rounds: int = 10, threads: int = 2) -> None:
    """Measure every variant at 224 and 384 pixels and print the table."""
    torch.set_num_threads(threads)
    rows = list[tuple[str, ...]]()
    for name, batch in VARIANTS:
        for pixels in (224, 384):
            ours, theirs = vitrail.create(name, image_size=pixels), timm.create_model(name, img_size=pixels)
            steps = [make_inference_step(model, batch, pixels) for model in (ours, theirs)]
            for step in steps:
                time_step(step, 2)
            times = [tuple(time_step(step, 1) for step in steps) for _ in track(range(rounds), name, transient=True)]
            speed = batch / statistics.median(mine for mine, _ in times)
            low, middle, high = statistics.quantiles([its / mine for mine, its in times], n=4)
            millions = sum(weight.numel() for weight in ours.parameters()) / 1e6
            ratio = f"{middle:.3f} ({low:.2f}–{high:.2f})"
            rows.append(
                (name.removesuffix("_224"), f"{millions:.1f} M", str(pixels), str(batch), f"{speed:.1f}", ratio)
            )
    heading = ("model", "parameters", "pixels", "batch", "images/s", "to timm")
    print("\n".join(format_table(heading, rows, "lrrrrr")))


if __name__ == "__main__":
    run(main)
