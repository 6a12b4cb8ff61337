"""Options that several commands share, each with its help text: how a model is opened, where it runs, what is written.

A command uses them as types: def eval(checkpoint: flags.Model, /, *, fields: flags.ConfigFields = None) -> None.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options.values import (
    MAX_BATCH,
    MAX_PROCESSES,
    at_most,
    check_data_exists,
    check_minimum,
    check_model_exists,
    check_preset_exists,
)
from vitrail.cli.output.help_text import DATA, MODEL, SPEED

TORCH_MODEL_HELP = "Name of a model (`vitrail models`), run folder, checkpoint of any layout, or hf-hub:OWNER/NAME."
MODEL_HELP = TORCH_MODEL_HELP.replace(", or", ", exported folder or .onnx file, or")
DATA_HELP = (
    "Folder (val/CLASS/*.jpg or CLASS/*.jpg, CIFAR-10 or -100, MNIST files, ImageNet), a public data set by name "
    "(`vitrail data`), or 'fashion', which is bundled. [default: the data of the training]"
)
IMAGE_DATA_HELP = (
    "Folder of images, or any data that `vitrail eval` takes. [default: the data of the training, else example photos]"
)
SET_HELP = (
    "Set a config field that the checkpoint does not specify: heads=3, or trained_size=32x128, the image size that its "
    "positions were trained for. May be repeated."
)
PREPROCESSING_HELP = "Change a field of the preprocessing: crop=0.875 or mean=[0.485,0.456,0.406]. May be repeated."
LABELS_HELP = "Text file with the class names, one per line, or imagenet. [default: the model's own]"
IMAGE_SIZE_HELP = (
    "Resample the positions to another image size: 384, or rows x columns: 384x256. [default: the model's own]"
)
TRUST_CODE_HELP = (
    "Code that a run, a checkpoint or a recipe may import: FILE.py:NAME or MODULE:NAME for your own model, for "
    "`distill` also timm:NAME for a teacher from timm. May be repeated."
)

Model = Annotated[str, Parameter(name="MODEL", help=MODEL_HELP, validator=check_model_exists)]
TorchModel = Annotated[str, Parameter(name="MODEL", help=TORCH_MODEL_HELP, validator=check_model_exists)]
OptionalModel = Annotated[str | None, Parameter(name="MODEL", help=TORCH_MODEL_HELP, validator=check_model_exists)]
Models = Annotated[str, Parameter(required=True, validator=check_model_exists)]  # each command says which
TextModel = Annotated[str, Parameter(name="MODEL", validator=check_model_exists)]
StartModel = Annotated[str | None, Parameter(validator=check_model_exists)]
Preset = Annotated[str | None, Parameter(validator=check_preset_exists)]
ConfigFields = Annotated[list[str] | None, Parameter(name="--set", negative=(), group=MODEL, help=SET_HELP)]
PreprocessingFields = Annotated[list[str] | None, Parameter(negative=(), group=MODEL, help=PREPROCESSING_HELP)]
Labels = Annotated[Path | None, Parameter(help=LABELS_HELP)]
ImageSize = Annotated[str | None, Parameter(group=MODEL, help=IMAGE_SIZE_HELP)]
Data = Annotated[str | None, Parameter(help=DATA_HELP, validator=check_data_exists)]
ImageData = Annotated[str | None, Parameter(help=IMAGE_DATA_HELP, validator=check_data_exists)]
ImageCount = Annotated[int, Parameter(name="--images", help="Number of images, evenly spaced over the data.")]
Device = Annotated[str, Parameter(group=SPEED, help="Device: auto, cpu, cuda, cuda:1 or mps.")]
Batch = Annotated[int, Parameter(group=SPEED, validator=at_most(MAX_BATCH), help="Images per batch.")]
Workers = Annotated[
    int,
    Parameter(
        group=SPEED,
        validator=at_most(MAX_PROCESSES),
        help="Processes that load images; 0 loads them in the main process.",
    ),
]
Strict = Annotated[bool, Parameter(negative=(), group=DATA, help="Stop at an unreadable image instead of skipping it.")]
RealLabels = Annotated[
    Path | None, Parameter(group=DATA, help="JSON file with the ReaL labels of ImageNet's validation images.")
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON only.")]
Out = Annotated[Path, Parameter(name=("--out", "-o"))]  # each command says what is written there
OptionalOut = Annotated[Path | None, Parameter(name=("--out", "-o"))]
Overwrite = Annotated[bool, Parameter(negative=(), help="Replace existing files.")]
Svg = Annotated[bool, Parameter(negative=(), help="Write SVG files as well.")]
Arrays = Annotated[bool, Parameter(negative=(), help="Write the numbers as well, as .npz files for NumPy.")]
TrustCode = Annotated[list[str] | None, Parameter(negative=(), group=MODEL, help=TRUST_CODE_HELP)]


def accept_trusted_code(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --trust-code, which holds for every model that it opens."""

    @wraps(command)
    def run(*arguments: Any, trust_code: TrustCode = None, **options: Any) -> None:
        if trust_code is None:
            return command(*arguments, **options)
        from vitrail.models.catalog.external_families import trust

        with trust(trust_code):
            return command(*arguments, **options)

    given = inspect.signature(command)
    added = inspect.Parameter("trust_code", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TrustCode)
    run.__annotations__ = {**command.__annotations__, "trust_code": TrustCode}
    vars(run)["__signature__"] = given.replace(parameters=[*given.parameters.values(), added])
    return run


ENGINE_HELP = (
    "Engine: eager, compiled and bfloat16 run in torch, onnx and int8 are exported; auto measures once and uses the "
    "fastest."
)
EXACT_HELP = "Allow only engines within 0.0001 of the model in float32, and decode images at full size."
FAST_HELP = "Allow int8 and bfloat16, too, if they agree on a sample of the images."
EngineName = Literal["auto", "eager", "compiled", "bfloat16", "onnx", "int8"]


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    engine: Annotated[EngineName, Parameter(group=SPEED, help=ENGINE_HELP)] = "auto"
    exact: Annotated[bool, Parameter(negative=(), group=SPEED, help=EXACT_HELP)] = False
    fast: Annotated[bool, Parameter(negative=(), group=SPEED, help=FAST_HELP)] = False
    batch: Annotated[int | None, Parameter(group=SPEED, help="Images per batch. [default: automatic]")] = None
    streams: Annotated[int | None, Parameter(group=SPEED, help="Batches at the same time. [default: automatic]")] = None
    threads: Annotated[int | None, Parameter(group=SPEED, help="Threads per stream. [default: automatic]")] = None

    def list_given(self) -> dict[str, Any]:
        """The options that were given, by name, checked."""
        given = {each.name: vars(self)[each.name] for each in fields(EngineFlags)}
        given = {name: each for name, each in given.items() if each not in (None, "auto") and each is not False}
        for name in given.keys() & {"batch", "streams", "threads"}:
            check_minimum(f"--{name}", given[name], 1)
        return given


GivenEngine = Annotated[EngineFlags | None, Parameter(name="*")]
