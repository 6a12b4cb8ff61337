"""What `make demo` shows: a small ViT learns the embedded pictures from nothing, and what it then looks at."""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.cli import build_app
from vitrail.data.datasets import open_data
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
    print_title("Validation accuracy, epoch by epoch")
    for record in RunFolder(folder).read_records():
        if "val_top1" in record:
            share = record["val_top1"]
            print(f"{record['epoch']:5.0f}  {share:6.1%}  {'█' * round(50 * share)}")


def show_predictions(folder: Path) -> None:
    print_title("A few pictures that it has not seen")
    predictor, pictures = vitrail.Predictor(folder / "model"), open_data("fashion").val
    assert pictures is not None
    lines = list[tuple[str, str, str]]()
    for index in range(0, len(pictures), len(pictures) // 8):
        best = predictor.predict(pictures.source(index)).top[0]
        lines.append((pictures.classes[pictures.label(index)], str(best.label), f"{best.probability:.2f}"))
    print("\n".join(format_table(("it is", "the model says", "probability"), lines, "llr")))


def show_attention(folder: Path) -> None:
    print_title("What it looks at")
    pictures = open_data("fashion").val
    assert pictures is not None
    photo = folder / "photo.png"
    Image.fromarray(pictures.source(3).squeeze()).save(photo)
    for words in (
        ["explain", str(folder), str(photo), "--method", "grad-rollout", "--check", "-o", str(folder / "explained")],
        ["report", str(folder), "--images", "16", "--explained", "4", "-o", str(folder / "report.html")],
    ):
        print(f"$ vitrail {' '.join(words)}", flush=True)
        build_app()(words, exit_on_error=False, result_action="return_value")


def print_next_steps(folder: Path) -> None:
    print_title("And now")
    print(
        f"vitrail eval {folder} --out {folder}/results     where it errs: per class, confusion, calibration\n"
        "vitrail train --data PHOTOS --init WEIGHTS         your own photos, PHOTOS/CLASS/*.jpg, in a few minutes\n"
        "vitrail train --data CIFAR10 --recipe cifar10-cpu  CIFAR-10 from scratch, in half an hour on two cores\n"
        "vitrail runs                                       runs side by side\n"
        "vitrail explain WEIGHTS PHOTO.jpg                  what any public ViT looks at in your photo\n"
        "python examples/tour.py                            the models, and one forward pass taken apart"
    )


if __name__ == "__main__":
    made = train_demo_model(sys.argv[1:])
    show_curve(made)
    show_predictions(made)
    show_attention(made)
    print_next_steps(made)
