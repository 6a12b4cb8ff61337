"""An exported folder, written whole or not at all, and checked against torch before it appears."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrail.checkpoint.checksums import tensor_checksum
from vitrail.data.photos import views
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, one_line
from vitrail.export.agreement import agreeing
from vitrail.export.exported import METADATA, MODEL, PROGRAM, Exported, Output
from vitrail.export.folder import check_place, written_whole
from vitrail.export.onnx_file import exported_program, multiple_of, write_onnx
from vitrail.export.quantise import describe, needed, quantise
from vitrail.export.session import answers, quiet
from vitrail.export.shipped import Shipped, answer, check_output
from vitrail.models.checks import pair
from vitrail.models.merging import merged

Kind = Literal["onnx", "onnx-int8", "torch-export"]
CLOSE = 1e-4  # how far an exact export's probabilities, or its features by their largest, may be from torch's
PHOTOS = 32  # views of the built-in photos that it is checked on
RANDOM = 4  # pictures of noise besides


@dataclass(frozen=True)
class Checked:
    """What the file gave beside what torch gives."""

    pictures: int
    difference: float  # the largest, of probabilities or, of features, in shares of the largest number
    same: int  # pictures with the same first class, or with features alike


def export_model(
    model: nn.Module,
    folder: str | Path,
    *,
    preprocessing: Preprocessing,
    labels: tuple[str, ...] | None = None,
    to: Kind = "onnx",
    output: Output = "logits",
    dynamic: bool = False,
    portable: bool = False,
    merge: int = 0,
    provenance: Mapping[str, Any] | None = None,
    pictures: NDArray[np.uint8] | None = None,
    overwrite: bool = False,
) -> tuple[Exported, Checked]:
    """`pictures` (B, rows, columns, C), framed for the model, are checked besides the built-in photos and noise."""
    folder = Path(folder)
    check_place(folder, overwrite=overwrite)
    if to != "torch-export":
        needed()
    check_output(model, output)
    weights = digest(model)
    model = in_float32(model)
    about = Exported(
        precision="int8" if to == "onnx-int8" else "fp32",
        output=output,
        classes=count_classes(model),
        preprocessing=preprocessing,
        labels=labels,
        multiple=multiple_of(model) if dynamic else 0,
        merge=merge,
        provenance=provenance or {},
        digest=weights,
    )
    shown = samples(preprocessing, pictures)
    lighter = merged(model, merge)
    expected = by_torch(lighter, about, shown)
    with written_whole(folder, overwrite=overwrite) as place:
        if to == "torch-export":
            checked = write_program(lighter, place, about, shown, expected, dynamic=dynamic)
        else:
            write_onnx(lighter, place / MODEL, preprocessing, output, dynamic=dynamic, portable=portable)
            checked = verified(place / MODEL, shown, expected, output, exact=True)
            if to == "onnx-int8":
                (place / MODEL).rename(place / "exact.onnx")
                quantise(place / "exact.onnx", place / MODEL, shown[:8])
                (place / "exact.onnx").unlink()
                checked = verified(place / MODEL, shown, expected, output, exact=False)
                about = replace(about, agreement={"pictures": checked.pictures, "same": checked.same})
            describe(place, about)
    return about, checked


def in_float32(model: nn.Module) -> nn.Module:
    """On the CPU; what is there already is not copied."""
    tensors = (*model.parameters(), *model.buffers())
    if all(each.device.type == "cpu" and each.dtype in (torch.float32, torch.int64) for each in tensors):
        return model.eval()
    return deepcopy(model).cpu().float().eval()


def samples(preprocessing: Preprocessing, pictures: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Real pictures first, then noise: (B, rows, columns, C)."""
    size, channels = pair(preprocessing.image_size), len(preprocessing.mean)
    noise = np.random.default_rng(0).integers(0, 256, (RANDOM, *size, channels), dtype=np.uint8)
    given = [] if pictures is None or not len(pictures) else [pictures]
    return np.concatenate([*given, views(PHOTOS, preprocessing), noise])


def verified(
    path: Path, shown: NDArray[np.uint8], expected: NDArray[np.float32], output: Output, *, exact: bool
) -> Checked:
    try:
        found = answers(path, shown)
    except Exception as error:
        raise CheckpointError(f"what was exported cannot be run: {one_line(error)}") from error
    return compared(found, expected, output, exact=exact)


def by_torch(model: nn.Module, about: Exported, shown: NDArray[np.uint8]) -> NDArray[np.float32]:
    """As an engine of torch's answers."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (about.preprocessing.mean, about.preprocessing.std))
    with torch.inference_mode():
        images = ((torch.from_numpy(each[None]).permute(0, 3, 1, 2) / 255 - mean) / std for each in shown)
        return torch.cat([answer(model, each, about.output).float() for each in images]).numpy()


def compared(found: NDArray[np.float32], expected: NDArray[np.float32], output: Output, *, exact: bool) -> Checked:
    if output == "logits":
        a, b = (torch.from_numpy(each).softmax(-1) for each in (found, expected))
        difference = float((a - b).abs().max())
    else:
        difference = float(np.abs(found - expected).max() / (np.abs(expected).max() + 1e-12))
    if not np.isfinite(difference):
        raise CheckpointError("the model answers NaN; expected finite weights: load them again, or in float32")
    if exact and difference > CLOSE:
        raise CheckpointError(f"what was exported differs from torch by {difference:.2g}; expected at most {CLOSE:g}")
    return Checked(len(found), difference, agreeing(found, expected, output))


def write_program(
    model: nn.Module,
    place: Path,
    about: Exported,
    shown: NDArray[np.uint8],
    expected: NDArray[np.float32],
    *,
    dynamic: bool,
) -> Checked:
    """For torch.export.load, which needs torch and nothing of vitrail."""
    program = exported_program(Shipped(model, about.preprocessing, about.output, fused=False), dynamic=dynamic)
    file = BytesIO()  # by way of memory: on a full disk torch's own writing ends the process
    with quiet():
        torch.export.save(program, file, extra_files={METADATA: about.to_json()})
        (place / PROGRAM).write_bytes(file.getbuffer())
        about.write(place)
        module = torch.export.load(place / PROGRAM).module()
    with torch.inference_mode():
        found = torch.cat([module(torch.from_numpy(each[None])) for each in shown]).numpy()
    return compared(found, expected, about.output, exact=True)


def digest(model: nn.Module) -> str:
    """Of the weights, by name and value."""
    return tensor_checksum(model.state_dict())[:32]


def count_classes(model: Any) -> int:
    return model.config.classes
