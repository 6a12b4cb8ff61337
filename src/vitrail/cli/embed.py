"""vitrail embed: images to feature vectors."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import Images, PredictFlags


def embed(
    model: flags.Model,
    /,
    *images: Images,
    features: Literal["class", "mean", "tokens"] | None = None,
    kind: Annotated[Literal["npy", "parquet"] | None, Parameter(name=("--format", "-f"))] = None,
    options: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Write the features of images to a file.

    For search, clustering or a classifier of your own. features.npy is an array (images, width), or (images,
    tokens, width) for tokens, in float32; features.files.csv next to it has the row of each image, or the reason
    why it could not be read. A parquet file has both in its columns.

    Examples::

        vitrail embed vit_fashion photos -o features.npy
        vitrail embed vit_fashion photos -o features.parquet --features mean
        vitrail embed vit_fashion example:cat 'photos/**/*.png' -o tokens.npy --features tokens

    Parameters
    ----------
    features
        The class token, the mean of the patch tokens, or all tokens; each after the last norm. [default: class, or mean
        for a model whose head reads the mean]
    kind
        Format of the file. [default: by the suffix of OUT]
    """
    (options or PredictFlags()).run_job("embed", model, images, features or "features", format=kind)
