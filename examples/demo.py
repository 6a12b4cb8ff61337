"""The demo of `make demo`: train a small ViT from scratch on the bundled images, then show what it attends to."""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.cli import build_app
from vitrail.data.datasets import open_data
from vitrail.data.image_items import spread_over_labels
from vitrail.text import format_table
from vitrail.train.run_folder import RunFolder

RUNS = Path("runs")


def print_title(text: str) -> None:
    print(f"\n{text}\n{'═' * len(text)}", flush=True)


def train_demo_model(extra: list[str]) -> Path:
    folder = next(place for n in range(1, 10_000) if not (place := RUNS / f"demo-{n}").exists())
    words = ["train", "--out", str(folder), *extra]
    print_title(f"Training: vitrail {' '.join(words)}")
    build_app()(words, exit_on_error=False, result_action="return_value")
    return folder


def show_curve(folder: Path) -> None:
    print_title("Validation accuracy per epoch")
    for record in RunFolder(folder).read_records():
        if "val_top1" in record:
            share = record["val_top1"]
            print(f"{record['epoch']:5.0f}  {share:6.1%}  {'█' * round(50 * share)}")


def show_predictions(folder: Path) -> None:
    print_title("Predictions for validation images")
    predictor, images = vitrail.Predictor(folder / "model"), open_data("fashion").val
    assert images is not None
    lines = list[tuple[str, str, str]]()
    for index in spread_over_labels([images.label(n) for n in range(len(images))], len(images.classes)):
        best = predictor.predict(images.source(index)).top[0]
        lines.append((images.classes[images.label(index)], str(best.label), f"{best.probability:.2f}"))
    print("\n".join(format_table(("label", "prediction", "probability"), lines, "llr")))


def show_attention(folder: Path) -> None:
    print_title("What it attends to")
    images = open_data("fashion").val
    assert images is not None
    photo = folder / "photo.png"
    Image.fromarray(images.source(3).squeeze()).save(photo)
    for words in (
        ["explain", str(folder), str(photo), "--check", "-o", str(folder / "explained")],
        ["report", str(folder), "--images", "16", "--explained", "4", "-o", str(folder / "report.html")],
    ):
        print(f"$ vitrail {' '.join(words)}", flush=True)
        build_app()(words, exit_on_error=False, result_action="return_value")


def print_next_steps(folder: Path) -> None:
    print_title("Next steps")
    print(
        f"vitrail eval {folder} --out {folder}/results     errors per class, confusion matrix, calibration\n"
        "vitrail train --data PHOTOS --init WEIGHTS         fine-tune on your own photos, PHOTOS/CLASS/*.jpg\n"
        "vitrail train --data CIFAR10 --recipe cifar10-cpu  CIFAR-10 from scratch, in half an hour on two cores\n"
        "vitrail runs                                       compare runs\n"
        "vitrail explain WEIGHTS PHOTO.jpg                  what a public ViT attends to in your photo\n"
        "python examples/tour.py                            the models, and one forward pass step by step"
    )


if __name__ == "__main__":
    run_folder = train_demo_model(sys.argv[1:])
    show_curve(run_folder)
    show_predictions(run_folder)
    show_attention(run_folder)
    print_next_steps(run_folder)
