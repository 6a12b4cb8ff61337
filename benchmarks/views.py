"""CPU time of a view, from file or array to uint8 pixels, compared with the path by Pillow and with the model.

    .venv/bin/python benchmarks/views.py

"Pillow" crops, flips and jitters image by image, and decodes an image once per view. "jitter" does the same for a batch
of views in torch; "all" adds hue, gray and blur, as in SimCLR. The model is a ViT-Ti with patches of 16 pixels (of 4
for images of 32 pixels) that trains on such views. All alternate, round after round, in one thread; the median of the
rounds is printed in milliseconds of CPU time per view.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import run
from PIL import Image
from rich.progress import track

import vitrail
from vitrail.base.text import format_table
from vitrail.data.images.augment.augmentations import augment_image
from vitrail.data.images.augment.config import Augmentation, ViewAugmentation
from vitrail.data.images.augment.views import View, ViewMaker
from vitrail.data.images.preprocessing import Preprocessing

Step = Callable[[], object]
BATCH = 16
MODEL_BATCH = 2  # images
PILLOW = Augmentation(crop="resized", flip=0.5, jitter=0.4)
JITTER = ViewAugmentation(brightness=0.4, contrast=0.4, saturation=0.4, jitter_rate=1.0)
ALL = replace(JITTER, jitter_rate=0.8, hue=0.1, gray_rate=0.2, blur_rate=0.5)


def make_sizes(size: int, views: int) -> dict[str, tuple[int, int]]:
    """Size and number of views by name: two, or two and eight small ones."""
    small = {"local": (96 if size == 224 else 16, views - 2)} if views > 2 else {}
    return {"global": (size, 2), **small}


def make_steps(sources: list[Any], size: int, views: int) -> dict[str, Step]:
    """What makes, or trains on, all views of a batch."""
    preprocessing, indices = Preprocessing(image_size=size, crop=1.0), np.arange(len(sources))
    sizes = make_sizes(size, views)
    model = vitrail.create("vit_tiny_patch16_224", image_size=size, patch_size=16 if size == 224 else 4, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def augment_with_pillow() -> None:
        for each, count in sizes.values():
            own = replace(preprocessing, image_size=each)
            torch.stack([augment_image(source, PILLOW, own, n) for n, source in enumerate(sources * count)])

    def make_views(augmentation: ViewAugmentation) -> Step:
        maker = ViewMaker({name: View(augmentation, *each) for name, each in sizes.items()}, PILLOW, preprocessing)
        keys = maker.make_keys(0, 0, indices, np.zeros_like(indices))
        return lambda: maker.join([maker.crop_image(source, keys[:, n]) for n, source in enumerate(sources)], keys)

    def train() -> None:
        for each, count in sizes.values():
            model(torch.zeros(count * MODEL_BATCH, 3, each, each)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"Pillow": augment_with_pillow, "jitter": make_views(JITTER), "all": make_views(ALL), "model": train}


def measure(sources: list[Any], size: int, views: int, rounds: int) -> dict[str, float]:
    """Milliseconds of CPU time per view."""
    steps = make_steps(sources, size, views)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in track(range(rounds + 1), f"{size} pixels, {views} views", transient=True):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    images = {name: MODEL_BATCH if name == "model" else len(sources) for name in times}
    return {name: 1000 * statistics.median(each[1:]) / (views * images[name]) for name, each in times.items()}


def draw_photos(folder: Path) -> list[Path]:
    draws, paths = np.random.default_rng(0), [folder / f"{number}.jpg" for number in range(BATCH)]
    for path in paths:
        coarse = Image.fromarray(draws.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def main(*, rounds: int = 7) -> None:
    """Measure every case and print the table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {rounds} rounds; milliseconds of CPU time per view")
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        arrays = list(np.random.default_rng(0).integers(0, 256, (4 * BATCH, 32, 32, 3), dtype=np.uint8))
        for name, sources, size in (("arrays of 32", arrays, 32), ("JPEG, 500×375", draw_photos(Path(folder)), 224)):
            for views in (2, 10):
                sizes = " + ".join(f"{count} × {each}" for each, count in make_sizes(size, views).values())
                took = measure(sources, size, views, rounds)
                ratio = f"{took['Pillow'] / took['jitter']:.1f}"
                table.append([name, sizes, *(f"{each:.2f}" for each in took.values()), ratio])
    print("\n".join(format_table(("images", "views", "Pillow", "jitter", "all", "model", "ratio"), table, "llrrrrr")))


if __name__ == "__main__":
    run(main)
