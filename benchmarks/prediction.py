"""Benchmarks of prediction: engines, accuracy of int8, cold start, a folder of photos, token merging, model sizes.

    PYTHONPATH=tests .venv/bin/python benchmarks/prediction.py [--only engines,cold] [--rounds 3]

Part of `make bench`, which writes docs/benchmarks.md. ViT-Ti/16 and DeiT-Ti/16 use public weights if they are in
../shared/data, B/16 random ones; timm and transformers run the same weights from their own files.
"""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm

# isort: split
import numpy as np
from cyclopts import Parameter, run
from numpy.typing import NDArray
from prediction_models import WEIGHTS, PredictionBench, SectionSkippedError, describe_weights, require_path
from prediction_processes import measure_cold_start, measure_folder
from results_page import describe_run, markdown_table, present
from token_merging import make_table

import vitrail
from vitrail.base.machine import find_bfloat16_instructions
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.predict.predictions import softmax
from vitrail.predict.predictor import EngineName
from vitrail.study.bench import BenchCase, BenchLine, BenchRequest, format_quartiles, run_benchmark
from vitrail.study.bench_engines import INEXACT_ENGINES

SPEEDUP_TARGETS = {
    ("ViT-Ti/16", 1): (1.35, 1.8),
    ("ViT-Ti/16", 8): (1.25, 1.8),
    ("ViT-B/16", 1): (1.25, 2.2),
}  # exact, int8
ACCURACY_TARGETS = {"int8": "within 0.5", "bfloat16": "within 0.3"}  # points of top-1
BFLOAT16: tuple[EngineName, ...] = ("bfloat16",) if find_bfloat16_instructions() else ()
ENGINES: tuple[EngineName, ...] = ("eager", *BFLOAT16, "onnx", "int8")
PEERS = ("timm",)


def measure_engines(work: PredictionBench) -> str:
    """Every engine in one run with timm, which is the baseline."""
    lines, notes = list[BenchLine](), list[str]()
    for name, batches in (("ViT-Ti/16", (1, 8)), ("ViT-B/16", (1,))):
        stock = work.stock(name)
        request = BenchRequest(
            models=(stock.model,),
            engines=work.engines(ENGINES),
            peers=PEERS,
            rounds=work.rounds_of("engines"),
            starts=0,
            seed=work.seed,
        )
        for batch in batches:
            found = BenchCase(request, stock, batch, work.threads, notes).measure_lines()
            lines += [replace(line, model=name) for line in found]
    best = list[list[str]]()
    for (model, batch), targets in SPEEDUP_TARGETS.items():
        own = [line for line in lines if (line.model, line.batch) == (model, batch) and line.way != line.base]
        cells = [model, str(batch)]
        for exact, target in zip((True, False), targets, strict=True):
            fastest = max(
                (line for line in own if line.exact == exact), key=lambda line: line.ratio.median, default=None
            )
            speedup = "failed" if fastest is None else f"**{fastest.ratio.median:.2f}** ({fastest.way})"
            cells += [speedup, f"≥ {target}"]
        best.append(cells)
    rows = [
        (
            line.model,
            str(line.batch),
            line.way,
            f"{line.images_per_second.median:.1f}",
            *(f"{each:.1f}" for each in line.latency),
            f"{line.ratio.median:.2f} ({format_quartiles(line.ratio)})" if line.way != line.base else "1",
        )
        for line in lines
    ]
    return "\n\n".join(
        (
            f"Speed relative to timm's eager model with the same weights "
            f"({describe_weights('ViT-Ti/16', 'ViT-B/16')}), a "
            f"batch in memory, {work.rounds_of('engines')} rounds. timm receives normalized pixels; vitrail also "
            "normalizes them.",
            markdown_table(("model", "batch", "fastest exact", "target", "fastest inexact", "target"), best, "lrrrrr"),
            "All engines; × 2 is two streams of one thread each, between which a batch is divided:",
            markdown_table(
                ("model", "batch", "engine", "images/s", "ms: p50", "p90", "p99", "relative to timm (quartiles)"),
                rows,
                "lrlrrrrr",
            ),
            *dict.fromkeys(notes),
        )
    )


