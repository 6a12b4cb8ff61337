"""vitrail distill: a model that learns from your data and from a teacher."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import DistillRecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import RunFlags, start_or_resume_run


def distill(
    *,
    teacher: str | None = None,
    teacher_fields: Annotated[list[str] | None, Parameter(name="--teacher-set", negative=())] = None,
    teacher_cache: Path | None = None,
    flags: Annotated[RunFlags | None, Parameter(name="*")] = None,
    settings: Annotated[DistillRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a small model that also learns from a trained one (DeiT): the same run, recipes and flags as `train`.

    The teacher sees the very views that the student sees, augmented and mixed, in its own normalisation and size. Its
    classes are matched with the data's by name. A student with a distillation token (deit_*_distilled_*) learns the
    labels with one token and the teacher with the other, and answers with the mean of both heads; any other model
    learns both with its one head. Afterwards `vitrail compare` shows who disagrees with whom.

    Examples::

        vitrail distill --teacher runs/demo --epochs 1
        vitrail distill --teacher runs/demo --distill soft --epochs 1
        vitrail distill --data photos --teacher runs/teacher --init student --epochs 1 --batch 4
        vitrail distill --resume runs/demo

    Parameters
    ----------
    teacher
        The folder of a run, anything that `vitrail convert` reads (a convnet too: `vitrail models 'resnet*'`), or
        timm:NAME, which timm fetches.
    teacher_fields
        A config field that the teacher's file does not specify, as FIELD=VALUE; may be repeated.
    teacher_cache
        A folder that keeps the teacher's answers, so that it is asked once for each picture, in this run and in others;
        for trainings without augmentation, where a picture looks the same each time.
    """
    start_or_resume_run(
        flags or RunFlags(),
        collect_given_flags(settings),
        distilling=True,
        teacher=teacher,
        teacher_fields=teacher_fields,
        teacher_cache=teacher_cache,
    )
