"""Speed of eight architectures compared with timm: forward passes, training steps, and the exported model.

    make bench

The libraries alternate within each round, so that a busy moment of the machine affects both; ratios are computed within
each round. Printed are the median and the quartiles of the ratio to timm in PyTorch. Higher is faster. The column ONNX
is the forward pass of the file that `vitrail export` writes, run by ONNX Runtime with as many threads.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split
import onnxruntime
import timm
import torch
from cyclopts import Parameter, run
from rich.progress import track
from throughput import Step, make_inference_step, make_training_step, time_step

import vitrail
from vitrail.base.text import format_table
from vitrail.models.base.checks import pair

MODELS = {
    "Swin-T": "swin_tiny_patch4_window7_224",
    "MaxViT-T": "maxvit_tiny_tf_224",
    "LeViT-256": "levit_256",
    "Twins-S": "twins_svt_small",
    "PVTv2-b0": "pvt_v2_b0",
    "MobileViT-s": "mobilevit_s",
    "BEiT-B": "beit_base_patch16_224",
    "ConvNeXt-T": "convnext_tiny",
}


@dataclass(frozen=True)
class Case:
    name: str  # forward, training or ONNX
    batch: int
    timm: Step
    vitrail: Step


def make_onnx_step(model: Any, batch: int, folder: Path, threads: int) -> Step:
    size = pair(model.config.image_size)[0]
    if not folder.exists():
        vitrail.export_model(model, folder, preprocessing=vitrail.Preprocessing(image_size=size))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(next(folder.glob("*.onnx"))), options, ["CPUExecutionProvider"])
    pixels = torch.randint(256, (batch, size, size, 3), dtype=torch.uint8).numpy()
    name = session.get_inputs()[0].name

    def step() -> None:
        session.run(None, {name: pixels})

    return step


def make_cases(preset: str, folder: Path, threads: int) -> list[Case]:
    """A batch norm of the head cannot be trained with one image, so LeViT is trained with two."""
    cases = list[Case]()
    own, theirs = vitrail.create(preset), timm.create_model(preset)
    size = pair(own.config.image_size)[0]
    for batch in (1, 8):
        forward = make_inference_step(theirs, batch, size)
        cases.append(Case("forward", batch, forward, make_inference_step(own, batch, size)))
        cases.append(Case("ONNX", batch, forward, make_onnx_step(own, batch, folder, threads)))
    for batch in (2 if preset.startswith("levit") else 1, 8):
        models = timm.create_model(preset), vitrail.create(preset)
        steps = [make_training_step(model, batch, size) for model in models]
        cases.append(Case("training", batch, *steps))
    return cases


def measure(case: Case, rounds: int, label: str) -> list[float]:
    """Ratios of timm's time to vitrail's, round by round; they take turns in being first."""
    ratios = list[float]()
    repeats = max(1, round(0.4 / max(time_step(case.timm, 2), time_step(case.vitrail, 2))))
    for number in track(range(rounds), f"{label} {case.name} × {case.batch}".ljust(26), transient=True):
        order = (case.timm, case.vitrail) if number % 2 else (case.vitrail, case.timm)
        times = {id(step): time_step(step, repeats) for step in order}
        ratios.append(times[id(case.timm)] / times[id(case.vitrail)])
    return ratios


def format_ratios(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def main(
    *, rounds: int = 10, threads: int = 2, only: Annotated[str, Parameter(help="Measure only this model.")] = ""
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, timm {timm.__version__}, {threads} threads, {rounds} rounds; ratio to timm")
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for label, preset in MODELS.items():
            if only and only != label:
                continue
            cases = make_cases(preset, Path(folder) / preset, threads)
            found = {(case.name, case.batch): format_ratios(measure(case, rounds, label)) for case in cases}
            rows.append([label, *(found[key] for key in sorted(found))])
            print("\n".join(f"{label} {name} × {batch}: {ratio}" for (name, batch), ratio in found.items()), flush=True)
    heading = ("model", "ONNX × 1", "ONNX × 8", "forward × 1", "forward × 8", "training × 1", "training × 8")
    print("\n".join(format_table(heading, rows, "lrrrrrr")))


if __name__ == "__main__":
    run(main)
