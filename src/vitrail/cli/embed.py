"""vitrail embed: pictures as vectors."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.jobs import PredictFlags, PredictJob, ResultSink
from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from vitrail.predict.output.feature_files import FeatureFile
    from vitrail.predict.pipeline import ImageResult
    from vitrail.predict.predictor import Predictor


def embed(
    model: str,
    /,
    *images: Annotated[str, Parameter(allow_leading_hyphen=True)],  # - is standard input
    features: Literal["class", "mean", "tokens"] = "class",
    kind: Annotated[Literal["npy", "parquet"] | None, Parameter(name=("--format", "-f"))] = None,
    flags: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Turn pictures into features: numbers for search, for clusters, for a classifier of your own.

    features.npy is an array (pictures, width), of tokens (pictures, tokens, width), in float32; features.files.csv
    beside it says which row is whose, and why a picture has none. A parquet file has all of that in its columns.

    Examples::

        vitrail embed my_model photos -o features.npy
        vitrail embed my_model photos -o features.parquet --features mean
        vitrail embed my_model photo.jpg 'photos/val/**/*.png' -o tokens.npy --features tokens --resume

    Parameters
    ----------
    model
        A folder that `vitrail export` wrote for these features, the folder of a run, or anything that
        `vitrail convert` reads.
    images
        Pictures; folders, of which all that lie below are done; patterns in quotes, ** for any folders; - for the
        bytes of one on standard input. URLs are not fetched.
    features
        The class token, the mean of the patches, or all tokens; each after the last norm.
    kind
        npy or parquet; without it as OUT ends.
    """
    flags = flags or PredictFlags()
    flags.check(images, ("features", "format"))
    if flags.out is None:
        raise ConfigError("no -o; expected a file for the features: -o features.npy, or .parquet")

    from vitrail.predict.output.feature_files import FeatureFile, choose_feature_format, partial_folder_for_features
    from vitrail.predict.output.row_formats import import_pyarrow

    found = choose_feature_format(flags.out, kind)
    if found == "parquet":
        import_pyarrow()  # what would fail in the end fails before the work
    partial = partial_folder_for_features(flags.out, found)

    def sink_for(_: "Predictor", told: dict[str, Any]) -> ResultSink:
        return FeatureFile(partial, found, told, resume=flags.resume)

    def write(sink: "FeatureFile", _: "Predictor", row: "ImageResult") -> None:
        sink.write(row.name, None if row.error is None else str(row.error), row.values, row.stamp)

    PredictJob(model, images, flags, features, partial, {"format": found}).run(sink_for, write)
