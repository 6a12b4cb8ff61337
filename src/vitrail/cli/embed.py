"""vitrail embed: images to feature vectors."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options.predict_flags import Images, PredictFlags


def embed(
    model: str,
    /,
    *images: Images,
    features: Literal["class", "mean", "tokens"] = "class",
    kind: Annotated[Literal["npy", "parquet"] | None, Parameter(name=("--format", "-f"))] = None,
    flags: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Write the features of images, for search, clustering or a classifier of your own.

    features.npy is an array (images, width), or (images, tokens, width) for tokens, in float32; features.files.csv next
    to it has the row of each image, or the reason why it could not be read. A parquet file has both in its columns.

    Examples::

        vitrail embed my_model photos -o features.npy
        vitrail embed my_model photos -o features.parquet --features mean
        vitrail embed my_model photo.jpg 'photos/val/**/*.png' -o tokens.npy --features tokens --resume

    Parameters
    ----------
    model
        A folder that `vitrail export` wrote for these features, a run folder, or anything that `vitrail convert` reads.
    features
        The class token, the mean of the patch tokens, or all tokens; each after the last norm.
    kind
        npy or parquet. [default: by the suffix of OUT]
    """
    (flags or PredictFlags()).run_job(model, images, features, ("features", "format"), format=kind)
