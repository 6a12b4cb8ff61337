"""The cost of inspection: time of the maps of one image relative to a forward pass, and memory of `vitrail.look`.

    make bench

ViT-Ti/16 with random weights, one image, no figures. Methods alternate, round after round; ratios to the plain forward
pass are computed within each round, and the median of the rounds is printed with the quartiles. timm runs without fused
attention, with hooks on its attention maps and the same rollout. Memory is the peak resident set of a new process that
runs `vitrail.look` with all analyses on 200 images, compared with one that only predicts.
"""

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import Parameter, run
from numpy.typing import NDArray
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm
from throughput import time_step
from torch import Tensor, nn

import vitrail
from vitrail.inspection.attention.rollout import attention_rollout
from vitrail.inspection.explain.explain_options import ExplainMethod, ExplainOptions
from vitrail.inspection.explain.explainer import Explainer

PREPROCESSING = vitrail.Preprocessing()


def build_explainer() -> Explainer:
    torch.manual_seed(0)
    return Explainer(vitrail.create("ViT-Ti/16"), preprocessing=PREPROCESSING)


def make_map_step(ours: Explainer, pixels: Tensor, method: ExplainMethod) -> Callable[[], object]:
    question = ours.resolve_options(ExplainOptions(method=method))
    return lambda: ours.compute_maps(pixels, question)


def timm_rollout(pixels: Tensor) -> Callable[[], object]:
    """The usual way: unfused attention, with hooks on the dropout that receives its maps."""
    import timm  # here: not imported by the processes whose memory is measured

    model: Any = timm.create_model("vit_tiny_patch16_224").eval()
    maps = list[NDArray[Any]]()

    def catch(_: nn.Module, __: object, made: Tensor) -> None:
        maps.append(made.numpy())

    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(catch)

    @torch.no_grad()
    def ask() -> object:
        maps.clear()
        model(pixels)
        return attention_rollout(maps)

    return ask


def random_images(count: int) -> Any:
    draws = np.random.default_rng(0)
    return (draws.integers(0, 256, (256, 256, 3), dtype=np.uint8) for _ in range(count))


def measure_peak_memory(way: str, images: int) -> float:
    """Peak resident set in megabytes of a new process."""
    torch.set_num_threads(1)
    ours = build_explainer()
    if way == "look":
        vitrail.look(ours, random_images(images))
    else:
        with torch.no_grad():
            for image in random_images(images):
                ours.model(ours.loaded.make_batch([image]))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def main(
    *,
    rounds: int = 40,
    threads: int = 2,
    images: int = 200,
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Print two tables: time relative to the plain forward pass, and memory."""
    torch.set_num_threads(threads)
    ours, pixels = build_explainer(), torch.randn(1, 3, 224, 224)

    @torch.no_grad()
    def plain() -> object:
        return ours.model(pixels)

    methods: tuple[ExplainMethod, ...] = ("rollout", "attention", "norms", "grad-rollout")
    ways = {"plain forward pass": plain, **{method: make_map_step(ours, pixels, method) for method in methods}}
    ways["timm, unfused, rollout"] = timm_rollout(pixels)
    for way in ways.values():
        time_step(way, 3)
    times: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(0)
    for _ in track(range(rounds), "one image", transient=True):
        shuffle.shuffle(order)  # numpy's threads spin for a while and slow down whichever method comes next
        for name in order:
            time.sleep(0.1)
            time_step(ways[name], 1)
            times[name].append(time_step(ways[name], 3))
    first = times["plain forward pass"]
    rows = list[tuple[str, ...]]()
    for name, each in times.items():
        rows.append((name, f"{1000 * statistics.median(each):.1f}", format_ratio(each, first)))
    maps = markdown_table(("ViT-Ti/16, one image", "ms", "to the plain pass"), rows, "lrr")

    rows = list[tuple[str, ...]]()
    for way, name in (("predict", "predicted"), ("look", "`vitrail.look`")):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append((f"{images} images, {name}", f"{pool.submit(measure_peak_memory, way, images).result():.0f}"))
    memory = markdown_table(("ViT-Ti/16", "MB at most"), rows, "lr")
    present("inspection", (maps, memory, describe_run("inspection.py", f"--rounds {rounds}", threads)), page)


if __name__ == "__main__":
    run(main)
