"""vitrail eval: how well a model answers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.output.progress import progress_bar
from vitrail.cli.output.results import prepare_figure_folder, print_report, write_json_report
from vitrail.cli.summary import parse_field, parse_fields, parse_size
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.train.metrics import Evaluation

EVALUATION_FILES = ("confusion.png", "reliability.png", "evaluation.json")
IMAGENET_CLASSES = 1000  # classes, which ReaL labels number


def eval(  # noqa: A001
    checkpoint: str,
    /,
    *,
    data: str | None = None,
    real: Path | None = None,
    out: Path | None = None,
    head: Literal["both", "class", "distill"] | None = None,
    image_size: str | None = None,
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    preprocessing: Annotated[list[str] | None, Parameter(negative=())] = None,
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
    strict: Annotated[bool, Parameter(negative=())] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure a model on pictures: top-1, top-5, loss, calibration, the worst classes and the most confused.

    Takes the validation part of the data: of a folder of classes without one all pictures, except for a run that was
    trained on it, which gets those that it did not see. Nothing is written unless --out says where.

    Examples::

        vitrail eval runs/demo
        vitrail eval runs/demo --data fashion --out results
        vitrail eval runs/demo --data fashion --json

    Parameters
    ----------
    checkpoint
        The folder of a run, or anything that `vitrail convert` reads: a file, a folder, hf-hub:owner/model.
    data
        fashion (embedded), or a folder: val/CLASS/*.jpg or CLASS/*.jpg; CIFAR-10 or -100, MNIST files; ImageNet. For a
        run it is the run's own unless said. Classes are found by name, or by number in folders called 0 to 999.
    real
        ReaL labels of ImageNet's validation pictures, a .json file; the pictures must have ImageNet's names.
    out
        A folder for confusion.png, reliability.png and evaluation.json.
    head
        Of a model with a distillation token, whose answer counts: both heads' mean, or the one of a single head.
    image_size
        Another size of the pictures: 384, or rows x columns: 384x256; positions are resampled.
    fields
        A config field that the file does not specify, as FIELD=VALUE; may be repeated.
    preprocessing
        A field of the preprocessing to change, as FIELD=VALUE: crop=0.875; may be repeated.
    overwrite
        Replace files that exist.
    batch
        Pictures at once.
    workers
        Processes that prepare pictures; 0 is none beside this one.
    device
        auto, cpu, cuda, cuda:1, mps.
    strict
        An unreadable picture is an error; else it is left out and named.
    as_json
        Print JSON and nothing else.
    """
    how = dict(parse_field(item, "--preprocessing") for item in preprocessing or ())
    known = parse_fields(fields)
    if image_size is not None:
        known["image_size"] = parse_size(image_size)
    for name, value, least in (("batch", batch, 1), ("workers", workers, 0)):
        if value < least:
            raise ConfigError(f"--{name} {value}; expected at least {least}")

    from vitrail.checkpoint.class_mapping import map_classes
    from vitrail.checkpoint.reading import describe, read, warn_about_report
    from vitrail.checkpoint.run_files import find_finished_run
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.predict.predictor import Predictor
    from vitrail.train.distributed import Ranks, resolve_device
    from vitrail.train.evaluate import evaluate
    from vitrail.train.opened import get_validation_images, open_evaluation_data

    prepare_figure_folder(out, EVALUATION_FILES, overwrite=overwrite)
    place = resolve_device(device, Ranks())
    run = find_finished_run(Path(checkpoint))
    weights = checkpoint if run is None else run.model
    if head is not None:
        if not describe(weights, **known).config.get("distilled"):
            hint = "expected a model with a distillation token, such as deit_tiny_distilled_patch16_224; or no --head"
            raise ConfigError(f"--head {head} for {checkpoint}, which has one head; {hint}")
        known["answer"] = head
    found = read(weights, **known)
    warn_about_report(found, checkpoint, ("preprocessing",) if how else ())
    model, seen_as = found.model, found.description.preprocessing
    if how:
        seen_as = (seen_as or Preprocessing(image_size=model.config.image_size)).with_fields(how)
    checked = Predictor(model, preprocessing=seen_as, labels=found.description.labels, device=place)
    opened = open_evaluation_data(data, real, run)
    pictures = get_validation_images(opened)
    if real is not None and model.config.classes != IMAGENET_CLASSES:
        raise ConfigError(
            f"--real for a model of {model.config.classes} classes; expected ImageNet's {IMAGENET_CLASSES}"
        )
    mapping, note = map_classes(checked.labels, model.config.classes, opened.classes)
    for line in filter(None, (*opened.notes, note)):
        print(f"vitrail: note: {line}", file=sys.stderr)
    with progress_bar(len(pictures)) as advance:
        result = evaluate(
            model,
            pictures,
            checked.preprocessing,
            batch=batch,
            workers=workers,
            device=place,
            mapping=mapping,
            labels=checked.labels,
            strict=strict,
            progress=advance,
        )
    report = {"checkpoint": checkpoint, "data": opened.name, **result.to_json()}
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
