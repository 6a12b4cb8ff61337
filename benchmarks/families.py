"""Speed of eight architectures compared with timm: forward passes, training steps, and the exported model.

    make bench

The libraries alternate within each round, so that a busy moment of the machine affects both; ratios are computed within
each round. Printed are the median and the quartiles of the ratio to timm in PyTorch. Higher is faster. The column ONNX
is the forward pass of the file that `vitrail export` writes, run by ONNX Runtime with as many threads.
"""

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
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from throughput import Step, make_inference_step, make_training_step, time_step

import vitrail
from vitrail.models.base.checks import pair

BATCHES = (1, 8)
TURN_SECONDS = 0.4  # of steps in a turn, at least one
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
    for batch in BATCHES:
        forward = make_inference_step(theirs, batch, size)
        cases.append(Case("forward", batch, forward, make_inference_step(own, batch, size)))
        cases.append(Case("ONNX", batch, forward, make_onnx_step(own, batch, folder, threads)))
    for batch in BATCHES:
        batch = max(batch, 2) if preset.startswith("levit") else batch
        models = timm.create_model(preset), vitrail.create(preset)
        steps = [make_training_step(model, batch, size) for model in models]
        cases.append(Case("training", batch, *steps))
    return cases


def measure(case: Case, rounds: int, label: str) -> str:
    """The ratio of timm's time to vitrail's; they take turns in being first."""
    theirs, own = list[float](), list[float]()
    repeats = max(1, round(TURN_SECONDS / max(time_step(case.timm, 2), time_step(case.vitrail, 2))))
    for number in track(range(rounds), f"{label} {case.name} × {case.batch}".ljust(26), transient=True):
        order = (case.timm, case.vitrail) if number % 2 else (case.vitrail, case.timm)
        times = {id(step): time_step(step, repeats) for step in order}
        theirs.append(times[id(case.timm)])
        own.append(times[id(case.vitrail)])
    return format_ratio(theirs, own)


def main(
    *,
    rounds: int = 10,
    threads: int = 2,
    only: Annotated[str, Parameter(help="Measure only this model.")] = "",
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for label, preset in MODELS.items():
            if only and only != label:
                continue
            cases = make_cases(preset, Path(folder) / preset, threads)
            found = {(case.name, case.batch): measure(case, rounds, label) for case in cases}
            rows.append([label, *(found[key] for key in sorted(found))])
            print(
                f"{label}: {', '.join(f'{name} × {size} {ratio}' for (name, size), ratio in found.items())}", flush=True
            )
    heading = ("model", "ONNX × 1", "ONNX × 8", "forward × 1", "forward × 8", "training × 1", "training × 8")
    table = markdown_table(heading, rows, "lrrrrrr")
    present("families", (table, describe_run("families.py", f"--rounds {rounds}", threads)), page)


if __name__ == "__main__":
    run(main)
