"""vitrail distill: train a model on your data with a teacher."""

from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import DistillRecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import RunFlags, TeacherCache, TeacherModel
from vitrail.cli.train import start_or_resume


def distill(
    *,
    teacher: TeacherModel = None,
    teacher_fields: Annotated[list[str] | None, Parameter(name="--teacher-set", negative=())] = None,
    teacher_cache: TeacherCache = None,
    flags: Annotated[RunFlags | None, Parameter(name="*")] = None,
    settings: Annotated[DistillRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a small model with a trained one as its teacher (DeiT). Runs, recipes and flags are those of `train`.

    The teacher receives the same views as the student, augmented and mixed, in its own normalisation and size. Its
    classes are matched with the data's by name. In a student with a distillation token (deit_*_distilled_*) one token
    learns the labels and the other the teacher, and the prediction is the mean of both heads; any other model learns
    both with its one head. Afterwards `vitrail compare` shows which models disagree.

    Examples::

        vitrail distill --teacher runs/demo --epochs 1
        vitrail distill --teacher runs/demo --distill soft --epochs 1
        vitrail distill --data photos --teacher runs/teacher --init student --epochs 1 --batch 4
        vitrail distill --resume runs/demo

    Parameters
    ----------
    teacher_fields
        A config field that the teacher's file does not specify, as FIELD=VALUE; may be repeated.
    """
    start_or_resume(
        flags or RunFlags(),
        collect_given_flags(settings),
        distilling=True,
        teacher=teacher,
        teacher_fields=teacher_fields,
        teacher_cache=teacher_cache,
    )
