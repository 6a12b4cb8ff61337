"""The cost of a teacher: training steps with a live teacher, with cached logits, and without a teacher, alternating.

    make bench

Each step is a step of the training loop: images, augmentation, loss, gradients, optimizer. Ratios are computed within
each round; the median of the rounds is printed with the quartiles; lower is faster. The live step is compared with the
plain step plus the teacher's forward pass, each timed in the same round.
"""

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter, run
from results_page import describe_run, format_ratio, markdown_table, present
from rich.progress import track
from throughput import Step, time_step

import vitrail
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import make_distillation
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.teacher import Teacher, TeacherView
from vitrail.train.plan import Plan
from vitrail.train.trainer import Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    name: str
    student: str
    fields: dict[str, int]
    teacher: str
    pixels: int
    batch: int
    repeats: int = 1  # steps per round


SMALL = {"image_size": 32, "patch_size": 4, "width": 64, "depth": 6, "heads": 2}
CASES = (
    Case("32 px, 0.3 M student, ResNet-20", "deit_tiny_distilled_patch16_224", SMALL, "resnet20_cifar", 32, 64, 3),
    Case("224 px, DeiT-Ti, ResNet-18", "deit_tiny_distilled_patch16_224", {}, "resnet18", 224, 16),
)


def random_dataset(case: Case) -> DatasetSplits:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (4 * case.batch, case.pixels, case.pixels, 3), dtype=np.uint8)
    names = tuple(str(n) for n in range(10))
    return DatasetSplits(
        name="noise", train=ArrayDataset(images, np.arange(len(images)) % 10, names, "noise"), val=None, classes=names
    )


def build_steps(case: Case, folder: Path) -> dict[str, Step]:
    data, how = random_dataset(case), Preprocessing(image_size=case.pixels, crop=1.0)
    recipe = Recipe().with_settings({"batch": case.batch, "lr": 1e-4, "epochs": 10**6})
    net = vitrail.create(case.teacher, classes=10, **({"image_size": case.pixels} if case.pixels != 32 else {}))
    teacher = Teacher(model=net, preprocessing=Preprocessing(image_size=case.pixels, crop=1.0, mean=(0.4, 0.4, 0.4)))
    lessons = TeacherView(teacher, data, how, CPU)
    images = torch.randn(case.batch, 3, case.pixels, case.pixels)

    def stepping(kept: Path | None, *, taught: bool) -> Step:
        model = vitrail.create(case.student, **{**case.fields, "classes": 10})
        source = open_image_source(Classification(model), data, recipe, how)
        task = Classification(model)
        if taught:
            task, _ = make_distillation(model, teacher, source, recipe, cache_folder=kept)
        plan = Plan(task=task, source=source, recipe=recipe, fixed_steps=10**6)
        trainer, batches = Trainer(plan), plan.load_batches(range(10**6))
        return lambda: trainer.step(batches)

    return {
        "plain": stepping(None, taught=False),
        "kept": stepping(folder, taught=True),
        "live": stepping(None, taught=True),
        "teacher": lambda: lessons(images),
    }


def main(
    *,
    rounds: int = 30,
    threads: int = 2,
    page: Annotated[Path | None, Parameter(help="Page whose section is replaced.")] = None,
) -> None:
    """Print a table of the compared steps and their median ratios."""
    torch.set_num_threads(threads)
    rows = list[tuple[str, ...]]()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            made = build_steps(case, Path(folder))
            for step in made.values():
                time_step(step, 3)
            times: dict[str, list[float]] = {name: [] for name in made}
            order = list(made)
            for _ in track(range(rounds), case.name, transient=True):
                for name in order:
                    times[name].append(time_step(made[name], case.repeats))
                order.append(order.pop(0))
        plain, kept, live, alone = (times[name] for name in ("plain", "kept", "live", "teacher"))
        milli = [f"{1000 * statistics.median(each):.1f} ms" for each in (plain, kept, live, alone)]
        both = [its + more for its, more in zip(plain, alone, strict=True)]
        rows.append((case.name, *milli, format_ratio(kept, plain, 3), format_ratio(live, both, 3)))
    heading = ("", "plain", "cached", "live", "teacher", "cached / plain", "live / (plain + teacher)")
    table = markdown_table(heading, rows, "lrrrrrr")
    present("distillation", (table, describe_run("distillation.py", f"--rounds {rounds}", threads)), page)


if __name__ == "__main__":
    run(main)
