"""vitrail report: write an HTML page about a model."""

from pathlib import Path

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_minimum, parse_fields, read_labels
from vitrail.cli.output.results import check_output_file, make_message_callbacks


def report(
    checkpoint: flags.TorchModel,
    /,
    *,
    data: flags.ImageData = None,
    images: flags.ImageCount = 32,
    explained: int = 6,
    evaluate: bool = True,
    out: flags.Out = Path("report.html"),
    overwrite: flags.Overwrite = False,
    labels: flags.Labels = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    batch: flags.Batch = 4,
    device: flags.Device = "auto",
) -> None:
    """Write an HTML page about a model or a run.

    With labeled images: accuracy in total and per class, confusion matrix, calibration, samples of every class.
    For a run: its training curves and the figures of its task, such as reconstructions. For every model: predictions,
    maps of what it attends to, attention distances, patch features, filters, positions and a summary; without classes
    the attention of each head and nearest neighbors. A single file that opens in any browser, without a network, on
    a phone too.

    Examples::

        vitrail report vit_fashion --images 4
        vitrail report runs/demo --data fashion --images 4 --explained 2 -o run.html

    Parameters
    ----------
    explained
        Number of images that are shown with attention maps, spread over the classes.
    evaluate
        Measure the accuracy on all labeled images.
    out
        File name of the page; it ends in .html.
    """
    check_minimum("--explained", explained, 0)
    check_minimum("--batch", batch, 1)
    check_output_file("--out", out, (".html",), overwrite=overwrite)

    from vitrail.opening import run_command

    line = run_command(
        "report",
        checkpoint,
        out=out,
        data=data,
        images=images,
        explained=explained,
        evaluate=evaluate,
        labels=read_labels(labels),
        fields=parse_fields(fields) or None,
        preprocessing=parse_fields(preprocessing, "--preprocessing") or None,
        batch=batch,
        device=device,
        messages=make_message_callbacks(),
    )
    print(line)
