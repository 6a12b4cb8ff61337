"""vitrail ablate: what each ingredient of a recipe gives."""

import json
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.cli.options.recipe_flags import DistillRecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import DEFAULT_STUDENT, TrainFlags
from vitrail.cli.options.values import parse_field, parse_size
from vitrail.errors import ConfigError, VitrailError

if TYPE_CHECKING:
    from vitrail.cli.runner import Runtime
    from vitrail.study.ablation_plan import AblationRun
    from vitrail.study.ablation_results import AblationTable


class AblationStoppedError(VitrailError):
    """Somebody stopped a row; the same command goes on."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(f"{message}; to go on, give the same command again")
        self.exit_code = exit_code


def ablate(
    recipe: str,
    /,
    *,
    without: Annotated[list[str] | None, Parameter(negative=())] = None,
    replaced: Annotated[list[str] | None, Parameter(name="--with", negative=())] = None,
    each: Annotated[bool, Parameter(name="--all", negative=())] = False,
    seeds: int = 1,
    teacher: str | None = None,
    teacher_cache: Path | None = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    flags: Annotated[TrainFlags | None, Parameter(name="*")] = None,
    settings: Annotated[DistillRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Train a recipe as it is, and again with one ingredient left out or replaced, and compare (DeiT's table 8).

    The other flags are those of `train` and `distill` and hold for every run: --epochs for each, and --minutes too, so
    that a row with slower steps takes fewer of them. Each run has a folder in --out, for `vitrail runs`; table.json,
    table.md and ablation.png are beside them. The same command again goes on: what is finished is not run again,
    what was stopped is resumed, to the bit. Ctrl-C saves before it stops.

    Examples::

        vitrail ablate fashion --without flip --without smoothing --epochs 0.1 --set depth=1
        vitrail ablate fashion --with optimizer=sgd,lr=0.1 --with depth=2 --seeds 2 --epochs 0.1 --set depth=1
        vitrail ablate fashion --teacher runs/demo --without distill --with distill=soft --epochs 0.1 --set depth=1
        vitrail ablate deit --all --data photos --model DeiT-Ti --batch 4 --dry-run

    Parameters
    ----------
    recipe
        A name that `vitrail train --recipe` takes, or a .yaml file of your own.
    without
        An ingredient to leave out, for a row of its own; may be repeated: mixup, cutmix, erase, flip, policy
        (randaugment, autoaugment), jitter, repeats, smoothing, crop, ema, clip, layer_decay, warmup, weight_decay,
        dropout, stochastic_depth, whiten, early_size, distill (no teacher), init (the same model from scratch).
    replaced
        Settings or fields of the model for a row of its own, as NAME=VALUE,NAME=VALUE; may be repeated.
    each
        A row without each ingredient that the recipe has.
    seeds
        Runs of each row, with seeds from 0 (or --seed); the table has their mean ± standard deviation.
    teacher
        A trained model to learn from, as `vitrail distill` takes it.
    teacher_cache
        A folder that keeps the teacher's answers.
    out
        The folder of the ablation; else runs/RECIPE-ablation.
    dry_run
        Check and print the rows, and write nothing.
    as_json
        Print the table as JSON, and what else is said on stderr.
    """
    flags = flags or TrainFlags()
    if not (without or replaced or each):
        raise ConfigError("nothing to compare with; expected --without INGREDIENT, --with NAME=VALUE, or --all")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}; expected at least 1")
    if teacher_cache is not None and teacher is None:
        raise ConfigError(f"--teacher-cache {teacher_cache} without --teacher; expected a trained model to ask")
    others = [parse_replacements(item) for item in replaced or ()]
    chosen = flags.resolve_recipe(recipe, collect_given_flags(settings), DEFAULT_STUDENT if teacher else None)
    request = flags.make_request(chosen, teacher, teacher_cache)

    from vitrail.cli.runner import Runtime
    from vitrail.study.ablation_plan import Ablation, list_ablation_runs
    from vitrail.study.ablation_results import AblationTable
    from vitrail.train.distributed import Ranks, join_process_group, resolve_device
    from vitrail.train.teacher import Teacher

    device = resolve_device(flags.device, Ranks())
    ablation = Ablation(request)
    rows = ablation.build_rows(without or (), others, each=each)
    folder = Path("runs") / f"{chosen.name}-ablation" if out is None else out
    master = Teacher.from_name(request.teacher) if request.teacher else None
    if master is not None:
        ablation.check_teacher_fits(rows, master, device)
    runs = list_ablation_runs(rows, range(chosen.loop.seed, chosen.loop.seed + seeds), folder, master)
    here = Runtime(device=flags.device, workers=flags.workers, threads=flags.threads, strict=flags.strict)
    with join_process_group() as team, redirect_stdout(sys.stderr) if as_json else nullcontext():
        first = team.is_first  # of several processes one speaks
        if first:
            print(f"ablation of {chosen.name} on {ablation.data.name}: {count_run_states(runs)} in {folder}")
            width = max(len(row.name) for row in rows)
            for row in rows:
                print(f"  {row.name.ljust(width)}  {row.description}", flush=True)
        failed = {} if dry_run else train_runs(runs, here, aloud=first)
    if not first:
        return
    table = AblationTable.read(chosen.name, ablation.data.name, rows, () if dry_run else runs, failed)
    written = () if dry_run else write_ablation(table, folder)
    if as_json:
        print(json.dumps(table.to_json(), indent=2))
    elif not dry_run:
        print(f"\n{table}\n\nwritten: {', '.join(map(str, written))}; all runs: vitrail runs {quote(str(folder))}")
    if failed:
        run, why = next(iter(failed.items()))
        raise VitrailError(f"{len(failed)} of {len(runs)} runs failed: {run}: {why}")


