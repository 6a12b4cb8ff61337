"""An ablation from its request: rows, runs and the table that they are compared in."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.distributed import Ranks, resolve_device
from vitrail.recipes.request import Request
from vitrail.study.ablation_plan import AblationPlanner
from vitrail.study.ablation_results import AblationResults
from vitrail.study.ablation_runs import TrainingStudy, find_study_folder, list_ablation_runs
from vitrail.tasks.teacher import Teacher


def plan_ablation_study(
    request: Request,
    without: Sequence[str],
    replaced: Sequence[Mapping[str, Any]],
    *,
    each: bool = False,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
    device: str = "auto",
) -> TrainingStudy:
    """The rows of an ablation and their runs in the folder, by default one in runs/; all are checked with the teacher.

    `without` are ingredients to leave out, `replaced` other values by name; `each` leaves out every ingredient in turn.
    """
    place, name = resolve_device(device, Ranks()), request.recipe.name
    ablation = AblationPlanner(request)
    rows = ablation.build_rows(without, replaced, each=each)
    teacher = Teacher.from_name(request.teacher) if request.teacher else None
    if teacher is not None:
        ablation.check_teacher_fits(rows, teacher, place)
    folder = folder or find_study_folder(f"{name}-ablation", rows, seeds, teacher)
    data = ablation.data.name
    return TrainingStudy(
        title=f"ablation of {name} on {data}",
        rows=rows,
        runs=list_ablation_runs(rows, seeds, folder, teacher),
        folder=folder,
        read_table=partial(AblationResults.read, name, data, rows),
    )
