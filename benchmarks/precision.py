"""A training step in float32 and in bfloat16, of vitrail and of timm as it comes and with autocast switched on.

    make bench

All four take turns, round after round. Ratios to timm in float32 are computed within each round; the median of the
rounds is printed with the quartiles. Higher is faster. On a CPU without bfloat16 instructions only float32 is measured.
"""

import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from cyclopts import Parameter, run
from rich.progress import track
from throughput import Step, time_step, timm  # which prepares timm's import
from torch import nn

import vitrail
from vitrail.base.machine import find_bfloat16_instructions
from vitrail.base.text import format_table

CASES = (
    ("vit_tiny_patch16_224", 8),
    ("vit_tiny_patch16_224", 32),
    ("vit_small_patch16_224", 8),
    ("vit_base_patch16_224", 4),
    ("swin_tiny_patch4_window7_224", 4),
)


def make_step(model: nn.Module, batch: int, *, bfloat16: bool) -> Step:
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(preset: str, batch: int, rounds: int, precisions: tuple[bool, ...]) -> dict[str, list[float]]:
    """Seconds per step of each library in each precision; the order changes every round."""
    libraries: dict[str, Callable[[str], nn.Module]] = {"timm": timm.create_model, "vitrail": vitrail.create}
    steps = {
        f"{name}, {'bfloat16' if bfloat16 else 'float32'}": make_step(create(preset), batch, bfloat16=bfloat16)
        for bfloat16 in precisions
        for name, create in libraries.items()
    }
    for step in steps.values():
        time_step(step, 2)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in track(range(rounds), f"{preset} × {batch}".ljust(36), transient=True):
        for name in order:
            times[name].append(time_step(steps[name], 1))
        order.append(order.pop(0))
    return times


def format_row(preset: str, batch: int, times: dict[str, list[float]]) -> list[str]:
    base, *others = times
    cells = [preset, str(batch), f"{batch / statistics.median(times[base]):.1f}"]
    for name in others:
        ratios = [float32 / own for float32, own in zip(times[base], times[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
    return cells


def main(
    *, rounds: int = 12, threads: int = 2, only: Annotated[str, Parameter(help="Part of the names to measure.")] = ""
) -> None:
    """Measure every case and print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    instructions = find_bfloat16_instructions()
    precisions = (False, True) if instructions else (False,)
    known = instructions or "no bfloat16 instructions: float32 only"
    print(f"torch {torch.__version__}, timm {timm.__version__}, {threads} threads, {rounds} rounds, {known}")
    heading = ["training step", "batch", "timm images/s", "vitrail", "timm, bfloat16", "vitrail, bfloat16"]
    chosen = [case for case in CASES if only in case[0]]
    rows = [format_row(preset, batch, measure(preset, batch, rounds, precisions)) for preset, batch in chosen]
    count = 3 + 2 * len(precisions) - 1
    print("\n".join(format_table(tuple(heading[:count]), rows, "lr" + "r" * (count - 2))))


if __name__ == "__main__":
    run(main)
