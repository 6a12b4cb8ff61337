"""vitrail distill: train a model on your data with a teacher."""

from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import DistillRecipeFlags
from vitrail.cli.options.train_flags import DEFAULT_STUDENT, RunFlags, TeacherCache, TeacherModel
from vitrail.cli.output.help_text import DISTILLATION
from vitrail.cli.train import TrainingCommand, start_or_resume


def distill(
    *,
    teacher: TeacherModel = None,
    teacher_fields: Annotated[
        list[str] | None,
        Parameter(name="--teacher-set", negative=(), group=DISTILLATION),
    ] = None,
    teacher_cache: TeacherCache = None,
    flags: Annotated[RunFlags | None, Parameter(name="*")] = None,
    settings: Annotated[DistillRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a small model with a trained one as its teacher (DeiT).

    Runs, recipes and options are those of `vitrail train`; [recipe: …] shows the values of fashion. The teacher
    receives the same augmented images as the student, in its own size and normalization; classes are matched by name.
    In a student with a distillation token (deit_*_distilled_*), one token learns the labels and the other the teacher,
    and the prediction is the mean of both heads. Any other student learns both with its one head. `vitrail compare`
    shows afterwards where the models disagree.

    Examples::

        vitrail distill --teacher vit_fashion --epochs 1
        vitrail distill --teacher vit_fashion --distill soft --epochs 1
        vitrail distill --resume runs/demo

    Parameters
    ----------
    teacher_fields
        Set a config field that the teacher's file does not specify: heads=3. May be repeated.
    """
    command = TrainingCommand(model=DEFAULT_STUDENT, needs_teacher=True)
    given = {"teacher": teacher, "teacher_set": teacher_fields, "teacher_cache": teacher_cache}
    start_or_resume(command, flags, settings, **given)
