"""vitrail study positions: which positions a ViT needs, and where."""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.cli.ablate import count_run_states, train_runs
from vitrail.cli.options.recipe_flags import RecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import TrainFlags
from vitrail.cli.options.values import parse_field
from vitrail.errors import ConfigError, VitrailError

if TYPE_CHECKING:
    from vitrail.study.position_study import PositionStudyTable


def positions(
    *,
    recipe: str | None = None,
    seeds: int = 1,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    flags: Annotated[TrainFlags | None, Parameter(name="*")] = None,
    settings: Annotated[RecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train the same ViT without positions and with each kind, and compare with the paper (ViT's table 8).

    Eight trainings from scratch for each seed: no positions; 1-D and 2-D ones, learned, added at the stem, before
    every layer, or before every layer the same; relative ones (offsets in rows and columns; the paper's run along the
    sequence). The other flags are those of `train` and hold for every training: --epochs for each, or --minutes, so
    that one with slower steps takes fewer of them. Each has a folder in --out, for `vitrail runs`; table.json,
    table.md and positions.png are beside them. The same command again goes on: what is finished is not trained again,
    what was stopped is resumed, to the bit. Ctrl-C saves before it stops.

    Examples::

        vitrail study positions --data fashion --epochs 0.1
        vitrail study positions --data photos --batch 4 --seeds 3 --dry-run

    Parameters
    ----------
    recipe
        A name that `vitrail train --recipe` takes, or a .yaml file of your own. Without it: `fashion` for that data,
        else `positions`, a small ViT of 32 pixels and patch 4, trained briefly without augmentation.
    seeds
        Trainings of each kind, with seeds from 0 (or --seed); the table has their mean ± standard deviation. All
        kinds are trained with one seed before the next seed begins.
    out
        The folder of the study; else runs/DATA-positions.
    dry_run
        Check and print the rows, and write nothing.
    as_json
        Print the table as JSON, and what else is said on stderr.
    """
    flags = flags or TrainFlags()
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}; expected at least 1")
    if flags.init is not None:
        raise ConfigError(f"--init {flags.init}; expected none: a checkpoint has learnt with the positions it has")
    for item in flags.fields or ():
        if parse_field(item)[0] in ("positions", "positions_at"):
            raise ConfigError(f"--set {item}; expected none: each row has its own")
    embedded = flags.data in (None, "fashion") and flags.model is None
    chosen = flags.resolve_recipe(recipe or ("fashion" if embedded else "positions"), collect_given_flags(settings))
    request = flags.make_request(chosen)

    from vitrail.cli.runner import Runtime
    from vitrail.study.ablation_plan import list_ablation_runs
    from vitrail.study.ablation_results import AblationTable
    from vitrail.study.position_study import PositionStudyTable, build_position_rows
    from vitrail.train.distributed import Ranks, join_process_group, resolve_device

    resolve_device(flags.device, Ranks())  # at once, not when the first is trained
    ablation, rows = build_position_rows(request)
    data = ablation.data.name
    folder = Path("runs") / f"{Path(data).name or 'data'}-positions" if out is None else out
    every = list_ablation_runs(rows, range(chosen.loop.seed, chosen.loop.seed + seeds), folder)
    runs = sorted(every, key=lambda run: run.seed)
    here = Runtime(device=flags.device, workers=flags.workers, threads=flags.threads, strict=flags.strict)
    with join_process_group() as team, redirect_stdout(sys.stderr) if as_json else nullcontext():
        first = team.is_first  # of several processes one speaks
        if first:
            print(
                f"positions of {chosen.model} by recipe {chosen.name} on {data}: {count_run_states(runs)} in {folder}"
            )
            for row in rows:
                print(f"  {row.name:9}  {row.description}", flush=True)
        failed = {} if dry_run else train_runs(runs, here, aloud=first)
    if not first:
        return
    result = PositionStudyTable(AblationTable.read(chosen.name, data, rows, () if dry_run else runs, failed))
    written = () if dry_run else write_position_table(result, folder)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
    elif not dry_run:
        print(f"\n{result}\n\nwritten: {', '.join(map(str, written))}; all runs: vitrail runs {quote(str(folder))}")
    if failed:
        run, why = next(iter(failed.items()))
        raise VitrailError(f"{len(failed)} of {len(runs)} runs failed: {run}: {why}")


def write_position_table(result: "PositionStudyTable", folder: Path) -> list[Path]:
    from vitrail.study.plots import save_position_study_plot

    written = result.write(folder)
    if find_spec("matplotlib") and save_position_study_plot(result, folder / "positions.png"):
        written.append(folder / "positions.png")
    return written