def parse_replacements(text: str) -> dict[str, Any]:
    """NAME=VALUE,NAME=VALUE; a comma inside brackets belongs to a value."""
    found = dict[str, Any]()
    for item in re.split(r",(?![^\[\]]*\])", text):
        name, value = parse_field(item, "--with")
        if name in found:
            raise ConfigError(f"--with {text[:60]!r} has {name} twice; expected it once")
        found[name] = (
            parse_size(value, "--with image_size") if name == "image_size" and isinstance(value, str) else value
        )
    return found


def count_run_states(runs: "Sequence[AblationRun]") -> str:
    states = [run.state for run in runs]
    told = [("finished", "finished"), ("stopped", "to go on with")]
    some = [f"{count} {words}" for state, words in told if (count := states.count(state))]
    return f"{len(runs)} runs" + (f" ({', '.join(some)})" if some else "")


def train_runs(runs: "Sequence[AblationRun]", runtime: "Runtime", *, aloud: bool) -> dict[str, str]:
    """Brings every run to its end; gives the ones that diverged, and why, since they are a result too."""
    from vitrail.cli.runner import resume_run, start_run
    from vitrail.train.loop import StoppedError
    from vitrail.train.trainer import DivergedError

    failed = dict[str, str]()
    for number, run in enumerate(runs, 1):
        if run.state == "finished":
            continue
        if aloud:
            print(f"\n── {number}/{len(runs)} {run.folder.name}: {run.row.description}", flush=True)
        try:
            if run.state == "stopped":
                resume_run(run.folder, runtime, run.request.trusted_code)
            else:
                start_run(run.request, run.folder, runtime, start=monotonic(), dry_run=False)
        except StoppedError as error:
            raise AblationStoppedError(f"{run.folder.name} {error.reason}", error.exit_code) from None
        except KeyboardInterrupt:
            raise AblationStoppedError(f"{run.folder.name} stopped by SIGINT", 128 + signal.SIGINT) from None
        except DivergedError as error:
            failed[run.folder.name] = str(error)
            if aloud:
                print(f"failed {error}", flush=True)
    return failed


def write_ablation(table: "AblationTable", folder: Path) -> list[Path]:
    from vitrail.study.plots import save_ablation_plot

    written = table.write(folder)
    if find_spec("matplotlib") and save_ablation_plot(table, folder / "ablation.png"):
        written.append(folder / "ablation.png")
    return written
