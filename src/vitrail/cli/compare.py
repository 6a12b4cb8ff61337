"""vitrail compare: who disagrees with whom."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder, print_report, write_json_report
from vitrail.cli.summary import parse_fields
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.study.compare_results import Comparison

COMPARISON_FILES = ("comparison.png", "comparison.json")


def compare(
    *models: str,
    data: str | None = None,
    out: Path | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
    strict: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show which share of the pictures models, their heads and the ground truth classify differently, two by two.

    A model with a distillation token votes with its class head, with its distillation head and with both; how alike its
    two tokens are is shown layer by layer. Every model sees the pictures as it was trained to, and chooses among the
    data's classes. Takes the validation part of the data as `vitrail eval` does, of a run's own data what the run did
    not see. Nothing is written unless --out says where.

    Examples::

        vitrail compare runs/demo
        vitrail compare runs/demo runs/demo/model --data fashion --out results
        vitrail compare runs/demo --data fashion --json

    Parameters
    ----------
    models
        One or more: the folder of a run, anything that `vitrail convert` reads, or timm:NAME, which timm fetches.
    data
        As for `vitrail eval`: fashion (embedded) or a folder; unless said, that of the first model that is a run.
    out
        A folder for comparison.png and comparison.json.
    fields
        A config field that the files do not specify, as FIELD=VALUE, for all models alike; may be repeated.
    overwrite
        Replace files that exist.
    batch
        Pictures at once.
    workers
        Processes that prepare pictures; 0 is none beside this one.
    device
        auto, cpu, cuda, cuda:1, mps.
    strict
        An unreadable picture is an error; else it is left out for all models and named.
    as_json
        Print JSON and nothing else.
    """
    if not models:
        raise ConfigError("no models; expected at least one: a run's folder, a checkpoint, or timm:NAME")
    for name, value, least in (("batch", batch, 1), ("workers", workers, 0)):
        if value < least:
            raise ConfigError(f"--{name} {value}; expected at least {least}")

    from vitrail.study.compare import compare as compared
    from vitrail.study.compare import open_comparison_data
    from vitrail.train.distributed import Ranks, resolve_device
    from vitrail.train.opened import get_validation_images, open_model

    prepare_figure_folder(out, COMPARISON_FILES, overwrite=overwrite)
    place = resolve_device(device, Ranks())
    known = parse_fields(fields)
    opened = [open_model(name, **known) for name in models]
    found = open_comparison_data(opened, data)
    pictures = get_validation_images(found)
    with progress_bar(len(opened) * len(pictures)) as advance:
        result = compared(opened, found, batch=batch, workers=workers, device=place, strict=strict, progress=advance)
    for line in result.notes:
        print(f"vitrail: note: {line}", file=sys.stderr)
    report = {"models": list(models), **result.to_json()}
    written = () if out is None else write_comparison(result, report, out)
    print_report(result, report, written, as_json=as_json)


def write_comparison(result: "Comparison", report: dict[str, Any], out: Path) -> list[Path]:
    from vitrail.study.plots import save_comparison_plot

    figure, numbers = (out / name for name in COMPARISON_FILES)
    write_json_report(report, numbers)
    save_comparison_plot(result, figure)
    return [numbers, figure]
