"""Options that several commands share, each with its help text: how a model is opened, where it runs, what is written.

A command uses them as types: def eval(checkpoint: flags.Model, /, *, fields: flags.ConfigFields = None) -> None.
"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Model = Annotated[
    str,
    Parameter(
        help="Name of a model (`vitrail models`), run folder, checkpoint of any layout, exported folder or .onnx file, "
        "or hf-hub:OWNER/NAME."
    ),
]
TorchModel = Annotated[
    str,
    Parameter(help="Name of a model (`vitrail models`), run folder, checkpoint of any layout, or hf-hub:OWNER/NAME."),
]
ConfigFields = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        negative=(),
        help="Set a config field that the checkpoint does not specify, as FIELD=VALUE: heads=3. May be repeated. "
        "trained_size=32x128 is the image size that its positions were trained for.",
    ),
]
PreprocessingFields = Annotated[
    list[str] | None,
    Parameter(
        name="--preprocessing",
        negative=(),
        help="Change a field of the preprocessing, as FIELD=VALUE: crop=0.875 or mean=[0.485,0.456,0.406]. "
        "May be repeated.",
    ),
]
Labels = Annotated[Path | None, Parameter(help="Text file with the class names, one per line.")]
ImageSize = Annotated[
    str | None, Parameter(help="Resample the positions to another image size: 384, or rows x columns: 384x256.")
]
Data = Annotated[
    str | None,
    Parameter(
        help="fashion (bundled), or a folder: val/CLASS/*.jpg or CLASS/*.jpg, CIFAR-10 or -100, MNIST files, ImageNet. "
        "[default: the data of the run]"
    ),
]
ImageData = Annotated[
    str | None,
    Parameter(
        help="Images: a folder, with or without classes, or what `vitrail eval` takes. [default: those of the run]"
    ),
]
ImageCount = Annotated[int, Parameter(name="--images", help="Number of images, evenly spaced over the data.")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1 or mps.")]
Batch = Annotated[int, Parameter(help="Images per batch.")]
Workers = Annotated[int, Parameter(help="Processes that load images; 0 loads them in the main process.")]
Strict = Annotated[bool, Parameter(negative=(), help="Stop at an unreadable image instead of skipping it.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON only.")]
Out = Annotated[Path, Parameter(name=("--out", "-o"))]  # each command says what is written there
OptionalOut = Annotated[Path | None, Parameter(name=("--out", "-o"))]
Overwrite = Annotated[bool, Parameter(negative=(), help="Replace OUT if it exists.")]
Svg = Annotated[bool, Parameter(negative=(), help="Write SVG files as well.")]
Arrays = Annotated[bool, Parameter(negative=(), help="Write the numbers as well, as .npz files for numpy.")]
