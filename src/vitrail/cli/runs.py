"""vitrail runs: the trainings in a folder, side by side."""

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.files import check_output_paths
from vitrail.text import format_table, make_printable

COLUMNS = ("run", "model", "data", "recipe", "steps", "best", "last", "loss", "time", "state")


def runs(
    folder: Path = Path("runs"),
    /,
    *,
    out: Path | None = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """List the runs in a folder: model, data, recipe, steps, validation accuracy (best and last), loss, time, state.

    A run is finished, stopped at a step (killed, or still on its way), or damaged, and then it says what is.

    Examples::

        vitrail runs
        vitrail runs runs --out curves.png
        vitrail runs runs/demo --json

    Parameters
    ----------
    folder
        A folder of runs, or one run.
    out
        A picture to draw the curves into, training loss and validation accuracy: .png, .svg or .pdf.
    overwrite
        Replace OUT if it exists.
    as_json
        Print JSON instead of a table.
    """
    from vitrail.train.plots import plot_training_curves
    from vitrail.train.run_list import read_run_summaries

    if out is not None:
        check_output_paths([out], overwrite=overwrite)
    found = read_run_summaries(folder)
    if out is not None:
        plot_training_curves({run.name: run.records for run in found}, out)
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=2))
        return
    lines = [
        (
            *(make_printable(text, 40) for text in (run.name, run.model, run.data, run.recipe)),
            f"{run.step}/{'?' if run.steps is None else run.steps}",
            format_percent(run.best_value("val_top1")),
            format_percent(run.last_value("val_top1")),
            "" if (loss := run.last_value("loss")) is None else f"{loss:.4f}",
            format_duration(run.last_value("seconds")),
            make_printable(run.state, 100),
        )
        for run in found
    ]
    print("\n".join(format_table(COLUMNS, lines, "llllrrrrrl")))
    if out is not None:
        print(f"\ncurves in {out}")


def format_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
