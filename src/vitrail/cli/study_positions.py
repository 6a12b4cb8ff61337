"""vitrail study positions: compare the kinds of positions of a ViT, and where they are added."""

from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.ablate import run_study
from vitrail.cli.options.recipe_flags import RecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import StudyFlags
from vitrail.cli.options.values import parse_field
from vitrail.cli.output.results import split_output


def positions(
    *,
    recipe: str | None = None,
    flags: Annotated[StudyFlags | None, Parameter(name="*")] = None,
    settings: Annotated[RecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Compare position embeddings by training a ViT with each.

    Eight runs from scratch for each seed (ViT's table 8): no positions; learned 1-D and 2-D ones, added at the stem,
    before every layer, or before every layer from a shared table; relative ones (offsets in rows and columns, in the
    paper along the sequence). The other options are those of `vitrail train` and apply to every run, including --epochs
    and --minutes; [recipe: …] shows the values of fashion. Each run has a folder in --out, for `vitrail runs`;
    table.json, table.md and positions.png are next to them. Run the same command again to resume: finished runs are
    kept, and stopped runs continue with bit-identical results. Press Ctrl-C to save and stop.

    Examples::

        vitrail study positions --data fashion --epochs 0.1
        vitrail study positions --data photos --batch 4 --seeds 3 --dry-run

    Parameters
    ----------
    recipe
        A name that `vitrail train --recipe` takes, or a .yaml file. positions is a small ViT of 32 pixels
        and patch size 4, trained briefly without augmentation. [default: fashion for that data, else positions]
    """
    flags = flags or StudyFlags()
    if flags.init is not None:
        raise ConfigError(f"--init {flags.init} cannot be used here: a checkpoint was trained with its own positions")
    for item in flags.fields or ():
        if parse_field(item)[0] in ("positions", "positions_at"):
            raise ConfigError(f"--set {item} cannot be used here: each row has its own positions")
    embedded = flags.data in (None, "fashion")
    chosen = flags.resolve_recipe(recipe or ("fashion" if embedded else "positions"), collect_given_flags(settings))
    seeds, (folder, _) = flags.list_seeds(chosen), split_output(flags.out)
    request = flags.make_request(chosen)

    from vitrail.study.position_study import plan_position_study

    run_study(plan_position_study(request, seeds=seeds, folder=folder, device=flags.device), flags)
