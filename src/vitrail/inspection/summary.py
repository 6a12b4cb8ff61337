"""Summary of a model: output shape, parameters and MACs of every layer.

A copy of the model runs once on the meta device, where nothing is computed, so any size takes a moment.
"""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.base.errors import ConfigError
from vitrail.base.text import format_table
from vitrail.models.base.checks import check_count, find_image_config, pair
from vitrail.models.base.contract import ImageModel, check_reads_images, unwrap_compiled

FLOAT_BYTES = 4
BARE_PARAMETER = "parameter"  # the kind of a row that is not a layer


@dataclass(frozen=True)
class LayerRow:
    """A layer, or a bare parameter: one that a module with child modules holds itself."""

    path: str
    kind: str
    shape: tuple[int, ...]  # of the output, or of the bare parameter
    parameters: int  # including child modules
    macs: int


@dataclass(frozen=True)
class ModelSummary:
    """Result of `summarize`; `str()` formats it as a table."""

    model: str
    config: dict[str, Any]
    input: tuple[int, ...]
    rows: tuple[LayerRow, ...]
    parameters: int
    bare: int  # of these, in no layer: class token, position table, …
    trainable: int
    macs: int  # of convolutions, matrix products and attention, for all tokens of all blocks
    activations: int  # bytes of all layers' outputs, which training keeps for the backward pass

    def __str__(self) -> str:
        weights = FLOAT_BYTES * self.parameters
        return "\n".join(
            (
                f"{self.model}, input {format_shape(self.input)}",
                fill(", ".join(f"{name}={value}" for name, value in self.config.items()), width=100),
                "",
                *format_layer_table(self.rows),
                "",
                f"parameters   {self.parameters:>15,}  {self.parameters - self.bare:,} in layers, {self.bare:,} bare",
                f"trainable    {self.trainable:>15,}",
                f"GMACs        {self.macs / 1e9:>15,.4f}  convolutions, matrix products and attention, for all tokens",
                f"weights      {format_megabytes(weights):>15}  float32",
                f"activations  {format_megabytes(self.activations):>15}  outputs of all layers",
                f"training     {format_megabytes(4 * weights + self.activations):>15}  "
                "estimate: weights, gradients, AdamW's two moments, activations",
            )
        )


def summarize(model: nn.Module, *, batch: int = 1, depth: int = 2) -> ModelSummary:
    """Summarize a model of any family, with layers down to `depth` levels.

    >>> summary = vitrail.summarize(vitrail.create("ViT-Ti/16"))  # print it for the table
    >>> summary.parameters
    5717416
    """
    check_count("batch", batch)
    check_count("depth", depth)
    check_reads_images(model)
    config = find_image_config(model)
    if config is None or not is_dataclass(config):
        raise ConfigError(f"{type(model).__name__} has no config; expected a model as built by `vitrail.create`")
    twin = copy_to_meta(model)
    shape = (batch, config.channels, *pair(config.image_size))
    trace = ForwardTrace(twin, torch.empty(shape, device="meta"))
    parameters, rows = list(twin.parameters()), list(list_layer_rows(twin, trace))
    return ModelSummary(
        model=type(twin).__name__,
        config=asdict(config),
        input=shape,
        rows=tuple(row for row in rows if row.path.count(".") < depth),
        parameters=sum(parameter.numel() for parameter in parameters),
        bare=sum(row.parameters for row in rows if row.kind == BARE_PARAMETER),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        macs=trace.total_macs,
        activations=FLOAT_BYTES * trace.activation_count,
    )


def copy_to_meta(model: nn.Module) -> Any:
    """Copy a model to the meta device: its layers and which of them are trained, without memory."""
    model = unwrap_compiled(model)
    tensors = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        tensors[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, tensors)  # what is in deepcopy's memo is not copied


class ForwardTrace:
    """Trace of one forward pass: output shape and MACs of every layer, and the size of all outputs."""

    def __init__(self, twin: Any, images: Tensor) -> None:
        self.shapes: dict[nn.Module, tuple[int, ...]] = {}
        self.macs: dict[nn.Module, int] = {}
        self.activation_count = 0
        for module in twin.modules():
            module.register_forward_pre_hook(self.before_forward)
            module.register_forward_hook(self.after_forward)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.eval()  # one image has no statistics for a map of one place
        for _, head in twin.classifiers if isinstance(twin, ImageModel) else ():
            twin.get_submodule(head).eval()  # nor for its pooled features
        with FlopCounterMode(display=False) as self.counter, torch.no_grad():
            if (
                isinstance(twin, ImageModel) and not twin.no_tokens_reason
            ):  # forward() skips tokens that the head does not read in the last block
                twin.logits(twin.tokens(images))
            else:
                twin(images)
        self.total_macs = self.counter.get_total_flops() // 2

    def before_forward(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        self.macs[module] = self.macs.get(module, 0) - self.counter.get_total_flops() // 2

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.macs[module] += self.counter.get_total_flops() // 2
        if isinstance(output, Tensor) and output is not inputs[0]:  # not an identity or an inactive dropout
            self.shapes[module] = tuple(output.shape)
            self.activation_count += 0 if has_children(module) else output.numel()


def list_layer_rows(twin: nn.Module, trace: ForwardTrace) -> Iterator[LayerRow]:
    """Rows in the order of named_modules, each module's bare parameters before its layers."""
    for path, module in twin.named_modules():
        inside = sum(parameter.numel() for parameter in module.parameters())
        if path and (module in trace.shapes or inside):
            macs = trace.macs.get(module, sum(trace.macs.get(child, 0) for child in module.children()))
            yield LayerRow(path, type(module).__name__, trace.shapes.get(module, ()), inside, macs)
        if has_children(module):  # leaf modules alone would miss these parameters
            for name, parameter in module.named_parameters(recurse=False):
                yield LayerRow(
                    f"{path}.{name}".lstrip("."), BARE_PARAMETER, tuple(parameter.shape), parameter.numel(), 0
                )


def has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def format_layer_table(layers: tuple[LayerRow, ...]) -> list[str]:
    heading = ("layer", "type", "output shape", "parameters", "MMACs")
    lines = [
        (
            row.path,
            row.kind,
            format_shape(row.shape),
            f"{row.parameters:,}",
            f"{row.macs / 1e6:,.1f}" if row.macs else "",
        )
        for row in layers
    ]
    return format_table(heading, lines, "lllrr")


def format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(size) for size in shape)


def format_megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
