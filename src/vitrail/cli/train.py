"""vitrail train: train a model on your data."""

from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import RecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import DEFAULT_STUDENT, RunFlags
from vitrail.cli.options.values import parse_fields
from vitrail.errors import ConfigError


def train(
    *,
    flags: Annotated[RunFlags | None, Parameter(name="*")] = None,
    settings: Annotated[RecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a model on a folder of images.

    By default a small ViT is trained on the bundled Fashion-MNIST sample, in about a minute. A run is a folder with its
    settings, log, checkpoints, curves and the final model. Press Ctrl-C to save and stop; continue with --resume RUN.
    Recipes override presets, and options override both; [recipe: …] shows the values of fashion, the default recipe.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m vitrail train …

    Examples::

        vitrail train --epochs 1                                    # bundled data, a few seconds
        vitrail train --data photos --init vit_fashion --batch 4    # fine-tune a model
        vitrail train --data photos --model ViT-Ti/16 --image-size 32 --batch 4 --minutes 0.1
        vitrail train --data photos --init vit_fashion --batch 4 --dry-run
        vitrail train --resume runs/demo
    """
    start_or_resume(flags or RunFlags(), collect_given_flags(settings))


def start_or_resume(
    flags: RunFlags,
    changes: dict[str, Any],
    *,
    distilling: bool = False,
    teacher: str | None = None,
    teacher_fields: list[str] | None = None,
    teacher_cache: Path | None = None,
) -> None:
    """Start a run, or resume one."""
    start = monotonic()
    if flags.resume is not None:
        given = {"teacher": teacher, "teacher_set": teacher_fields, "teacher_cache": teacher_cache}
        flags.check_resume_alone({**changes, **given})
        from vitrail.train.run import resume_run

        resume_run(flags.resume, flags.make_runtime(), flags.trusted_code)
        return
    recipe = flags.resolve_recipe(flags.recipe, changes, DEFAULT_STUDENT if distilling else None)
    if distilling and recipe.distillation.distill == "none":
        teacher = teacher_cache = None
    elif distilling and teacher is None:
        raise ConfigError("no --teacher; expected a trained model: a run folder, a checkpoint, or timm:NAME")

    from vitrail.train.run import start_run

    known = parse_fields(teacher_fields) or None
    request = flags.make_request(recipe, teacher=teacher, teacher_cache=teacher_cache, teacher_fields=known)
    start_run(request, flags.out, flags.make_runtime(), start=start, dry_run=flags.dry_run)
