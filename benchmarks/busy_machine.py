"""Training and prediction with torch on an idle machine and next to busy processes, by how its threads wait.

    PYTHONPATH=src .venv/bin/python benchmarks/busy_machine.py
    PYTHONPATH=src .venv/bin/python benchmarks/busy_machine.py --only small-train --ways before,auto --loads 0,1

Each way is a process of its own, since GNU OpenMP reads its variables once. They take turns, round after round; the
busy processes run only while one is measured. `before` is torch's default, `auto` what vitrail chooses: it chooses
anew before each measurement, next to the busy processes, as a run that begins there does. The table has the median of
images a second, in brackets the CPU milliseconds an image, the ratio to the best other way in that column, and what
`auto` chose: threads, or streams × threads. A measurement waits up to --wait seconds until no other process uses the
CPU, and is repeated if one did meanwhile, up to --tries times. Ctrl-C prints what there is.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cyclopts import run

CASES = ("small-train", "large-train", "small-predict", "large-predict")
WAYS: dict[str, dict[str, str]] = {
    "before": {},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 300": {"GOMP_SPINCOUNT": "300"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {},
    "auto": {},
}
FOREIGN = 0.06  # cores that others may use during a measurement
STAT = Path("/proc/stat")


def main(
    *,
    rounds: int = 5,
    seconds: float = 1.5,
    loads: str = "0,1,2",
    only: str = ",".join(CASES),
    ways: str = ",".join(WAYS),
    wait: float = 20.0,
    tries: int = 5,
    seed: int = 0,
) -> None:
    """Measure and print a table.

    Parameters
    ----------
    rounds
        Of all ways, cases and loads.
    seconds
        Of one measurement.
    loads
        Numbers of busy processes, separated by commas.
    only
        Cases, separated by commas.
    ways
        Rows of the table, separated by commas.
    wait
        Seconds to wait for an idle machine before each measurement.
    tries
        Times that a measurement is taken at most, until no other process used the CPU.
    seed
        Of weights and images.
    """
    names, cases, numbers = ways.split(","), only.split(","), [int(load) for load in loads.split(",")]
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    repeated = 0
    with TemporaryDirectory(prefix="vitrail-busy-") as folder:
        workers = {name: start_worker(name, Path(folder) / name.replace(" ", "-"), seed) for name in names}
        try:
            for number, case, load in product(range(rounds), cases, numbers):
                for name in (*names[number % len(names) :], *names[: number % len(names)]):
                    wait_for_others(wait)
                    measured, again = measure_quietly(workers[name], case, load, seconds, tries)
                    found[case, name, load].append(measured)
                    repeated += again
        except KeyboardInterrupt:
            pass
        finally:
            for worker in workers.values():
                worker.communicate()
    for case in cases:
        print_case(case, names, numbers, found)
    print(f"\n{rounds} rounds of {seconds} s, seed {seed}; {repeated} measurements repeated because of other processes")


def print_case(
    case: str, names: list[str], loads: list[int], found: dict[tuple[str, str, int], list[dict[str, Any]]]
) -> None:
    print(f"\n{case:14}" + "".join(f"{f'{load} busy' if load else 'idle':>30}" for load in loads))
    rates = {
        (name, load): statistics.median(each["rate"] for each in found[case, name, load])
        for name in names
        for load in loads
        if found[case, name, load]
    }
    for name in names:
        cells = list[str]()
        for load in loads:
            each, others = found[case, name, load], [other for other in names if other != "auto"]
            if not each:
                continue
            best = max(rates.get((other, load), 0.0) for other in others) or rates[name, load]
            cpu = statistics.median(one["cpu"] for one in each) * 1e3
            chosen = "/".join(sorted({one["chosen"] for one in each if one["chosen"]}))
            rate = rates[name, load]
            cells.append(f"{rate:,.5g} ({cpu:.3g} ms) {rate / best:.2f} {chosen}")
        print(f"{name:14}" + "".join(f"{cell:>30}" for cell in cells))


def start_worker(name: str, folder: Path, seed: int) -> subprocess.Popen[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "MKL_"))}
    worker = subprocess.Popen(
        [sys.executable, __file__, "--worker", name, str(folder), str(seed)],
        env={**kept, **WAYS[name]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    return worker


def measure_quietly(
    worker: subprocess.Popen[str], case: str, load: int, seconds: float, tries: int
) -> tuple[dict[str, Any], int]:
    """A measurement, and how often it was repeated because other processes used the CPU."""
    found: list[tuple[float, dict[str, Any]]] = []
    while len(found) < tries:
        with busy(load) as pids:
            pids = [worker.pid, *pids]
            start, before = time.perf_counter(), used_by_others(pids)
            assert worker.stdin is not None
            assert worker.stdout is not None
            print(case, seconds, file=worker.stdin, flush=True)
            measured = json.loads(worker.stdout.readline())
            foreign = (used_by_others(pids) - before) / (time.perf_counter() - start)
        found.append((foreign, measured))
        if foreign < FOREIGN:
            break
    return min(found, key=lambda each: each[0])[1], len(found) - 1


def wait_for_others(longest: float) -> None:
    """Return once other processes leave the CPU alone, or after so many seconds."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < longest:
        start, before = time.perf_counter(), used_by_others([])
        time.sleep(0.5)
        if (used_by_others([]) - before) / (time.perf_counter() - start) < FOREIGN:
            return


