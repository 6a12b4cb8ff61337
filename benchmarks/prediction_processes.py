"""Complete prediction jobs, each in its own process: one photo from a cold start, and a folder of photos to CSV."""

import csv
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peer_prediction_jobs
from peer_prediction_jobs import FinishedProcess, run_job
from prediction_models import WEIGHTS, PredictionBench, describe_weights, require_path
from results_page import format_ratio, markdown_table

from vitrail.data.images.image_items import ImageItem
from vitrail.predict.predictor import Predictor
from vitrail.study.bench_engines import ModelFiles
from vitrail.study.timing import time_interleaved

VITRAIL_PREDICT = "vitrail predict"
JOBS_SCRIPT = peer_prediction_jobs.__file__


def vitrail_command() -> tuple[str, ...]:
    script = Path(sys.executable).with_name("vitrail")
    return (str(script),) if script.exists() else (sys.executable, "-m", "vitrail")


def run_jobs_in_turns(
    jobs: Mapping[str, Callable[[], FinishedProcess]], rounds: int, seed: int
) -> dict[str, list[FinishedProcess]]:
    """Run ours once in advance: engine selection and export happen once per model and are not part of the job."""
    found: dict[str, list[FinishedProcess]] = {name: [] for name in jobs}
    for name, job in jobs.items():
        if name.startswith(VITRAIL_PREDICT):
            job()
    time_interleaved(
        {name: lambda name=name: found[name].append(jobs[name]()) for name in jobs},
        rounds=rounds,
        warm=False,
        seed=seed,
    )
    return found


def job_seconds(done: Sequence[FinishedProcess]) -> list[float]:
    return [each.seconds for each in done]


def measure_cold_start(work: PredictionBench) -> str:
    """One photo in a new process, until it ends."""
    tiny, base, photo = work.stock("ViT-Ti/16"), work.stock("ViT-B/16"), work.photo
    predict, python = (*vitrail_command(), "predict"), (sys.executable, JOBS_SCRIPT)
    commands: dict[str, tuple[Any, ...]] = {
        VITRAIL_PREDICT + ", Ti/16": (*predict, tiny.folder_for("onnx"), photo),
        VITRAIL_PREDICT + ", Ti/16 int8": (*predict, tiny.folder_for("int8"), photo),
        VITRAIL_PREDICT + ", B/16": (*predict, base.folder_for("onnx"), photo),
        VITRAIL_PREDICT + ", B/16 int8": (*predict, base.folder_for("int8"), photo),
        "timm, Ti/16": (*python, "timm-photo", tiny.folder_for("timm"), photo),
        "timm, B/16": (*python, "timm-photo", base.folder_for("timm"), photo),
        "transformers, Ti/16": (*python, "transformers-photo", tiny.folder_for("transformers"), photo),
    }
    jobs = {name: partial(run_job, *words) for name, words in commands.items()}
    found = run_jobs_in_turns(jobs, work.rounds_of("cold"), work.seed)
    rows = list[tuple[str, ...]]()
    for name, done in found.items():
        first = found[VITRAIL_PREDICT + name[name.rindex(", ") :].removesuffix(" int8")]
        peer = not name.startswith(VITRAIL_PREDICT)
        memory = statistics.median(each.megabytes for each in done)
        rows.append(
            (
                name,
                f"{statistics.median(job_seconds(done)):.2f}",
                format_ratio(job_seconds(done), job_seconds(first)) if peer else "",
                "≥ 10" if peer else "",
                f"{memory:.0f}",
                "≤ 215" if name == VITRAIL_PREDICT + ", B/16 int8" else "",
            )
        )
    heading = ("one photo, top 5", "s", "time relative to vitrail (quartiles)", "target", "peak MB", "target")
    return (
        "Wall time of a process from start to end, with the files in the page cache; the same weights "
        f"({describe_weights('ViT-Ti/16', 'ViT-B/16')}), in an exported folder for vitrail; "
        f"{work.rounds_of('cold')} rounds."
        "\n\n" + markdown_table(heading, rows, "lrrrrr")
    )