def measure_accuracy(work: PredictionBench) -> str:
    """Top-1 of each engine, agreement with eager torch, and the largest difference of a probability."""
    files = sorted(work.photos.rglob("*.JPEG"))
    right = np.array([int(path.parent.name) for path in files])
    rows = list[tuple[str, ...]]()
    for name in ("ViT-Ti/16", "DeiT-Ti/16"):
        require_path(WEIGHTS[name][1])
        stock = work.stock(name)
        pixels = np.stack([decode_for_model(path, stock.preprocessing) for path in files])
        first: NDArray[np.float32] | None = None
        for engine in work.engines(ENGINES):
            predictor = vitrail.Predictor(stock.folder_for(engine), engine=engine, threads=work.threads)
            shares = softmax(
                np.concatenate([predictor.engine.run(pixels[at : at + 16]) for at in range(0, len(pixels), 16)])
            )
            first = shares if first is None else first
            top = shares.argmax(-1)
            rows.append(
                (
                    name,
                    engine,
                    f"{100 * np.mean(top == right):.1f}",
                    f"{100 * (np.mean(top == right) - np.mean(first.argmax(-1) == right)):+.1f}",
                    ACCURACY_TARGETS.get(engine, "0"),
                    f"{100 * np.mean(top == first.argmax(-1)):.1f}",
                    "≥ 96" if engine in INEXACT_ENGINES else "100",
                    f"{np.abs(shares - first).max():.1e}",
                    "" if engine in INEXACT_ENGINES else "≤ 1e-4",
                )
            )
    heading = (
        "model",
        "engine",
        "top-1 %",
        "to eager",
        "target",
        "agreement %",
        "target",
        "probabilities apart",
        "target",
    )
    return f"{len(files):,} validation photos of ImageNet, one per class.\n\n" + markdown_table(
        heading, rows, "llrrrrrrr"
    )


def measure_merging(work: PredictionBench) -> str:
    require_path(WEIGHTS["ViT-Ti/16"][1])
    return make_table(threads=work.threads, images=work.images)


def measure_variants(work: PredictionBench) -> str:
    request = BenchRequest(
        models=("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
        sizes=((224, 224), (384, 384)),
        engines=("eager", "onnx"),
        batches=(1,),
        threads=(work.threads,),
        rounds=work.rounds_of("variants"),
        starts=0,
        seed=work.seed,
    )
    found = run_benchmark(request, folder=work.place / "variants")
    return "\n\n".join(("Random weights.", found.make_throughput_table().to_markdown(), *found.notes))


SECTIONS = {
    "engines": measure_engines,
    "accuracy": measure_accuracy,
    "cold": measure_cold_start,
    "folder": measure_folder,
    "merging": measure_merging,
    "variants": measure_variants,
}


def main(
    *,
    only: Annotated[str, Parameter(help="Sections, separated by commas (default: all).")] = "",
    rounds: Annotated[int | None, Parameter(help="Rounds of every section (default: depends on the section).")] = None,
    threads: int = 2,
    seed: int = 0,
    images: Annotated[int, Parameter(help="Photos of the sections accuracy, folder and merging.")] = 1000,
    compiled: Annotated[bool, Parameter(help="Also measure torch.compile, which takes minutes.")] = False,
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Measure the given sections, by default all, and show each when it is done."""
    chosen = only.split(",") if only else list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        raise SystemExit(f"unknown section {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}")
    with TemporaryDirectory(prefix="vitrail-bench-") as place:
        os.environ["HOME"] = place  # caches are removed with the folder
        work = PredictionBench(Path(place), rounds, threads, seed, {}, images, compiled=compiled)
        for name in chosen:
            print(f"{name}:", flush=True)
            try:
                text = SECTIONS[name](work)
            except SectionSkippedError as error:
                print(f"skipped, since this section {error}", flush=True)
                continue
            options = f"--only {name}" + ("" if rounds is None else f" --rounds {rounds}")
            options += " --compiled" * compiled
            options += f" --images {images}" * (images != 1000)
            present(name, (text, describe_run("prediction.py", options, threads, seed)), page)


if __name__ == "__main__":
    run(main)
