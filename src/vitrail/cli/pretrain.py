"""vitrail pretrain: train a model on images without labels. Each task is a command, made from its settings."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options.model_flags import Device
from vitrail.cli.options.recipe_flags import make_pretraining_flags_class
from vitrail.cli.options.train_flags import PretrainFlags, RunFlags
from vitrail.cli.options.values import MAX_PROCESSES, at_most
from vitrail.cli.output.help_text import SPEED, reflow_docstring
from vitrail.cli.train import TrainingCommand, start_or_resume
from vitrail.tasks import PRETRAINING_TASKS


def pretrain(
    *,
    resume: Path | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    device: Device = "auto",
    workers: Annotated[int | None, Parameter(group=SPEED, validator=at_most(MAX_PROCESSES))] = None,
    threads: Annotated[
        int | Literal["auto"],
        Parameter(group=SPEED, validator=at_most(MAX_PROCESSES), show_choices=False, show_default=False),
    ] = "auto",
    strict: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train a model on images without labels.

    Choose a task: simclr, byol or dino for features that separate classes by themselves (k-NN, few labels); mae, simmim
    or mpp for weights to fine-tune, whose k-NN accuracy is poor (mae is the fastest of all tasks); aim and igpt to
    predict
    images in order. On two CPU cores with small images, start with simclr. `vitrail pretrain TASK --help` lists the
    settings of a task. The model/ of the run is the backbone alone: `vitrail train --init RUN` fine-tunes it, `vitrail
    probe RUN` measures its features. A run whose features collapse is reported.

    Examples::

        vitrail pretrain mae --epochs 1
        vitrail pretrain simclr --epochs 2 --then probe
        vitrail pretrain --resume runs/demo

    Parameters
    ----------
    resume
        Folder of a run to continue, with bit-identical results. With --epochs or --minutes, a finished run is extended.
    epochs
        With --resume: new total length of the run, in epochs. [default: unchanged]
    minutes
        With --resume: new length of the run in minutes, in all. [default: unchanged]
    workers
        Processes that load images. [default: automatic]
    threads
        CPU threads. [default: those of the run]
    strict
        Stop at an unreadable image instead of skipping it.
    """
    if resume is None:
        raise ConfigError(f"pretrain needs a task: {', '.join(PRETRAINING_TASKS)}. See vitrail pretrain --help")
    flags = RunFlags(resume=resume, device=device, workers=workers, threads=threads, strict=strict)
    start_or_resume(TrainingCommand(), flags, SimpleNamespace(epochs=epochs, minutes=minutes))


@dataclass(frozen=True, kw_only=True)
class TaskHelp:
    """The help of a task."""

    summary: str
    about: str
    option: str  # of its own, for an example


TASK_HELP = {
    "mae": TaskHelp(
        summary="Predict hidden patches from visible ones (MAE, He 2021).",
        about="The masked autoencoder processes only the visible patches in its encoder, so training is fast. Judge it "
        "by its loss and by fine-tuning: its k-NN accuracy is low even if it is well trained. The model is a ViT.",
        option="--mask-ratio 0.6",
    ),
    "simmim": TaskHelp(
        summary="Predict hidden squares with one linear layer (SimMIM, Xie 2021).",
        about="Hidden patches become a mask token, and all tokens pass through the model. Judge it by its loss and by "
        "fine-tuning.",
        option="--mask-ratio 0.5",
    ),
    "mpp": TaskHelp(
        summary="Predict the colors of corrupted patches (Dosovitskiy 2020).",
        about="The task of the ViT paper, with its three targets. Judge it by its accuracy and by fine-tuning.",
        option="--target pixels",
    ),
    "simclr": TaskHelp(
        summary="Find the other view of an image in the batch (SimCLR, Chen 2020).",
        about="Two random views of each image are compared with those of all other images in the batch, so a larger "
        "batch has more negatives. Works with every model that has pooled features.",
        option="--loss-temperature 0.2",
    ),
    "byol": TaskHelp(
        summary="Predict a teacher's features of another view (BYOL, Grill 2020).",
        about="There are no negatives, so a small batch is enough. A loss near zero means agreement or collapse: watch "
        "the spread of the features.",
        option="--teacher-momentum 0.99:1",
    ),
    "dino": TaskHelp(
        summary="Predict a teacher's prototypes of another crop (DINO, Caron 2021).",
        about="The student receives large and small crops, the teacher only large ones; centering and a low "
        "temperature prevent collapse. The model of the run is the teacher's.",
        option="--local-crops 2 --local-size 16",
    ),
    "esvit": TaskHelp(
        summary="DINO for crops and for patches that match (EsViT, Li 2021).",
        about="Each patch of the student predicts the teacher's patch with the most similar features.",
        option="--region-weight 0.3",
    ),
    "aim": TaskHelp(
        summary="Predict each patch from those before it (AIM, El-Nouby 2024).",
        about="Attention is causal in pre-training. The best features are in the middle blocks.",
        option="--no-normalize-pixels",
    ),
    "igpt": TaskHelp(
        summary="Predict each pixel from those before it (Image GPT, Chen 2020).",
        about="A palette of colors is fitted to the training images and saved with the model. Cost grows with the "
        "square of the number of pixels: use small images.",
        option="--objective bert",
    ),
}


@cache
def make_task_command(task: str) -> Callable[..., None]:
    """The command `vitrail pretrain TASK`, with the settings of the task as options."""
    command, about = TrainingCommand(task=task, recipe=f"{task}-cpu"), TASK_HELP[task]

    def pretrain_task(*, flags: Any = None, settings: Any = None) -> None:
        start_or_resume(command, flags or PretrainFlags(), settings)

    hints = {"flags": PretrainFlags, "settings": make_pretraining_flags_class(task)}
    for name, hint in hints.items():
        pretrain_task.__annotations__[name] = Annotated[hint | None, Parameter(name="*")]
    pretrain_task.__doc__ = f"""{about.summary}

    {about.about}
    [recipe: …] shows the values of {task}-cpu, the default recipe; {task} has those of the paper. Runs, checkpoints and
    common options are those of `vitrail train`.

    Examples::

        vitrail pretrain {task} --epochs 1
        vitrail pretrain {task} {about.option} --epochs 1 --then probe
        vitrail pretrain {task} --data photos --batch 4 --dry-run
    """
    return reflow_docstring(pretrain_task)
