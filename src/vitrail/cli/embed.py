"""vitrail embed: images to feature vectors."""

from typing import Annotated, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.predict_flags import Images, PredictFlags
from vitrail.cli.usage_errors import check_arguments


def embed(
    model: flags.Model,
    /,
    *images: Images,
    features: Literal["class", "mean", "tokens"] | None = None,
    maps: Annotated[bool, Parameter(negative=())] = False,
    kind: Annotated[Literal["npy", "parquet"] | None, Parameter(name=("--format", "-f"))] = None,
    options: Annotated[PredictFlags | None, Parameter(name="*")] = None,
) -> None:
    """Write the features of images to a file.

    For search, clustering or your own classifier. features.npy is an array (images, width), or (images,
    tokens, width) for tokens, in float32; features.files.csv next to it has the row of each image, or the reason
    why it could not be read. A parquet file has both in its columns. Feature maps, for segmentation or detection, are
    arrays level1, level2, … (images, channels, rows, columns) in maps.npz, from the finest grid to the coarsest.

    Examples::

        vitrail embed vit_fashion photos -o features.npy
        vitrail embed vit_fashion photos -o features.parquet --features mean
        vitrail embed vit_fashion example:cat 'photos/**/*.png' -o tokens.npy --features tokens
        vitrail embed vit_fashion photos -o maps.npz --maps

    Parameters
    ----------
    features
        The class token, the mean of the patch tokens, or all tokens; each after the last norm. [default: class, or mean
        for a model whose head reads the mean]
    maps
        Write the feature maps of all levels instead, before the last norm of a ViT; OUT is an npz file.
    kind
        Format of the file. [default: by the suffix of OUT]
    """
    if maps and features is not None:
        raise ConfigError(f"--maps with --features {features}; expected one of them", ("maps",))
    check_arguments("embed", model, images)
    given = options or PredictFlags()
    how = given.make_options("maps" if maps else features or "features")

    from vitrail.opening import run_command

    given.run(run_command("embed", model, inputs=images, format=kind, options=how))
