"""Export a model to a folder, compared with torch before it appears."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrail.base.errors import CheckpointError, ConfigError, describe_error, unknown_name_error
from vitrail.base.progress import track_progress
from vitrail.checkpoint.checksums import checksum_tensors
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.agreement import NOT_FINITE_MESSAGE, count_agreeing_images, make_photo_crops
from vitrail.export.atomic_folder import check_target_folder, write_folder_atomically
from vitrail.export.description import METADATA_KEY, ONNX_FILE, TORCH_PROGRAM_FILE, ExportDescription, OutputKind
from vitrail.export.onnx_file import check_onnx_packages, find_size_multiple, trace_to_exported_program, write_onnx
from vitrail.export.onnx_session import run_onnx_file, silence_warnings
from vitrail.export.quantize import quantize_onnx_file, write_description_and_onnx_metadata
from vitrail.export.torch_modules import (
    ExportModule,
    check_output_available,
    compute_logits_or_features,
    make_channel_tensors,
    normalize_uint8_batch,
)
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import check_reads_images, find_image_model
from vitrail.models.parts.token_merging import add_token_merging

ExportFormat = Literal["onnx", "onnx-int8", "torch-export"]
EXPORT_STAGES = {"onnx": 3, "onnx-int8": 4, "torch-export": 2}  # torch's outputs, then what is written and compared
MAX_DIFFERENCE = 1e-4  # from torch, of the probabilities of an exact export, or of features relative to the largest
PHOTO_COUNT = 32  # views of the built-in photos to compare on
NOISE_COUNT = 4  # images of noise to compare on


@dataclass(frozen=True)
class ExportCheck:
    """The outputs of the file compared with those of torch."""

    images: int
    difference: float  # the largest, of probabilities, or of features relative to the largest
    same: int  # images with the same top class, or with similar features


def export_model(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocessing: Preprocessing,
    labels: tuple[str, ...] | None = None,
    to: ExportFormat = "onnx",
    output: OutputKind = "logits",
    dynamic: bool = False,
    portable: bool = False,
    merge: int = 0,
    provenance: Mapping[str, Any] | None = None,
    images: NDArray[np.uint8] | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int], object] | None = None,
) -> tuple[ExportDescription, ExportCheck]:
    """Export a model. It is compared with torch on built-in photos, noise and `images` (B, rows, columns, C).

    By default a progress bar is shown in a notebook and on a terminal; a function is called after each stage with 1.

    >>> loaded = vitrail.open_model("vit_fashion")
    >>> about, check = vitrail.export_model(
    ...     loaded.model, "shipped", preprocessing=loaded.preprocessing, labels=loaded.labels
    ... )
    >>> check.difference < 1e-4
    True
    >>> vitrail.Predictor("shipped").predict("example:cat").top[0].index < 10  # runs without torch
    True
    """
    check_export_arguments(model, folder, preprocessing, to)
    folder = Path(folder)
    check_target_folder(folder, overwrite=overwrite)
    if to != "torch-export":
        check_onnx_packages()
    check_output_available(model, output)
    weights = compute_weights_digest(model)
    model = convert_to_float32(model)
    config: Any = model.config
    about = ExportDescription(
        precision="int8" if to == "onnx-int8" else "fp32",
        output=output,
        classes=config.classes,
        preprocessing=preprocessing,
        labels=labels,
        multiple=find_size_multiple(model) if dynamic else 0,
        merge=merge,
        provenance=provenance or {},
        digest=weights,
    )
    shown = make_check_images(preprocessing, images)
    lighter = add_token_merging(model, merge)
    with (
        track_progress(progress, EXPORT_STAGES[to], "exporting") as advance,
        write_folder_atomically(folder, overwrite=overwrite) as place,
    ):
        expected = compute_torch_outputs(lighter, about, shown)
        advance(1)
        if to == "torch-export":
            checked = write_and_check_torch_program(lighter, place, about, shown, expected, dynamic=dynamic)
        else:
            write_onnx(lighter, place / ONNX_FILE, preprocessing, output, dynamic=dynamic, portable=portable)
            advance(1)
            checked = compare_onnx_file_with_torch(place / ONNX_FILE, shown, expected, output, exact=True)
            if to == "onnx-int8":
                advance(1)
                (place / ONNX_FILE).rename(place / "exact.onnx")
                quantize_onnx_file(place / "exact.onnx", place / ONNX_FILE, shown[:8])
                (place / "exact.onnx").unlink()
                checked = compare_onnx_file_with_torch(place / ONNX_FILE, shown, expected, output, exact=False)
                about = replace(about, agreement={"pictures": checked.images, "same": checked.same})
            write_description_and_onnx_metadata(place, about)
        advance(1)
    return about, checked


def check_export_arguments(model: object, folder: object, preprocessing: object, to: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}; expected a module: vitrail.open_model(name).model")
    check_reads_images(model)
    declared = find_image_model(model)
    if declared is not None and declared.no_export_reason:
        raise ConfigError(f"this {type(declared).__name__} cannot be exported: {declared.no_export_reason}")
    if not isinstance(folder, str | Path):
        raise ConfigError(f"the folder is {folder!r}; expected a string or a Path")
    if not isinstance(preprocessing, Preprocessing):
        raise ConfigError(f"`preprocessing` is {preprocessing!r}; expected vitrail.Preprocessing(…)")
    if to not in get_args(ExportFormat):
        raise unknown_name_error("export format", to, get_args(ExportFormat))


def convert_to_float32(model: nn.Module) -> nn.Module:
    """The model in float32 on the CPU, copied only if it is not there yet."""
    tensors = (*model.parameters(), *model.buffers())
    if all(each.device.type == "cpu" and each.dtype in (torch.float32, torch.int64) for each in tensors):
        return model.eval()
    return deepcopy(model).cpu().float().eval()


def make_check_images(preprocessing: Preprocessing, images: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Photos first, then noise: (B, rows, columns, C)."""
    size, channels = pair(preprocessing.image_size), len(preprocessing.mean)
    noise = np.random.default_rng(0).integers(0, 256, (NOISE_COUNT, *size, channels), dtype=np.uint8)
    given = [] if images is None or not len(images) else [images]
    return np.concatenate([*given, make_photo_crops(PHOTO_COUNT, preprocessing), noise])