def measure_folder(work: PredictionBench) -> str:
    """The same 1,000 photos by each library, from a cold start to the CSV file."""
    require_path(WEIGHTS["ViT-Ti/16"][1])
    photos = work.photos
    tiny = work.stock("ViT-Ti/16")
    predict, python = (*vitrail_command(), "predict"), (sys.executable, JOBS_SCRIPT)
    out = {name: work.place / f"{name}.csv" for name in ("exact", "fast", "timm", "hf")}
    ours = (tiny.folder_for("onnx"), photos, "--overwrite", "-o")
    commands: dict[str, tuple[Any, ...]] = {
        "vitrail predict --exact": (*predict, *ours, out["exact"], "--exact"),
        "vitrail predict --fast": (*predict, *ours, out["fast"], "--fast"),
        "timm, a plain loop": (*python, "timm-folder", tiny.folder_for("timm"), photos, out["timm"]),
        "transformers' pipeline": (*python, "transformers-folder", tiny.folder_for("transformers"), photos, out["hf"]),
    }
    jobs = {name: partial(run_job, *words) for name, words in commands.items()}
    found = run_jobs_in_turns(jobs, work.rounds_of("folder"), work.seed)
    answers = {name: read_top_classes(path) for name, path in zip(commands, out.values(), strict=True)}
    exact, fast = (job_seconds(found[name]) for name in tuple(commands)[:2])
    rows = list[tuple[str, ...]]()
    for name, done in found.items():
        peer = not name.startswith(VITRAIL_PREDICT)
        alone = [float(each.out.split()[-1]) for each in done] if peer else job_seconds(done)
        same = [
            sum(answers[name][file] == top for file, top in answers[first].items()) for first in tuple(commands)[:2]
        ]
        rows.append(
            (
                name,
                f"{statistics.median(job_seconds(done)):.1f}",
                format_ratio(job_seconds(done), exact) if peer else "",
                format_ratio(job_seconds(done), fast) if peer else "",
                f"{statistics.median(alone):.1f}" if peer else "",
                f"{format_ratio(alone, exact)}; {format_ratio(alone, fast)}" if peer else "",
                f"{same[0]:,}; {same[1]:,}",
                f"{statistics.median(each.megabytes for each in done):.0f}",
            )
        )
    heading = (
        *("", "s", "time relative to --exact, target ≥ 1.4", "to --fast, target ≥ 2", "s without imports and loading"),
        *("relative to complete --exact; --fast", "same top-1 as --exact; --fast", "peak MB"),
    )
    count, theirs = len(answers["vitrail predict --exact"]), answers["transformers' pipeline"]
    cropped = predict_with_floored_resize(tiny, sorted(photos.rglob("*.JPEG")))
    return (
        f"{count:,} JPEGs, short side 256, ViT-Ti/16, wall time of a complete process. For timm and transformers the "
        "time without imports and loading is shown as well, compared with the complete process of vitrail. vitrail "
        "runs an exported folder; its number of streams was measured in an earlier run, which happens once per model "
        f"and machine. {work.rounds_of('folder')} rounds.\n\n"
        + markdown_table(heading, rows, "lrrrrrrr")
        + "\n\nIf a margin is odd, the pipeline's crop is off by one pixel from that of timm and vitrail. With the "
        f"same crop (`middle='floored'`), vitrail's top-1 equals the pipeline's for "
        f"{sum(cropped[n] == top for n, top in theirs.items()):,} of {len(theirs):,}."
    )


def predict_with_floored_resize(stock: ModelFiles, files: Sequence[Path]) -> dict[str, int]:
    """Our predictions with the preprocessing of transformers."""
    how = replace(stock.preprocessing, middle="floored")
    predictor = Predictor(stock.folder_for("onnx"), preprocessing=how)
    shown = (ImageItem(path, path.name) for path in files)
    return {row.name: int(row.values.argmax()) for row in predictor.iterate_results(shown) if row.values is not None}


def read_top_classes(path: Path) -> dict[str, int]:
    with path.open(newline="") as file:
        return {str(Path(row["file"]).name): int(row["index_1"]) for row in csv.DictReader(file)}
