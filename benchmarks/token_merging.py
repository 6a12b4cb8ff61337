"""Token merging on public weights: speed and accuracy with R merges per layer, as a markdown table.

    make bench

Each of the 1,000 photos in ../shared/data is classified with every R, batch by batch; the order changes with every
batch. Ratios to R = 0 are computed within each batch, without decoding; the median of the batches is printed with the
quartiles. With --onnx the same is measured for ONNX Runtime in a separate pass, with each model exported.
"""

import csv
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from cyclopts import run
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.checkpoint import read
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.inspection.summary import copy_to_meta
from vitrail.models.parts.token_merging import add_token_merging
from vitrail.study.timing import MedianAndQuartiles

SHARED = Path(__file__).parents[2] / "shared" / "data"
WEIGHTS = {
    "ViT-Ti/16": "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
    "DeiT-Ti": "deit_tiny_patch16_224.pth",
}
MERGES = (0, 2, 4, 8, 12, 16)
Forward = Callable[[Tensor], Tensor]


def iterate_batches(how: Preprocessing, batch: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of model input and labels, evenly spaced over all photos."""
    with (SHARED / "imagenet-val-1000-reference.csv").open() as file:
        rows = list(csv.DictReader(file))
    chosen = iter(rows[:: max(1, len(rows) // count)][:count])
    while part := list(islice(chosen, batch)):
        images = [preprocess_image(open_image(SHARED / "imagenet-val-1000" / row["file"]), how) for row in part]
        yield torch.from_numpy(np.stack(images)), torch.tensor([int(row["label"]) for row in part])


def measure(ways: dict[int, Forward], how: Preprocessing, batch: int, count: int, label: str) -> Any:
    """Seconds per batch and predicted class per photo, by R; and the labels."""
    times = {merges: list[float]() for merges in ways}
    classes = {merges: list[Tensor]() for merges in ways}
    labels, order = list[Tensor](), list(ways)
    for images, right in track(iterate_batches(how, batch, count), label, total=-(-count // batch), transient=True):
        if not labels:
            for way in (*ways.values(), *ways.values()):
                way(images)
        labels.append(right)
        for merges in order:
            start = time.perf_counter()
            logits = ways[merges](images)
            times[merges].append((time.perf_counter() - start) / len(images))
            classes[merges].append(logits.argmax(-1))
        order.append(order.pop(0))
    return times, {merges: torch.cat(each) for merges, each in classes.items()}, torch.cat(labels)


def count_macs(model: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy_to_meta(model)(torch.empty(1, model.config.channels, *model.config.image_size, device="meta"))
    return counter.get_total_flops() // 2


def run_eager(model: nn.Module) -> Forward:
    @torch.inference_mode()
    def answer(images: Tensor) -> Tensor:
        return model(images)

    return answer


def run_exported(model: Any, path: Path, threads: int) -> Forward:
    import onnxruntime

    example, shapes = torch.zeros(2, 3, *model.config.image_size), ({0: torch.export.Dim("batch", min=1)},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from torch's exporter
        torch.onnx.export(model, (example,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def format_rows(name: str, models: dict[int, nn.Module], measured: Any) -> Iterator[str]:
    times, classes, right = measured
    whole, costs = next(iter(models)), {merges: count_macs(model) for merges, model in models.items()}
    for merges in models:
        ratios = [first / mine for first, mine in zip(times[whole], times[merges], strict=True)]
        spread = MedianAndQuartiles.from_values(ratios)
        top, agree = ((classes[merges] == each).double().mean().item() for each in (right, classes[whole]))
        speed, share = 1 / statistics.median(times[merges]), costs[merges] / costs[whole]
        ratio = f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"
        yield f"| {name} | {merges} | {share:.0%} | {top:.1%} | {agree:.1%} | {speed:.1f} | {ratio} |"


def make_table(
    *, merges: tuple[int, ...] = MERGES, batch: int = 8, threads: int = 2, images: int = 1000, onnx: bool = False
) -> str:
    """The table of both models; the first R is the baseline."""
    torch.set_num_threads(threads)
    lines = list[str]()
    for name, file in WEIGHTS.items():
        found = read(SHARED / "weights" / file)
        assert found.description.preprocessing is not None
        how = replace(found.description.preprocessing, crop=0.875)  # 224 of the stored 256 pixels
        models = {each: add_token_merging(found.model, each).eval() for each in merges}
        ways = {each: run_eager(model) for each, model in models.items()}
        lines += format_rows(name, models, measure(ways, how, batch, images, name))
        if onnx:
            with TemporaryDirectory() as folder:
                ways = {each: run_exported(models[each], Path(folder) / f"{each}.onnx", threads) for each in merges}
                lines += format_rows(f"{name}, ONNX", models, measure(ways, how, batch, images, f"{name}, ONNX"))
    heading = "| model | R | MACs | top-1 | agrees with R = 0 | images/s | to R = 0 (quartiles) |"
    table = "\n".join((heading, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |", *lines))
    return f"{images:,} photos, batches of {batch}, in torch.\n\n{table}"


def main(
    *, merges: tuple[int, ...] = MERGES, batch: int = 8, threads: int = 2, images: int = 1000, onnx: bool = False
) -> None:
    """Print the table."""
    print(make_table(merges=merges, batch=batch, threads=threads, images=images, onnx=onnx))


if __name__ == "__main__":
    run(main)
