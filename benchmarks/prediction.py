"""Predicting, measured: engines, int8's accuracy, a cold start, a folder of photos, merged tokens, models by size.

    PYTHONPATH=tests .venv/bin/python benchmarks/prediction.py [--only engines,cold] [--rounds 3]

Part of `make bench`. Writes docs/benchmarks.md, each section with the command, day, machine and versions that it was
measured with; a section that is not measured now keeps what it says. ViT-Ti/16 and DeiT-Ti/16 have public weights where
../shared/data holds them, and B/16 has random ones; timm and transformers run the same weights from files of their own.
"""

import csv
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before any peer

# isort: split
import numpy as np
from cyclopts import Parameter, run
from numpy.typing import NDArray
from PIL import Image
from prediction_jobs import Done, run_job
from prediction_page import markdown, write_page
from rich.console import Console

import vitrail
from vitrail.checkpoint import read, write
from vitrail.data.framed import framed
from vitrail.predict.answers import softmax
from vitrail.study.bench import Case, Request, bench
from vitrail.study.bench_results import Line, machine, quartiles, versions
from vitrail.study.contenders import Stock
from vitrail.study.turns import Spread, in_turns

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
SHARED = ROOT.parent / "shared" / "data"
PHOTOS, LABELS = SHARED / "imagenet-val-1000", SHARED / "imagenet-classes.txt"
WEIGHTS = {
    "ViT-Ti/16": ("vit_tiny_patch16_224", SHARED / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"),
    "DeiT-Ti/16": ("deit_tiny_patch16_224", SHARED / "weights" / "deit_tiny_patch16_224.pth"),
    "ViT-B/16": ("vit_base_patch16_224", SHARED / "weights" / "none"),
}
OURS = "vitrail predict, "
JOBS = Path(__file__).with_name("prediction_jobs.py")
TITLES = {
    "engines": "Engines, two threads, against timm",
    "accuracy": "What int8 costs in accuracy, and how far exact engines are apart",
    "cold": "From a cold shell to an answer",
    "folder": "A folder of 1,000 photos to a CSV file",
    "merging": "Fewer tokens",
    "variants": "Images a second by model and resolution",
}
TARGETS = {("ViT-Ti/16", 1): (1.35, 1.8), ("ViT-Ti/16", 8): (1.25, 1.8), ("ViT-B/16", 1): (1.25, 2.2)}  # exact, int8
RUNS = {"engines": 20, "cold": 5, "folder": 3, "variants": 5}  # rounds, unless said


class SkipError(Exception):
    """A section that cannot be measured here, and why."""


@dataclass(frozen=True)
class Bench:
    """What all sections share: models in every layout, made when first asked for."""

    place: Path
    rounds: int | None
    threads: int
    seed: int
    stocks: dict[str, Stock]

    def stock(self, name: str) -> Stock:
        if name not in self.stocks:
            folder = self.place / name.replace("/", "-")
            preset, weights = WEIGHTS[name]
            checkpoint = folder / "checkpoint"
            if weights.exists():  # seen as in the reference that they come with: 224 of 256 pixels
                found = read(weights)
                assert found.description.preprocessing is not None
                how = replace(found.description.preprocessing, crop=0.875)
                write(found.model, checkpoint, preprocessing=how, labels=class_names())
                self.stocks[name] = Stock(str(checkpoint), None, folder, self.seed)
            else:
                self.stocks[name] = Stock(preset, None, folder, self.seed)
        return self.stocks[name]

    def rounds_of(self, section: str) -> int:
        return self.rounds or RUNS[section]

    @cached_property
    def photo(self) -> Path:
        """A real one, or where there is none a drawn one of a usual size."""
        if PHOTOS.exists():
            return min(PHOTOS.rglob("*.JPEG"))
        drawn = self.place / "photo.jpg"
        Image.radial_gradient("L").resize((500, 375)).convert("RGB").save(drawn)
        return drawn


def class_names() -> list[str] | None:
    return LABELS.read_text("utf-8").splitlines() if LABELS.exists() else None


def weights_of(*names: str) -> str:
    told = (f"{name} has {'public' if WEIGHTS[name][1].exists() else 'random'} weights" for name in names)
    return "; ".join(told)


def engines(work: Bench) -> str:
    """Every engine in one run with timm, which is 1."""
    lines, notes = list[Line](), list[str]()
    for name, batches in (("ViT-Ti/16", (1, 8)), ("ViT-B/16", (1,))):
        stock = work.stock(name)
        request = Request(
            models=(stock.model,),
            engines=("eager", "compiled", "onnx", "int8"),
            peers=("timm",),
            rounds=work.rounds_of("engines"),
            starts=0,
            seed=work.seed,
        )
        for batch in batches:
            found = Case(request, stock, batch, work.threads, notes).lines()
            lines += [replace(line, model=name) for line in found]
    best = list[list[str]]()
    for (model, batch), targets in TARGETS.items():
        own = [line for line in lines if (line.model, line.batch) == (model, batch) and line.way != line.base]
        cells = [model, str(batch)]
        for exact, target in zip((True, False), targets, strict=True):
            fastest = max(
                (line for line in own if line.exact == exact), key=lambda line: line.ratio.median, default=None
            )
            told = "failed" if fastest is None else f"**{fastest.ratio.median:.2f}** ({fastest.way})"
            cells += [told, f"≥ {target}"]
        best.append(cells)
    rows = [
        (
            line.model,
            str(line.batch),
            line.way,
            f"{line.images_per_second.median:.1f}",
            *(f"{each:.1f}" for each in line.latency),
            f"{line.ratio.median:.2f} ({quartiles(line.ratio)})" if line.way != line.base else "1",
        )
        for line in lines
    ]
    return "\n\n".join(
        (
            f"Times as fast as timm's eager model with the same weights ({weights_of('ViT-Ti/16', 'ViT-B/16')}), a "
            f"batch in memory, {work.rounds_of('engines')} rounds. timm gets it normalised; ours normalises it.",
            markdown(("model", "batch", "exact", "target", "int8", "target"), best, "lrrrrr"),
            "All of them; × 2 is two streams of one thread, among which a batch is shared out:",
            markdown(
                ("model", "batch", "by", "images/s", "ms: p50", "p90", "p99", "to timm (quartiles)"), rows, "lrlrrrrr"
            ),
            *dict.fromkeys(notes),
        )
    )


def accuracy(work: Bench) -> str:
    """Top-1 of each engine, its agreement with eager torch, and the largest difference in any probability."""
    need(PHOTOS)
    files = sorted(PHOTOS.rglob("*.JPEG"))
    right = np.array([int(path.parent.name) for path in files])
    rows = list[tuple[str, ...]]()
    for name in ("ViT-Ti/16", "DeiT-Ti/16"):
        need(WEIGHTS[name][1])
        stock = work.stock(name)
        pixels = np.stack([framed(path, stock.preprocessing) for path in files])
        first: NDArray[np.float32] | None = None
        for engine in ("eager", "compiled", "onnx", "int8") if name == "ViT-Ti/16" else ("eager", "onnx", "int8"):
            predictor = vitrail.Predictor(stock.folder(engine), engine=engine, threads=work.threads)
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
                    "within 0.5" if engine == "int8" else "0",
                    f"{100 * np.mean(top == first.argmax(-1)):.1f}",
                    "≥ 96" if engine == "int8" else "100",
                    f"{np.abs(shares - first).max():.1e}",
                    "" if engine == "int8" else "≤ 1e-4",
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
    return f"{len(files):,} validation photos of ImageNet, one a class.\n\n" + markdown(heading, rows, "llrrrrrrr")


def vitrail_command() -> tuple[str, ...]:
    script = Path(sys.executable).with_name("vitrail")
    return (str(script),) if script.exists() else (sys.executable, "-m", "vitrail")


def jobs_in_turns(jobs: Mapping[str, Callable[[], Done]], rounds: int, seed: int) -> dict[str, list[Done]]:
    """Each once before all, so that every file is in the page cache and what is measured once is measured."""
    found: dict[str, list[Done]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    in_turns(
        {name: lambda name=name: found[name].append(jobs[name]()) for name in jobs},
        rounds=rounds,
        warm=False,
        seed=seed,
    )
    return found


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    spread = Spread.of([theirs / own for theirs, own in zip(slow, fast, strict=True)])
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def seconds(done: Sequence[Done]) -> list[float]:
    return [each.seconds for each in done]


def cold(work: Bench) -> str:
    """One photo in a new process, until it has ended."""
    tiny, base, photo = work.stock("ViT-Ti/16"), work.stock("ViT-B/16"), work.photo
    predict, python = (*vitrail_command(), "predict"), (sys.executable, JOBS)
    commands: dict[str, tuple[Any, ...]] = {
        OURS + "Ti/16": (*predict, tiny.folder("onnx"), photo),
        OURS + "Ti/16 int8": (*predict, tiny.folder("int8"), photo),
        OURS + "B/16": (*predict, base.folder("onnx"), photo),
        OURS + "B/16 int8": (*predict, base.folder("int8"), photo),
        "timm, Ti/16": (*python, "timm-photo", tiny.folder("timm"), photo),
        "timm, B/16": (*python, "timm-photo", base.folder("timm"), photo),
        "transformers, Ti/16": (*python, "transformers-photo", tiny.folder("transformers"), photo),
        "transformers, B/16": (*python, "transformers-photo", base.folder("transformers"), photo),
    }
    jobs = {name: partial(run_job, *words) for name, words in commands.items()}
    found = jobs_in_turns(jobs, work.rounds_of("cold"), work.seed)
    rows = list[tuple[str, ...]]()
    for name, done in found.items():
        first = found[OURS + name.rpartition(", ")[2].removesuffix(" int8")]
        peer = not name.startswith("vitrail")
        memory = statistics.median(each.megabytes for each in done)
        rows.append(
            (
                name,
                f"{statistics.median(seconds(done)):.2f}",
                ratio(seconds(done), seconds(first)) if peer else "",
                "≥ 10" if peer else "",
                f"{memory:.0f}",
                "≤ 215" if name == OURS + "B/16 int8" else "",
            )
        )
    heading = ("one photo, top 5, by", "s", "times as long as vitrail (quartiles)", "target", "MB at most", "target")
    return (
        "Wall time of a whole process, from its start to its end, with the files in the page cache; the same weights "
        f"({weights_of('ViT-Ti/16', 'ViT-B/16')}), in an exported folder for vitrail; {work.rounds_of('cold')} rounds."
        "\n\n" + markdown(heading, rows, "lrrrrr")
    )


def folder(work: Bench) -> str:
    """The same 1,000 photos by each, from a cold shell to the CSV file."""
    need(PHOTOS)
    need(WEIGHTS["ViT-Ti/16"][1])
    tiny = work.stock("ViT-Ti/16")
    predict, python = (*vitrail_command(), "predict"), (sys.executable, JOBS)
    checkpoint, out = (
        tiny.folder("eager"),
        {name: work.place / f"{name}.csv" for name in ("exact", "fast", "timm", "hf")},
    )
    ours = (checkpoint, PHOTOS, "--overwrite", "-o")
    commands: dict[str, tuple[Any, ...]] = {
        "vitrail predict --exact": (*predict, *ours, out["exact"], "--exact"),
        "vitrail predict --fast": (*predict, *ours, out["fast"], "--fast"),
        "timm, a plain loop": (*python, "timm-folder", tiny.folder("timm"), PHOTOS, out["timm"]),
        "transformers' pipeline": (*python, "transformers-folder", tiny.folder("transformers"), PHOTOS, out["hf"]),
    }
    jobs = {name: partial(run_job, *words) for name, words in commands.items()}
    found = jobs_in_turns(jobs, work.rounds_of("folder"), work.seed)
    answers = {name: top_of(path) for name, path in zip(commands, out.values(), strict=True)}
    exact, fast = (seconds(found[name]) for name in tuple(commands)[:2])
    rows = list[tuple[str, ...]]()
    for name, done in found.items():
        peer = not name.startswith("vitrail")
        alone = [float(each.out.split()[-1]) for each in done] if peer else seconds(done)
        same = [
            sum(answers[name][file] == top for file, top in answers[first].items()) for first in tuple(commands)[:2]
        ]
        rows.append(
            (
                name,
                f"{statistics.median(seconds(done)):.1f}",
                ratio(seconds(done), exact) if peer else "",
                ratio(seconds(done), fast) if peer else "",
                f"{statistics.median(alone):.1f}" if peer else "",
                f"{ratio(alone, exact)}; {ratio(alone, fast)}" if peer else "",
                f"{same[0]:,}; {same[1]:,}",
                f"{statistics.median(each.megabytes for each in done):.0f}",
            )
        )
    heading = (
        *("by", "s", "times as long as --exact, target ≥ 1.4", "as --fast, target ≥ 2"),
        *("s without imports and loading", "as whole --exact; --fast", "same top-1 as --exact; --fast", "MB at most"),
    )
    count = len(answers["vitrail predict --exact"])
    return (
        f"{count:,} JPEGs, short side 256, ViT-Ti/16, wall time of a whole process; the peers' loop alone beside it, "
        "which is then compared with our whole process. Engines were chosen and models exported by one run before, as "
        f"happens once for a model on a machine. {work.rounds_of('folder')} rounds. The pipeline crops half a pixel "
        "elsewhere where a margin is odd, and resizes by torchvision.\n\n" + markdown(heading, rows, "lrrrrrrr")
    )


def top_of(path: Path) -> dict[str, int]:
    with path.open(newline="") as file:
        return {str(Path(row["file"]).name): int(row["index_1"]) for row in csv.DictReader(file)}


def merging(work: Bench) -> str:
    if find_spec("merging") is None:
        raise SkipError("benchmarks/merging.py is missing")
    merging: Any = import_module("merging")
    return merging.section()


def variants(work: Bench) -> str:
    request = Request(
        models=("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
        sizes=((224, 224), (384, 384)),
        engines=("eager", "onnx", "int8"),
        batches=(4,),
        threads=(work.threads,),
        rounds=work.rounds_of("variants"),
        starts=0,
        seed=work.seed,
    )
    found = bench(request, place=work.place / "variants")
    return "\n\n".join(("Random weights.", markdown(*found.throughput()), *found.notes))


SECTIONS = {
    "engines": engines,
    "accuracy": accuracy,
    "cold": cold,
    "folder": folder,
    "merging": merging,
    "variants": variants,
}


def need(path: Path) -> None:
    if not path.exists():
        raise SkipError(f"needs ../shared/data/{path.relative_to(SHARED)}")


def provenance(work: Bench, section: str) -> str:
    named = ", ".join(f"{name} {number}" for name, number in versions().items())
    command = f"`PYTHONPATH=tests .venv/bin/python benchmarks/prediction.py --only {section}`"
    return f"{command}, {datetime.now(UTC):%Y-%m-%d}, {machine()}, {work.threads} threads, seed {work.seed}; {named}."


def main(
    *,
    only: Annotated[str, Parameter(help=f"of {', '.join(TITLES)}, with commas")] = "",
    rounds: Annotated[int | None, Parameter(help="of every section; else as many as each needs")] = None,
    threads: int = 2,
    seed: int = 0,
    out: Path = PAGE,
) -> None:
    """Measures the sections asked for, all by default, and writes the page after each."""
    chosen = only.split(",") if only else list(SECTIONS)
    if strange := set(chosen) - set(SECTIONS):
        raise SystemExit(f"no section {', '.join(strange)}; expected some of {', '.join(SECTIONS)}")
    console = Console(stderr=True)
    with TemporaryDirectory(prefix="vitrail-bench-") as place:
        work = Bench(Path(place), rounds, threads, seed, {})
        for name in chosen:
            try:
                with console.status(name):
                    text = SECTIONS[name](work)
            except SkipError as error:
                console.print(f"{name}: skipped, {error}; {out} keeps what it says")
                continue
            text = f"{text}\n\n{provenance(work, name)}"
            write_page(out, TITLES, {name: text})
            print(f"\n## {TITLES[name]}\n\n{text}", flush=True)


if __name__ == "__main__":
    run(main)