def compare_onnx_file_with_torch(
    path: Path, pixels: NDArray[np.uint8], expected: NDArray[np.float32], output: OutputKind, *, exact: bool
) -> ExportCheck:
    try:
        found = run_onnx_file(path, pixels)
    except Exception as error:
        raise CheckpointError(f"the exported file cannot be run: {describe_error(error)}") from error
    return compare_outputs(found, expected, output, exact=exact)


def compute_torch_outputs(model: nn.Module, about: ExportDescription, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The outputs of the model, image by image."""
    mean, std = make_channel_tensors(about.preprocessing)
    with torch.inference_mode():
        images = (normalize_uint8_batch(each[None], mean, std) for each in pixels)
        return torch.cat([compute_logits_or_features(model, each, about.output).float() for each in images]).numpy()


def compare_outputs(
    found: NDArray[np.float32], expected: NDArray[np.float32], output: OutputKind, *, exact: bool
) -> ExportCheck:
    if output == "logits":
        a, b = (torch.from_numpy(each).softmax(-1) for each in (found, expected))
        difference = float((a - b).abs().max())
    else:
        difference = float(np.abs(found - expected).max() / (np.abs(expected).max() + 1e-12))
    if not np.isfinite(difference):
        raise CheckpointError(NOT_FINITE_MESSAGE)
    if exact and difference > MAX_DIFFERENCE:
        raise CheckpointError(
            f"the exported file differs from torch by {difference:.2g}; expected at most {MAX_DIFFERENCE:g}"
        )
    return ExportCheck(len(found), difference, count_agreeing_images(found, expected, output))


def write_and_check_torch_program(
    model: nn.Module,
    place: Path,
    about: ExportDescription,
    pixels: NDArray[np.uint8],
    expected: NDArray[np.float32],
    *,
    dynamic: bool,
) -> ExportCheck:
    """Write a program for torch.export.load, which needs torch but not vitrail."""
    program = trace_to_exported_program(
        ExportModule(model, about.preprocessing, about.output, fused=False), dynamic=dynamic
    )
    file = BytesIO()  # through memory: on a full disk, writing by torch ends the process
    with silence_warnings():
        torch.export.save(program, file, extra_files={METADATA_KEY: about.to_json()})
        (place / TORCH_PROGRAM_FILE).write_bytes(file.getbuffer())
        about.write(place)
        module = torch.export.load(place / TORCH_PROGRAM_FILE).module()
    with torch.inference_mode():
        found = torch.cat([module(torch.from_numpy(each[None])) for each in pixels]).numpy()
    return compare_outputs(found, expected, about.output, exact=True)


def compute_weights_digest(model: nn.Module) -> str:
    """A digest of the names and values of the weights."""
    return checksum_tensors(model.state_dict())[:32]
