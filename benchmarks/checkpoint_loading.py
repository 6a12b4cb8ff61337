"""Time and memory to load ViT-B/16 from a file, against timm and transformers.

    make bench

Every measurement is a new process that imports only what it needs. The methods alternate, round after round, and all
files are in the page cache. A row is measured twice: until the call returns, and until one image has passed through the
model, since memory-mapped weights are read only when they are used. Memory is the growth of the resident set at its
peak, including pages of the mapped file. Ratios are computed within each round; the median of the rounds is printed
with the quartiles, timm = 1. Lower is better. One thread, since two threads that wait for each other on a busy machine
take up to five times as long for the image.
"""

import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, run
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track

MODEL = "vit_base_patch16_224"
FILE, PICKLE, FOLDER = f"{MODEL}.safetensors", f"{MODEL}.pth", "transformers"
TIMM = "timm, then load_file"  # the baseline
LOADED, USED = "loaded", "one image done"
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

LoadFunction = Callable[[], Any]


@dataclass(frozen=True)
class LoadMeasurement:
    """One process: the cost of the imports, then seconds and megabytes from the call until each point."""

    imports: float
    until: dict[str, tuple[float, float]]
    logits: list[float]  # the first ten, to check that it is the same model


def vitrail_load(path: Path) -> LoadFunction:
    import vitrail

    load = vitrail.load  # imported lazily
    return lambda: load(path)


def timm_load_file(path: Path) -> LoadFunction:
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    import timm
    from safetensors.torch import load_file

    def load() -> Any:
        model = timm.create_model(MODEL, pretrained=False)
        model.load_state_dict(load_file(path))
        return model

    return load


def timm_checkpoint_path(path: Path) -> LoadFunction:
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    import timm

    return lambda: timm.create_model(MODEL, checkpoint_path=str(path))


def transformers_from_pretrained(path: Path) -> LoadFunction:
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    from transformers import ViTForImageClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    return lambda: ViTForImageClassification.from_pretrained(path)


LOADERS: dict[str, tuple[Callable[[Path], LoadFunction], str]] = {
    TIMM: (timm_load_file, FILE),
    "timm, checkpoint_path": (timm_checkpoint_path, FILE),
    "transformers, from_pretrained": (transformers_from_pretrained, FOLDER),
    "vitrail": (vitrail_load, FILE),
    "vitrail, .pth": (vitrail_load, PICKLE),
    "vitrail, transformers' folder": (vitrail_load, FOLDER),
}


def make_files(folder: Path, seed: int) -> None:
    """The same random weights in every layout, from timm, whose head is not initialized to zero."""
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    import timm
    import torch
    from safetensors.torch import save_file

    from vitrail.checkpoint import load, write

    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    save_file(timm.create_model(MODEL).state_dict(), folder / FILE)
    model = load(folder / FILE)
    write(model, folder / PICKLE, "timm")
    write(model, folder / FOLDER, "hf")


def measure(way: str, folder: Path, seed: int, threads: int) -> LoadMeasurement:
    """Measure in a new process."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    prepare, name = LOADERS[way]
    load = prepare(folder / name)
    imports = time.perf_counter() - start

    import torch

    torch.set_num_threads(threads)
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(seed))
    with suppress(OSError):
        FORGET.write_text("5")  # resets the peak; without it, the peak of the imports hides smaller ones
    before, start = peak_memory(), time.perf_counter()
    model = load()
    loaded = time.perf_counter() - start, peak_memory() - before
    with torch.inference_mode():
        answer = model.eval()(image)
    used = time.perf_counter() - start, peak_memory() - before
    return LoadMeasurement(imports, {LOADED: loaded, USED: used}, getattr(answer, "logits", answer)[0, :10].tolist())


def peak_memory() -> float:
    """The peak resident set so far, in megabytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text("utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def check_logits(found: dict[str, list[LoadMeasurement]]) -> None:
    expected = found[TIMM][0].logits
    for way, rounds in found.items():
        apart = max(abs(a - b) for each in rounds for a, b in zip(each.logits, expected, strict=True))
        if apart > 1e-4:
            raise SystemExit(f"{way} predicts otherwise than timm, by {apart:.1e}: not the same model")


def format_row(way: str, moment: str, found: dict[str, list[LoadMeasurement]]) -> list[str]:
    cells = [way, moment]
    for which, digits in ((0, 2), (1, 0)):
        own, timm = ([each.until[moment][which] for each in found[name]] for name in (way, TIMM))
        cells += [f"{statistics.median(own):.{digits}f}", format_ratio(own, timm)]
    return cells


def main(
    *,
    rounds: int = 7,
    threads: int = 1,
    seed: int = 0,
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Write the files into a temporary folder, measure every method of loading them and print the table."""
    found: dict[str, list[LoadMeasurement]] = {way: [] for way in LOADERS}
    new_process = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as place, new_process as process:
        folder = Path(place)
        process.submit(make_files, folder, seed).result()
        for path in folder.rglob("*.*"):
            path.read_bytes()
        order = list(LOADERS)
        for _ in track(range(rounds), "B/16 loading".ljust(24), transient=True):
            for way in order:
                found[way].append(process.submit(measure, way, folder, seed, threads).result())
            order.append(order.pop(0))
    check_logits(found)
    lines = [format_row(way, moment, found) for moment in (LOADED, USED) for way in LOADERS]
    table = markdown_table(("ViT-B/16", "until", "s", "to timm", "MB", "to timm"), lines, "llrrrr")
    imports = (f"{statistics.median(each.imports for each in own):.1f} s {way}" for way, own in found.items())
    note = f"Imports, before and not counted: {'; '.join(imports)}."
    run_line = describe_run("checkpoint_loading.py", f"--rounds {rounds}", threads, seed)
    present("loading", (table, note, f"{run_line} safetensors {version('safetensors')}."), page)


if __name__ == "__main__":
    run(main)
