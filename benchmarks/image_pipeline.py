"""Training images per second, from file to normalized batch, compared with Pillow and torchvision; one thread.

    PYTHONPATH=tests .venv/bin/python benchmarks/image_pipeline.py [FOLDER]

Both alternate, round after round on the same files, so that a busy moment of the machine affects both. Ratios are
computed within each round; the median of the rounds is printed with the quartiles. Higher is faster. Without a folder
the shared photos are used, or if there are none, generated smooth images of 500×375 as JPEG.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm and torchvision

# isort: split
import numpy as np
import torch
from cyclopts import Parameter, run
from PIL import Image
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from timm.data.auto_augment import rand_augment_transform
from torchvision import transforms

from vitrail.data.images.augment.augmentations import augment_image, normalize
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.decoding import jpeg
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys

Epoch = Callable[[list[Path], int], None]
SHARED = Path(__file__).parents[2] / "shared" / "data"
BATCH = 32
PREPROCESSING = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CROP_AND_FLIP = Augmentation(crop="resized", flip=0.5)
RANDAUGMENT = Augmentation(crop="resized", flip=0.5, policy="rand")


def vitrail_epoch(augmentation: Augmentation) -> Epoch:
    def epoch(files: list[Path], number: int) -> None:
        own = make_view_keys(0, number, np.arange(len(files)), 0).tolist()
        for at in range(0, len(files), BATCH):
            pairs = zip(files[at : at + BATCH], own[at : at + BATCH], strict=True)
            pixels = torch.stack([augment_image(file, augmentation, PREPROCESSING, key) for file, key in pairs])
            normalize(pixels, PREPROCESSING)

    return epoch


def torchvision_epoch(augmentation: Augmentation) -> Epoch:
    rand: Any = rand_augment_transform  # fixed at 8: at 10, which 9 ± 0.5 may reach, Pillow refuses to posterize
    mean = tuple(round(255 * each) for each in PREPROCESSING.mean)
    settings = {"img_mean": mean, "interpolation": Image.Resampling.BICUBIC}
    steps: list[Any] = [
        transforms.RandomResizedCrop(224, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
        *([rand("rand-m8-mstd0-inc1", settings)] if augmentation.policy == "rand" else []),
        transforms.ToTensor(),
        transforms.Normalize(PREPROCESSING.mean, PREPROCESSING.std),
    ]
    transform = transforms.Compose(steps)

    def read(file: Path) -> Any:
        with Image.open(file) as image:
            return transform(image.convert("RGB"))

    def epoch(files: list[Path], number: int) -> None:
        torch.manual_seed(number)
        for at in range(0, len(files), BATCH):
            torch.stack([read(file) for file in files[at : at + BATCH]])

    return epoch


def without_simplejpeg(epoch: Epoch) -> Epoch:
    def slower(files: list[Path], number: int) -> None:
        simplejpeg: object = getattr(jpeg, "simplejpeg")  # noqa: B009
        setattr(jpeg, "simplejpeg", None)  # noqa: B010
        epoch(files, number)
        setattr(jpeg, "simplejpeg", simplejpeg)  # noqa: B010

    return slower


def time_epoch(epoch: Epoch, files: list[Path], number: int) -> float:
    start = time.perf_counter()
    epoch(files, number)
    return time.perf_counter() - start


def measure_rows(name: str, files: list[Path], rounds: int) -> list[list[str]]:
    """One row per augmentation: images per second of torchvision, then ratios to it."""
    table: list[list[str]] = []
    for label, augmentation in (("crop, flip", CROP_AND_FLIP), ("and RandAugment", RANDAUGMENT)):
        mine = vitrail_epoch(augmentation)
        epochs = {"peer": torchvision_epoch(augmentation), "own": mine, "without": without_simplejpeg(mine)}
        times: dict[str, list[float]] = {each: [] for each in epochs}
        order = list(epochs)
        for number in track(range(rounds + 1), f"{name}: {label}", transient=True):
            for each in order:
                times[each].append(time_epoch(epochs[each], files, number))
            order.append(order.pop(0))
        peer, own, without = (times[each][1:] for each in epochs)  # the first round is a warm-up
        cells = [name, str(len(files)), label, f"{len(files) / statistics.median(peer):.0f}"]
        table.append([*cells, format_ratio(peer, own), format_ratio(peer, without)])
    return table


def list_photos(folder: Path, count: int) -> list[Path]:
    """`count` files of the folder, evenly spaced."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    return files[:: max(len(files) // count, 1)][:count]


def draw_photos(folder: Path, count: int) -> None:
    draws = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(draws.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)


def main(
    folder: Annotated[Path | None, Parameter(help="Folder of JPEG files.")] = None,
    /,
    *,
    rounds: int = 15,
    files: int = 128,
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every folder and print the table."""
    torch.set_num_threads(1)
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory() as drawn:
        shared = [SHARED / name for name in ("imagenet-val-1000", "ants-bees")]
        folders = [folder] if folder else [each for each in shared if each.exists()]
        if not folders:
            draw_photos(Path(drawn), files)
            folders = [Path(drawn)]
        for each in folders:
            table += measure_rows(each.name, list_photos(each, files), rounds)
    heading = ("photos", "files", "augmentation", "torchvision", "vitrail", "without simplejpeg")
    simplejpeg = "" if find_spec("simplejpeg") else "simplejpeg is not installed."
    run_line = describe_run("image_pipeline.py", f"--rounds {rounds}", 1)
    present("images", (markdown_table(heading, table, "lrlrrr"), f"{run_line} {simplejpeg}"), page)


if __name__ == "__main__":
    run(main)
