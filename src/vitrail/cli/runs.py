"""vitrail runs: list the runs in a folder."""

import json
from pathlib import Path

from vitrail.base.files import refuse_existing_outputs
from vitrail.cli.options import model_flags as flags
from vitrail.cli.output.results import split_output


def runs(
    folder: Path = Path("runs"),
    /,
    *,
    out: flags.OptionalOut = None,
    overwrite: flags.Overwrite = False,
    as_json: flags.Json = False,
) -> None:
    """List the runs in a folder with their accuracy and state.

    Validation top-1 and loss are those of the last evaluation, best top-1 is the highest of all evaluations, and train
    loss is the loss on the training images. A distilled run also has the name of its teacher.
    If there are runs of other tasks, every row names its metric; its best value may be the lowest one.
    A run is finished, stopped (killed, or still training), or damaged, with the reason. The step at which
    features collapsed is listed, too.

    Examples::

        vitrail runs
        vitrail runs runs --out curves.png
        vitrail runs runs --out runs.md
        vitrail runs runs/demo --json

    Parameters
    ----------
    folder
        Folder of runs, or one run.
    out
        File for a plot of training loss, validation loss and validation accuracy: .png, .svg or .pdf.
        Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
    """
    from vitrail.train.run_list import make_run_table, read_run_summaries

    plot, table = split_output(out)
    if out is not None:
        refuse_existing_outputs([out], overwrite=overwrite)
    found = read_run_summaries(folder)
    if plot is not None:
        from vitrail.train.plots import choose_metrics, plot_training_curves

        shown = [choose_metrics(run.task.metrics, run.records) for run in found]
        metrics, others = ([each for run in shown for each in run[place]] for place in (0, 1))
        plot_training_curves({run.name: run.records for run in found}, plot, metrics, others)
    if table is not None:
        make_run_table(found).write(table)
    if as_json:
        print(json.dumps([run.to_json() for run in found], indent=2))
        return
    print(make_run_table(found))
    if out is not None:
        print(f"\n{'curves in' if plot else 'written:'} {out}")
