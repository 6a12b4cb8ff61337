"""Write a model as an ONNX file with torch's exporter."""

from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.base.errors import ConfigError, describe_error, missing_package_error
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.description import OutputKind
from vitrail.export.onnx_session import silence_warnings
from vitrail.export.torch_modules import ExportModule
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import find_image_model

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # to write a file, and to compare it with torch
OPSET = 20  # the first with Gelu; few runtimes have newer ones
MAX_INLINE_WEIGHT_BYTES = 2**31 - 2**24  # the limit of a protobuf file


def check_onnx_packages() -> None:
    """Check the packages before any work."""
    for package in ONNX_PACKAGES:
        if find_spec(package) is None:
            raise missing_package_error("exporting to ONNX", package, "export")


def write_onnx(
    model: nn.Module,
    path: Path,
    preprocessing: Preprocessing,
    output: OutputKind = "logits",
    *,
    dynamic: bool = False,
    portable: bool = False,
) -> None:
    """Input `pixels`, uint8 (batch, rows, columns, channels); output named by its kind. Any batch, any size if dynamic.

    With `portable`, all operators are in the ONNX standard; otherwise attention is a faster one of ONNX Runtime.
    """
    shipped = ExportModule(model, preprocessing, output, fused=not portable)
    program = trace_to_exported_program(shipped, dynamic=dynamic)
    with silence_warnings():
        converted: Any = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=["pixels"], output_names=[output], verbose=False
        )
    graph = converted.model.graph
    for value in [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]:
        if value.name == output and value not in graph.outputs:  # named by torch, for its buffer or operator
            value.name = f"{'buffer' if value.is_initializer() else 'inner'}_{output}"
    weights = sum(each.numel() * each.element_size() for each in shipped.state_dict().values())
    converted.save(path, external_data=weights > MAX_INLINE_WEIGHT_BYTES)


def trace_to_exported_program(module: ExportModule, *, dynamic: bool) -> torch.export.ExportedProgram:
    """Export with torch.export, for any batch, and with `dynamic` for any number of patches."""
    size = pair(module.preprocessing.image_size)
    sides: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic:
        by = find_size_multiple(module.model)
        least = (-(-pixels // by) for pixels in module.model.sizes.minimum)
        rows, columns = (
            torch.export.Dim(name, min=least) for name, least in zip(("rows", "columns"), least, strict=True)
        )
        sides |= {1: by * rows, 2: by * columns} if by > 1 else {1: rows, 2: columns}
        size = (2 * by + size[0], 3 * by + size[1])  # not its own size, and not square
    pixels = torch.zeros(2, *size, module.model.config.channels, dtype=torch.uint8)
    try:
        with silence_warnings():
            return torch.export.export(module, (pixels,), dynamic_shapes=(sides,))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"torch cannot export {type(module.model).__name__}: {describe_error(error)}") from error


def find_size_multiple(model: nn.Module) -> int:
    """The image size must be a multiple of this: the pixels per token, or 1 without tokens."""
    declared = find_image_model(model)
    if declared is None or declared.sizes.multiple is None:
        raise ConfigError(f"{type(model).__name__} takes one size; expected a model with dynamic=True")
    if declared.one_size_export_reason:
        raise ConfigError(
            f"{type(model).__name__} cannot be exported for all sizes: {declared.one_size_export_reason}; expected "
            "`dynamic` false, and a model of the size that is needed"
        )
    return lcm(*declared.sizes.multiple)
