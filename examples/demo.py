"""The demo of `make demo`: train a small ViT from scratch on the bundled images, then show what it attends to."""

import shutil
import sys
from itertools import chain, count
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.base.text import format_table
from vitrail.cli import build_app
from vitrail.data.images.datasets import ImageDataset, open_data
from vitrail.train.run_folder import RunFolder

RUNS = Path("runs")
EXPLAINED_CLASS = "Dress"
EXPLAINED_FILE = "dress.png"


def print_title(text: str) -> None:
    print(f"\n{text}\n{'═' * len(text)}", flush=True)


def run_command(*words: str) -> None:
    print(f"$ vitrail {' '.join(words)}", flush=True)
    build_app()(words, exit_on_error=False, result_action="return_value")


def train_demo_model(options: list[str]) -> Path:
    """Train in the first free folder of runs/demo, runs/demo-2, runs/demo-3, …"""
    names = chain(["demo"], (f"demo-{number}" for number in count(2)))
    folder = next(RUNS / name for name in names if not (RUNS / name).exists())
    print_title("Train")
    run_command("train", "--out", str(folder), *options)
    return folder


def show_curve(folder: Path) -> None:
    print_title("Validation accuracy per epoch")
    for record in RunFolder(folder).read_records():
        if "val_top1" in record:
            share = record["val_top1"]
            print(f"{record['epoch']:5.0f}  {share:6.1%}  {'█' * round(50 * share)}")


def open_test_images() -> ImageDataset:
    images = open_data("fashion").val
    assert images is not None
    return images


def find_first_of_class(images: ImageDataset, label: str) -> int:
    return next(n for n in range(len(images)) if images.classes[images.label(n)] == label)


def show_predictions(folder: Path) -> None:
    print_title("Predictions for one test image per class")
    images = open_test_images()
    sources = [images.source(find_first_of_class(images, label)) for label in images.classes]
    predictions = vitrail.Predictor(folder).predict_all(sources, top=1)
    lines = [
        (label, str(found.top[0].label), f"{found.top[0].probability:.0%}", "" if found.top[0].label == label else "✗")
        for label, found in zip(images.classes, predictions, strict=True)
    ]
    print("\n".join(format_table(("label", "prediction", "probability", ""), lines, "llrl")))


def show_attention(folder: Path) -> None:
    print_title("What it attends to")
    images, photo = open_test_images(), folder / EXPLAINED_FILE
    Image.fromarray(images.source(find_first_of_class(images, EXPLAINED_CLASS)).squeeze()).save(photo)
    run_command("explain", str(folder), str(photo), "--check", "-o", f"{folder}/explained")
    run_command("report", str(folder), "--images", "20", "--explained", "4", "-o", f"{folder}/report.html")


def print_next_steps(folder: Path) -> None:
    print_title("Next steps")
    if shutil.which("vitrail") is None:
        print(f"source {Path(sys.executable).with_name('activate')}    # puts the command vitrail on the path\n")
    steps = (
        (f"vitrail eval {folder} --out {folder}/results", "errors per class, confusion matrix, calibration"),
        (f"vitrail predict {folder} {folder}/{EXPLAINED_FILE}", "classify an image"),
        ("vitrail predict cct_cifar10 example:cat", "a bundled model and a bundled photo"),
        (f"vitrail train --init {folder} --epochs 4", "train further from these weights"),
        ("vitrail runs", "compare runs"),
        (f"python {Path(sys.argv[0]).with_name('tour.py')}", "the models, and one forward pass step by step"),
    )
    width = max(len(command) for command, _ in steps)
    print("\n".join(f"{command:{width}}    # {text}" for command, text in steps))
    print(f"\nfigure  {folder}/explained/{Path(EXPLAINED_FILE).stem}.grad-rollout.png")
    print(f"report  {folder}/report.html, open it in a browser")
    print(f"page    vitrail serve {folder}, then open http://127.0.0.1:8000/")


if __name__ == "__main__":
    run_folder = train_demo_model(sys.argv[1:])
    show_curve(run_folder)
    show_predictions(run_folder)
    show_attention(run_folder)
    print_next_steps(run_folder)
