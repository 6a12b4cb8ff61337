"""Forward and training-step throughput of ViT-Ti/16 and ViT-B/16 compared with timm, transformers and vit-pytorch.

    make bench

The libraries alternate, round after round, so that a busy moment of the machine affects all of them. Ratios are
computed within each round; the median of the rounds is printed with the quartiles, timm = 1. Higher is faster.

`make bench` makes the C allocator keep freed memory. By default glibc returns large tensors to the system and faults
them in again, up to 100,000 pages per step, and the same code differs by 30% from run to run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm and transformers

# isort: split
import timm
import torch
import torch.nn.functional as F
import transformers
import vit_pytorch
from cyclopts import Parameter, run
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from torch import Tensor, nn

import vitrail

Step = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    name: str
    preset: str
    width: int
    heads: int
    depth: int = 12


@dataclass(frozen=True)
class Case:
    shape: Shape
    training: bool
    batch: int
    repeats: int  # steps per round: fast steps need several to be timed well


TINY = Shape("Ti/16", "vit_tiny_patch16_224", 192, 3)
WARM_STEPS = 3
BASE = Shape("B/16", "vit_base_patch16_224", 768, 12)
CASES = (
    Case(TINY, training=False, batch=1, repeats=8),
    Case(TINY, training=False, batch=16, repeats=1),
    Case(BASE, training=False, batch=1, repeats=2),
    Case(BASE, training=False, batch=4, repeats=1),
    Case(TINY, training=True, batch=8, repeats=1),
    Case(BASE, training=True, batch=2, repeats=1),
)


class LogitsOnly(nn.Module):
    """The logits; transformers returns them in an object."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def build_transformers_model(shape: Shape) -> nn.Module:
    sizes = {"hidden_size": shape.width, "num_hidden_layers": shape.depth, "num_attention_heads": shape.heads}
    options: Any = {"intermediate_size": 4 * shape.width, "num_labels": 1000, "attn_implementation": "sdpa"}
    return LogitsOnly(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **options)))


def build_models(shape: Shape) -> dict[str, nn.Module]:
    return {
        "timm": timm.create_model(shape.preset),
        "vitrail": vitrail.create(shape.preset),
        "transformers": build_transformers_model(shape),
        "vit-pytorch": vit_pytorch.ViT(
            image_size=224,
            patch_size=16,
            num_classes=1000,
            dim=shape.width,
            depth=shape.depth,
            heads=shape.heads,
            dim_head=shape.width // shape.heads,
            mlp_dim=4 * shape.width,
        ),
    }


def make_inference_step(model: nn.Module, batch: int, pixels: int = 224) -> Step:
    images = torch.randn(batch, 3, pixels, pixels)
    model.eval()

    def step() -> None:
        with torch.inference_mode():
            model(images)

    return step


def make_training_step(model: nn.Module, batch: int, pixels: int = 224) -> Step:
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(1000, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_step(step: Step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each library, round by round; the order changes every round."""
    make = make_training_step if case.training else make_inference_step
    steps = {name: make(model, case.batch) for name, model in build_models(case.shape).items()}
    for step in steps.values():
        time_step(step, WARM_STEPS)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    label = f"{case.shape.name} {'training' if case.training else 'inference'} × {case.batch}"
    for _ in track(range(rounds), label.ljust(24), transient=True):
        for name in order:
            times[name].append(time_step(steps[name], case.repeats))
        order.append(order.pop(0))
    return times


def format_row(case: Case, times: dict[str, list[float]]) -> list[str]:
    cells = [case.shape.name, "training step" if case.training else "inference", str(case.batch)]
    cells.append(f"{case.batch / statistics.median(times['timm']):.1f}")
    for name in ("vitrail", "transformers", "vit-pytorch"):
        cells.append(format_ratio(times["timm"], times[name], 3))
    return cells


def main(
    *,
    rounds: int = 20,
    threads: int = 2,
    only: Annotated[str, Parameter(help="Measure only Ti or B.")] = "",
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    lines = [format_row(case, measure(case, rounds)) for case in CASES if case.shape.name.startswith(only)]
    heading = ("model", "mode", "batch", "timm, images/s", "vitrail", "transformers", "vit-pytorch")
    table = markdown_table(heading, lines, "llrrrrr")
    present("throughput", (table, describe_run("throughput.py", f"--rounds {rounds}", threads)), page)


if __name__ == "__main__":
    run(main)