@contextmanager
def busy(count: int) -> Generator[list[int]]:
    """Processes that do nothing but compute, each in a session of its own, as programs of a user are."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0.0)
        yield [each.pid for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()


def used_by_others(pids: list[int]) -> float:
    """CPU seconds that processes other than these have used so far; 0 where the system does not tell."""
    if not STAT.exists():
        return 0.0
    user, nice, system, _, _, *interrupts = map(int, STAT.read_text().splitlines()[0].split()[1:9])
    ours = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ours += int(fields[11]) + int(fields[12])
    return (user + nice + system + sum(interrupts) - ours) / os.sysconf("SC_CLK_TCK")


def work(name: str, folder: Path, seed: int) -> None:
    """The other process: measures each case that it is asked for."""
    if name == "auto":
        import vitrail

        vitrail.machine.bound_spinning()
    import torch

    from vitrail.train.run import keep_freed_memory

    keep_freed_memory()
    torch.manual_seed(seed)
    threads = 1 if name == "one thread" else torch.get_num_threads()
    cases = dict[str, Any]()
    print("ready", flush=True)
    for line in sys.stdin:
        case, seconds = line.split()
        size, kind = case.split("-")
        if case not in cases:
            cases[case] = Training(size) if kind == "train" else Prediction(size, folder / size)
        torch.set_num_threads(threads)
        chosen = cases[case].choose() if name == "auto" else ""
        step, images = cases[case].step()
        print(json.dumps({**measure(step, images, float(seconds)), "chosen": chosen}), flush=True)


def measure(step: Callable[[], object], images: int, seconds: float) -> dict[str, float]:
    step()
    step()
    done, start, cpu = 0, time.perf_counter(), time.process_time()
    while done < 3 or time.perf_counter() - start < seconds:
        step()
        done += 1
    took, spent = time.perf_counter() - start, time.process_time() - cpu
    return {"rate": done * images / took, "cpu": spent / (done * images)}


class Training:
    """Steps of the embedded data's recipe, or of ViT-Ti at 224 with a batch of 16."""

    def __init__(self, size: str) -> None:
        import numpy as np

        import vitrail
        from vitrail.data.images.array_dataset import ArrayDataset
        from vitrail.data.images.datasets import DatasetSplits
        from vitrail.recipes.request import Request
        from vitrail.tasks.classification import Classification
        from vitrail.tasks.image_task import open_image_source
        from vitrail.train.plan import Plan, plan_request
        from vitrail.train.trainer import Trainer

        if size == "small":
            self.plan = plan_request(Request(data="fashion", recipe=vitrail.open_recipe("fashion")))
        else:
            pixels = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), dtype=np.uint8)
            images = ArrayDataset(pixels, np.arange(64) % 2, ("a", "b"))
            model = vitrail.create("vit_tiny_patch16_224", classes=2)
            data = DatasetSplits(name="noise", train=images, val=None, classes=images.classes)
            recipe = vitrail.open_recipe("scratch").with_settings({"batch": 16, "epochs": 100})
            source = open_image_source(Classification(model), data, recipe, vitrail.Preprocessing(image_size=224))
            self.plan = Plan(task=Classification(model), source=source, recipe=recipe)
        self.trainer = Trainer(replace(self.plan, task=self.plan.task.copy(), fixed_steps=10**6))
        self.batches: Iterator[Any] = self.plan.load_batches(range(10**6))

    def choose(self) -> str:
        import torch

        from vitrail.train.speed_choice import choose_threads

        choice = choose_threads(self.plan)
        torch.set_num_threads(choice.threads)
        return str(choice.threads)

    def step(self) -> tuple[Callable[[], object], int]:
        return lambda: self.trainer.step(self.batches), self.plan.recipe.loop.batch


class Prediction:
    """Batches through the eager engine of the same models: 64 small images, or 16 large ones, for each stream."""

    def __init__(self, size: str, folder: Path) -> None:
        import numpy as np

        import vitrail
        from vitrail.models.base.checks import pair

        training = Training(size).plan
        vitrail.save(training.model, folder, **training.source.describe_model_input(training.model))
        self.predictor = vitrail.Predictor(folder, engine="eager")
        how, batch = self.predictor.preprocessing, 64 if size == "small" else 16
        shape = (batch, *pair(how.image_size), len(how.mean))
        self.pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)

    def choose(self) -> str:
        from vitrail.predict.engine_selection import (
            EngineOptions,
            apply_engine_setting,
            choose_fastest_setting,
            format_engine_setting,
            list_engine_settings,
            measure_images_per_second,
        )

        ways = {
            format_engine_setting("eager", way): way
            for way in list_engine_settings({"eager": self.predictor}, EngineOptions())
        }
        speeds = {
            name: measure_images_per_second(apply_engine_setting(self.predictor, way), len(self.pixels))
            for name, way in ways.items()
        }
        best = choose_fastest_setting(ways, speeds)
        apply_engine_setting(self.predictor, ways[best])
        return best.split()[-1]

    def step(self) -> tuple[Callable[[], object], int]:
        from concurrent.futures import ThreadPoolExecutor

        engine, streams = self.predictor.engine, self.predictor.engine.streams
        if streams == 1:
            return lambda: engine.run(self.pixels), len(self.pixels)
        pool = ThreadPoolExecutor(streams)
        together = [self.pixels] * streams
        return lambda: list(pool.map(engine.run, together)), streams * len(self.pixels)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        run(main)
