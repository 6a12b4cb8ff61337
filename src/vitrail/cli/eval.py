"""vitrail eval: measure a model on labelled images."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.groups import MODEL
from vitrail.cli.options.values import check_minimum, parse_fields, parse_size
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder, print_report


def eval(  # noqa: A001
    checkpoint: flags.Model,
    /,
    *,
    data: flags.Data = None,
    out: flags.OptionalOut = None,
    real: flags.RealLabels = None,
    head: Annotated[Literal["both", "class", "distill"] | None, Parameter(group=MODEL)] = None,
    image_size: flags.ImageSize = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    overwrite: flags.Overwrite = False,
    batch: flags.Batch = 64,
    workers: flags.Workers = 0,
    device: flags.Device = "auto",
    strict: flags.Strict = False,
    as_json: flags.Json = False,
) -> None:
    """Evaluate a model on labelled images.

    Prints top-1 and top-5 accuracy, loss, calibration, the worst classes and the most confused pairs. Uses the
    validation part of the data: all images of a folder without one, and for the data of a run the images that the
    run was not trained on. Files are written only with --out.

    Examples::

        vitrail eval vit_fashion --data fashion
        vitrail eval vit_fashion --data fashion --out results
        vitrail eval runs/demo --json

    Parameters
    ----------
    out
        Folder for confusion.png, reliability.png and evaluation.json.
    head
        For a model with a distillation token: the mean of both heads, or one of them. [default: both]
    """
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields)
    if image_size is not None:
        given["image_size"] = parse_size(image_size)
    check_minimum("--batch", batch, 1)
    check_minimum("--workers", workers, 0)

    from vitrail.evaluation.checkpoint_evaluation import open_checkpoint_evaluation
    from vitrail.evaluation.plots import EVALUATION_FILES, write_evaluation

    opened = open_checkpoint_evaluation(
        checkpoint, data, real=real, head=head, fields=given, preprocessing=how or None, device=device
    )
    print_notes(opened.notes)
    prepare_figure_folder(out, EVALUATION_FILES, overwrite=overwrite)
    with progress_bar(len(opened.images)) as advance:
        result = opened.run(batch=batch, workers=workers, strict=strict, progress=advance)
    report = {"checkpoint": checkpoint, "data": opened.data, **result.to_json()}
    print_report(result, report, write_evaluation(result, report, out) if out else (), as_json=as_json)
