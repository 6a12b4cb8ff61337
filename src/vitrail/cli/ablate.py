"""vitrail ablate: measure what each ingredient of a recipe contributes."""

import json
import re
import sys
from contextlib import nullcontext, redirect_stdout
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.base.files import make_writable_folder
from vitrail.cli.options.recipe_flags import DistillRecipeFlags, collect_given_flags
from vitrail.cli.options.train_flags import DEFAULT_STUDENT, StudyFlags, TeacherCache, TeacherModel
from vitrail.cli.options.values import parse_field, parse_size
from vitrail.cli.output.messages import print_text
from vitrail.cli.output.results import split_output

if TYPE_CHECKING:
    from vitrail.study.training_study import TrainingStudy


def ablate(
    recipe: str,
    /,
    *,
    without: Annotated[list[str] | None, Parameter(negative=())] = None,
    replaced: Annotated[list[str] | None, Parameter(name="--with", negative=())] = None,
    each: Annotated[bool, Parameter(name="--all", negative=())] = False,
    teacher: TeacherModel = None,
    teacher_cache: TeacherCache = None,
    flags: Annotated[StudyFlags | None, Parameter(name="*")] = None,
    settings: Annotated[DistillRecipeFlags | None, Parameter(name="*")] = None,
) -> None:
    """Measure what each ingredient of a recipe contributes.

    The recipe is trained as it is, and again with one ingredient left out or replaced (DeiT's table 8). The other
    options are those of `vitrail train` and `vitrail distill` and apply to every run, including --epochs and --minutes;
    [recipe: …] shows the values of fashion. Each run has a folder in --out, for `vitrail runs`; table.json, table.md
    and ablation.png are next to them. Run the same command again to resume: finished runs are kept, and stopped runs
    continue with bit-identical results.

    Examples::

        vitrail ablate fashion --without flip --without smoothing --epochs 0.1 --set depth=1
        vitrail ablate fashion --with optimizer=sgd,lr=0.1 --with depth=2 --epochs 0.1 -o runs/changed
        vitrail ablate deit --all --data photos --model DeiT-Ti --batch 4 --dry-run

    Parameters
    ----------
    recipe
        A name that `vitrail train --recipe` takes, or a .yaml file.
    without
        Leave out an ingredient, in a separate row: mixup, cutmix, erase, flip, policy (randaugment, autoaugment),
        jitter, repeats, smoothing, crop, ema, clip, layer_decay, warmup, weight_decay, dropout, stochastic_depth,
        whiten, early_size, distill (no teacher), init (the same model from scratch). May be repeated.
    replaced
        Change settings or config fields, in a separate row. May be repeated.
    each
        Add a row without each ingredient of the recipe.
    """
    flags = flags or StudyFlags()
    if not (without or replaced or each):
        raise ConfigError("nothing to compare with; expected --without INGREDIENT, --with NAME=VALUE, or --all")
    if teacher_cache is not None and teacher is None:
        raise ConfigError(f"--teacher-cache {teacher_cache} without --teacher; expected a trained model")
    others = [parse_replacements(item) for item in replaced or ()]
    chosen = flags.resolve_recipe(recipe, collect_given_flags(settings), DEFAULT_STUDENT if teacher else None)
    seeds, (folder, _) = flags.list_seeds(chosen), split_output(flags.out)
    request = flags.make_request(chosen, teacher=teacher, teacher_cache=teacher_cache)

    from vitrail.study.ablation import plan_ablation_study

    study = plan_ablation_study(
        request, without or (), others, each=each, seeds=seeds, folder=folder, device=flags.device
    )
    run_study(study, flags)


def parse_replacements(text: str) -> dict[str, Any]:
    """NAME=VALUE,NAME=VALUE; a comma inside brackets belongs to a value."""
    found = dict[str, Any]()
    for item in re.split(r",(?![^\[\]]*\])", text):
        name, value = parse_field(item, "--with")
        if name in found:
            raise ConfigError(f"--with {text[:60]!r} has {name} twice; expected it once")
        is_size = name == "image_size" and isinstance(value, str)
        found[name] = parse_size(value, "--with image_size") if is_size else value
    return found


def run_study(study: "TrainingStudy", flags: StudyFlags) -> None:
    """Train what is left to train, write the table and print it. A dry run only prints the rows."""
    _, table = split_output(flags.out)
    if table is not None and table.exists():
        raise ConfigError(f"-o {table} already exists; expected the name of a new file")
    if table is not None and not flags.dry_run:
        make_writable_folder(table.parent)
    with redirect_stdout(sys.stderr) if flags.as_json else nullcontext():
        result = study.run(flags.make_runtime(), dry_run=flags.dry_run)
    if result is None:  # another process prints it
        return
    if table is not None and not flags.dry_run:
        result.results.table.write(table)
        result.written.append(table)
    if flags.as_json:
        print(json.dumps(result.results.to_json(), indent=2))
    elif not flags.dry_run:
        files = ", ".join(map(str, result.written))
        print_text(f"\n{result.results}\n\nwritten: {files}; all runs: vitrail runs {quote(str(study.folder))}")
    result.raise_if_failed()
