"""vitrail predict: classify images."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import Images, PredictFlags
from vitrail.cli.options.values import MAX_BATCH, at_most, read_labels
from vitrail.cli.usage_errors import check_arguments


def predict(
    model: flags.Model,
    /,
    *images: Images,
    top: Annotated[int, Parameter(validator=at_most(MAX_BATCH))] = 5,
    kind: Annotated[
        Literal["table", "json", "jsonl", "csv", "parquet"] | None, Parameter(name=("--format", "-f"))
    ] = None,
    labels: flags.Labels = None,
    options: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Classify images and print the top classes.

    Any number of images is processed in order, using
    little memory. An image that cannot be read is reported on stderr and skipped; the exit code is then 2. A model
    that `vitrail export` wrote predicts without torch, in a fraction of a second.

    Examples::

        vitrail predict cct_cifar10 example:cat
        vitrail predict cct_cifar10 example:cat --top 1 --format json
        vitrail predict vit_fashion photos -o predictions.csv
        vitrail predict vit_fashion 'photos/**/*.png' --format jsonl --top 1

    Parameters
    ----------
    top
        Classes per image.
    kind
        Format of the results; parquet needs -o. [default: by the suffix of OUT, else table]
    """
    if top < 1:
        raise ConfigError(f"--top {top}; expected 1 or more")
    check_arguments("predict", model, images)
    given = options or PredictFlags()
    how = given.make_options("logits", labels=read_labels(labels))

    from vitrail.opening import run_command

    given.run(run_command("predict", model, inputs=images, format=kind, top=top, options=how))
