"""vitrail predict: classify images."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options.predict_flags import Images, PredictFlags
from vitrail.errors import ConfigError


def predict(
    model: str,
    /,
    *images: Images,
    top: int = 5,
    kind: Annotated[
        Literal["table", "json", "jsonl", "csv", "parquet"] | None, Parameter(name=("--format", "-f"))
    ] = None,
    labels: Path | None = None,
    flags: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Classify images and print the top classes with their probabilities.

    Any number of images is processed in order and in little memory. An image that cannot be read is reported on stderr
    and skipped; the others are processed, and the exit code is 2. A model that `vitrail export` wrote predicts
    without torch, in a fraction of a second.

    Examples::

        vitrail predict ViT-Ti/16 photo.jpg
        vitrail predict my_model photo.jpg --top 1 --format json
        vitrail predict my_model photos -o predictions.csv
        vitrail predict my_model photos -o predictions.csv --resume
        vitrail predict my_model 'photos/val/**/*.png' photo.jpg -o predictions.parquet --exact
        vitrail predict my_model photos --format jsonl --top 1

    Parameters
    ----------
    model
        A name that `vitrail models` lists, a folder that `vitrail export` wrote, a run folder, or a checkpoint.
    top
        Classes per image.
    kind
        table, json, jsonl, csv, or parquet, which needs -o. [default: by the suffix of OUT, else table]
    labels
        Text file with the class names, one per line.
    """
    if top < 1:
        raise ConfigError(f"--top {top}; expected 1 or more")
    names = None
    if labels is not None:
        from vitrail.cli.options.values import read_labels_file

        names = read_labels_file(labels)
    own_flags = ("top", "format", "labels")
    (flags or PredictFlags()).run_job(model, images, "logits", own_flags, format=kind, top=top, labels=names)
