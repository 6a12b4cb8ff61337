"""vitrail train: a model on your data."""

from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import RecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import RunFlags, start_or_resume_run


def train(
    *,
    flags: Annotated[RunFlags | None, Parameter(name="*")] = None,
    settings: Annotated[RecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a model: from scratch, from a checkpoint of any layout (--init), or on from where it stopped (--resume).

    With nothing said, a small ViT learns the embedded Fashion-MNIST pictures. What a model's preset says a recipe may
    change, and a flag may change both. The run is a folder: what it was told (run.json), its log, its checkpoints,
    curves.png, and at the end model/, for `vitrail eval` and `vitrail.load`. Ctrl-C saves before it stops.
    On several GPUs or machines: torchrun --nproc-per-node 8 -m vitrail train …

    Examples::

        vitrail train --epochs 1
        vitrail train --data photos --init my_model --epochs 1 --batch 4
        vitrail train --data photos --init my_model --recipe probe --image-size 96 --epochs 1 --batch 4
        vitrail train --data photos --model ViT-Ti/16 --set depth=2 --image-size 32 --batch 4 --dry-run
        vitrail train --resume runs/demo
    """
    start_or_resume_run(flags or RunFlags(), collect_given_flags(settings))
