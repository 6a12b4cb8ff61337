"""vitrail predict: what is in these pictures?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.jobs import PredictFlags, PredictJob, ResultSink, write_to_stdout
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.predict.output.prediction_files import PredictionFile
    from vitrail.predict.pipeline import ImageResult
    from vitrail.predict.predictor import Predictor


def predict(
    model: str,
    /,
    *images: Annotated[str, Parameter(allow_leading_hyphen=True)],  # - is standard input
    top: int = 5,
    kind: Annotated[
        Literal["table", "json", "jsonl", "csv", "parquet"] | None, Parameter(name=("--format", "-f"))
    ] = None,
    labels: Path | None = None,
    flags: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Name what is in pictures: the likeliest classes of each, with their probabilities.

    Pictures are done in order, however many, in little memory. One that cannot be read costs a line on stderr and is
    counted at the end; all the others are done, and the exit code is 1. A model that `vitrail export` wrote answers
    without torch, in a fraction of a second.

    Examples::

        vitrail predict my_model photo.jpg
        vitrail predict my_model photo.jpg --top 1 --format json
        vitrail predict my_model photos -o answers.csv
        vitrail predict my_model photos -o answers.csv --resume
        vitrail predict my_model 'photos/val/**/*.png' photo.jpg -o answers.parquet --exact
        vitrail predict my_model photos --format jsonl --top 1

    Parameters
    ----------
    model
        A folder that `vitrail export` wrote, the folder of a run, or anything that `vitrail convert` reads.
    images
        Pictures; folders, of which all that lie below are done; patterns in quotes, ** for any folders; - for the
        bytes of one on standard input. URLs are not fetched.
    top
        How many classes of each.
    kind
        A table to be read, or json, jsonl, csv; parquet needs -o. Without it as OUT ends.
    labels
        A text with the names of the classes, one a line, where the model has none.
    """
    flags = flags or PredictFlags()
    flags.check(images, ("top", "format", "labels"))
    if top < 1:
        raise ConfigError(f"--top {top}; expected 1 or more")

    from vitrail.predict.output.row_formats import PredictionPrinter, choose_prediction_format, import_pyarrow

    found = choose_prediction_format(flags.out, kind)
    if found == "parquet":
        import_pyarrow()  # what would fail in the end fails before the work
    if flags.out is None:
        partial = None
    else:
        from vitrail.predict.output.prediction_files import partial_folder_for_predictions

        partial = partial_folder_for_predictions(flags.out, found)

    def sink_for(predictor: "Predictor", told: dict[str, Any]) -> ResultSink:
        most = min(top, predictor.classes)
        if partial is None:
            return PredictionPrinter(found, most, write_to_stdout)
        from vitrail.predict.output.prediction_files import PredictionFile

        return PredictionFile(partial, found, most, {**told, "top": most}, resume=flags.resume)

    def write(sink: "PredictionPrinter | PredictionFile", predictor: "Predictor", row: "ImageResult") -> None:
        answers = () if row.values is None else predictor.prediction_from_logits(row.values, top).top
        sink.write(row.name, None if row.error is None else str(row.error), answers, row.stamp)

    names = None
    if labels is not None:
        from vitrail.cli.options.values import read_labels_file

        names = read_labels_file(labels)
    PredictJob(model, images, flags, "logits", partial, {"format": found}, names).run(sink_for, write)
