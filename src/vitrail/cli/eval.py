"""vitrail eval: measure a model on labelled images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import check_minimum, parse_fields, parse_size
from vitrail.cli.output.messages import print_notes
from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder, print_report, write_json_report
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.train.metrics import Evaluation

EVALUATION_FILES = ("confusion.png", "reliability.png", "evaluation.json")
IMAGENET_CLASSES = 1000  # of ReaL labels


def eval(  # noqa: A001
    checkpoint: flags.Model,
    /,
    *,
    data: flags.Data = None,
    real: Path | None = None,
    out: Path | None = None,
    head: Literal["both", "class", "distill"] | None = None,
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
    """Evaluate a model: top-1, top-5, loss, calibration, the worst classes and the most confused pairs.

    Uses the validation part of the data: all images of a folder without one, and for the data of a run the images
    that the run was not trained on. Files are written only with --out.

    Examples::

        vitrail eval runs/demo
        vitrail eval runs/demo --data fashion --out results
        vitrail eval runs/demo --data fashion --json

    Parameters
    ----------
    real
        ReaL labels of the ImageNet validation images, a .json file; the images must have their ImageNet names.
    out
        Folder for confusion.png, reliability.png and evaluation.json.
    head
        For a model with a distillation token: the mean of both heads, or one of them.
    """
    how, given = parse_fields(preprocessing, "--preprocessing"), parse_fields(fields)
    if image_size is not None:
        given["image_size"] = parse_size(image_size)
    check_minimum("--batch", batch, 1)
    check_minimum("--workers", workers, 0)

    from vitrail.checkpoint.class_mapping import map_classes
    from vitrail.export.description import is_exported
    from vitrail.loading import describe_model, open_model
    from vitrail.train.distributed import Ranks, resolve_device
    from vitrail.train.evaluate import evaluate
    from vitrail.train.evaluation_data import get_validation_images, open_evaluation_data

    if head is not None:
        if is_exported(checkpoint) or not describe_model(checkpoint, given).config.get("distilled"):
            raise ConfigError(
                f"--head {head} for {checkpoint}, which has one head; expected a model with a distillation token, "
                "such as deit_tiny_distilled_patch16_224, or no --head"
            )
        given["answer"] = head
    place = resolve_device(device, Ranks())
    loaded = open_model(checkpoint, fields=given, preprocessing=how or None, device=place)
    if not loaded.classes:
        raise ConfigError(f"{checkpoint} has no head; expected a model with classes")
    found = open_evaluation_data(data, real, loaded.run)
    images = get_validation_images(found)
    if real is not None and loaded.classes != IMAGENET_CLASSES:
        raise ConfigError(f"--real for a model of {loaded.classes} classes; expected ImageNet's {IMAGENET_CLASSES}")
    mapping, note = map_classes(loaded.labels, loaded.classes, found.classes)
    print_notes(filter(None, (*found.notes, note)))
    prepare_figure_folder(out, EVALUATION_FILES, overwrite=overwrite)
    with progress_bar(len(images)) as advance:
        result = evaluate(
            loaded.module,
            images,
            loaded.preprocessing,
            batch=batch,
            workers=workers,
            device=place,
            mapping=mapping,
            labels=loaded.labels,
            strict=strict,
            progress=advance,
            classes=loaded.classes,
        )
    report = {"checkpoint": checkpoint, "data": found.name, **result.to_json()}
    written = () if out is None else write_evaluation(result, report, out)
    print_report(result, report, written, as_json=as_json)


def write_evaluation(result: "Evaluation", report: dict[str, Any], out: Path) -> list[Path]:
    from vitrail.train.plots import plot_confusion_matrix, plot_reliability_diagram

    confusion, reliability, numbers = (out / name for name in EVALUATION_FILES)
    write_json_report(report, numbers)
    plot_reliability_diagram(result.bins, reliability)
    if result.confusion is None:
        return [numbers, reliability]
    plot_confusion_matrix(result.confusion, result.labels, confusion)
    return [numbers, reliability, confusion]
