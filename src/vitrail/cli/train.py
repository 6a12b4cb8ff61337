"""vitrail train: train a model on your data."""

from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options.recipe_flags import TrainRecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import ImageOrTextFlags, RunFlags
from vitrail.cli.options.values import parse_fields
from vitrail.recipes.recipe import Recipe, open_recipe


def train(
    *,
    flags: Annotated[ImageOrTextFlags | None, Parameter(name="*")] = None,
    settings: Annotated[TrainRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a model on a folder of images, on sentence pairs, or on images with captions.

    By default a small ViT is trained on the bundled Fashion-MNIST sample, in about a minute. A run is a folder with its
    settings, log, checkpoints, curves and the final model. Press Ctrl-C to save and stop; continue with --resume RUN.
    Recipes override presets, and options override both; [recipe: …] shows the values of fashion, the default recipe,
    and of translate-cpu for translation, caption-cpu for captions.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m vitrail train …

    Examples::

        vitrail train --epochs 1                                    # bundled data, a few seconds
        vitrail train --data photos --init vit_fashion --batch 4    # fine-tune a model
        vitrail train --data photos --model ViT-Ti/16 --image-size 32 --batch 4 --minutes 0.1
        vitrail train --data photos --init vit_fashion --batch 4 --dry-run    # only check and estimate
        vitrail train --data tatoeba --pair de-en                   # learn to translate, 4 epochs
        vitrail train --task caption                                # learn to describe generated collages
        vitrail train --resume runs/demo
        vitrail train --resume runs/demo --epochs 2                 # extend a finished run
    """
    start_or_resume(TrainingCommand(), flags or ImageOrTextFlags(), settings)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """What `train`, `distill` and each task of `pretrain` do not share."""

    task: str | None = None  # of `pretrain`, which the recipe must name too
    recipe: str | None = None  # the default; None: the usual one for the data
    model: str | None = None  # used if nothing names another
    needs_teacher: bool = False

    def resolve_recipe(self, flags: RunFlags, changes: dict[str, Any]) -> Recipe:
        """The recipe of the command line, of the task of this command."""
        name = flags.recipe or self.recipe
        if self.task is not None and name is not None:
            given = open_recipe(name).task.get("name", "classification")
            if given != self.task:
                raise ConfigError(
                    f"--recipe {name} is for the task {given}; expected one for {self.task}: {self.task}-cpu, "
                    f"{self.task}, or a file with task: {{name: {self.task}}}"
                )
        return flags.resolve_recipe(name, changes, self.model)


def start_or_resume(command: TrainingCommand, flags: RunFlags | None, settings: object, **others: Any) -> None:
    """Start a run, or resume one, and do what follows. `others` are options of the command for `make_request`."""
    start, flags = monotonic(), flags or RunFlags()
    if flags.resume is not None:
        resume(flags, flags.check_resume_alone({**collect_given_flags(settings), **others}))
        return
    recipe = command.resolve_recipe(flags, collect_given_flags(settings, command.task))
    if command.needs_teacher and recipe.distillation.distill == "none":
        others["teacher"] = others["teacher_cache"] = None
    elif command.needs_teacher and others["teacher"] is None:
        raise ConfigError("no --teacher; expected a trained model: a run folder, a checkpoint, or timm:NAME")

    from vitrail.models.catalog.external_families import trust
    from vitrail.train.run import start_run

    if "teacher_set" in others:
        others["teacher_fields"] = parse_fields(others.pop("teacher_set")) or None
    request, runtime = flags.make_request(recipe, **others), flags.make_runtime()
    folder = start_run(request, flags.out, runtime, start=start, dry_run=flags.dry_run)
    if folder is not None and request.then is not None:
        from vitrail.study.follow_up import run_follow_up

        with trust(request.trusted_code):
            run_follow_up(folder, runtime, trained=True)


def resume(flags: RunFlags, length: dict[str, Any]) -> None:
    """Continue a run, with a new length or its own, and do what follows."""
    from vitrail.checkpoint.run_files import check_run_exists

    assert flags.resume is not None
    check_run_exists(flags.resume)  # before torch is imported

    from vitrail.study.follow_up import run_follow_up
    from vitrail.train.resume import resume_run

    runtime = flags.make_runtime()
    trained = resume_run(flags.resume, runtime, flags.trusted_code, **length)
    run_follow_up(flags.resume, runtime, trained=trained)
