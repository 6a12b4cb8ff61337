"""Weight initialization of layers as in the ViT authors' code, shared by all models."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn

from vitrail.layers.attention import Attention, SelfAttention
from vitrail.layers.block import LayerScale, Mlp, SwiGlu
from vitrail.layers.pool import AttentionPool
from vitrail.layers.positions import RelativePositions


def init_layers(model: nn.Module) -> None:
    """Initialize every layer of the model; its own parameters (tokens, tables) and its head are left to the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            (nn.init.xavier_uniform_ if isinstance(module, nn.Linear) else lecun_normal_)(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.start)
        elif isinstance(module, RelativePositions):
            nn.init.normal_(module.offsets, std=0.02)
    for module in model.modules():  # again, for layers that initialize their linear maps differently
        if isinstance(module, Mlp | SwiGlu):
            nn.init.normal_(module.fc1.bias, std=1e-6)
            nn.init.normal_(module.fc2.bias, std=1e-6)
        elif isinstance(module, SelfAttention):
            init_stacked_linear(module.qkv, [module.qkv.out_features // 3] * 3)
        elif isinstance(module, Attention):
            init_stacked_linear(module.kv, list(module.widths))
        elif isinstance(module, AttentionPool):
            init_stacked_linear(module.kv, [module.kv.out_features // 2] * 2)
            nn.init.xavier_uniform_(module.latent.data[0])


Initialization = Literal["vit", "deit"]  # as in the code of the authors of ViT, whose head is zero, or of DeiT


def init_as_published(model: nn.Module, patch_convolution: nn.Conv2d, *tables: Tensor) -> None:
    """As DeiT's code: linear maps, also of the heads, and tables of tokens and positions small, patches as in torch."""
    init_as_deit(model, *tables)
    patch_convolution.reset_parameters()


def init_as_deit(model: nn.Module, *tables: Tensor) -> None:
    """Linear maps and the tables of tokens and positions small, as in DeiT's code; the rest as in a ViT."""
    init_layers(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    for table in tables:
        nn.init.trunc_normal_(table, std=0.02)


def draw_small(weight: Tensor) -> None:
    nn.init.trunc_normal_(weight, std=0.02)


def draw_layers(model: nn.Module, convolution: Callable[[nn.Conv2d], object]) -> None:
    """Linear maps small, with biases of zero; convolutions by this function; norms and factors as they start."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            draw_small(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            convolution(module)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.start)


def draw_small_convolution(convolution: nn.Conv2d) -> None:
    draw_small(convolution.weight)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)


def draw_scaled_convolution(convolution: nn.Conv2d) -> None:
    """A variance of 2 by the number of values that an input contributes to."""
    outputs = convolution.weight[0, 0].numel() * convolution.out_channels // convolution.groups
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / outputs))
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)


def init_small_linear(model: nn.Module) -> None:
    """Linear maps small, convolutions and norms as torch has them: Swin's code and its heirs'."""
    draw_layers(model, nn.Conv2d.reset_parameters)


def init_stacked_linear(layer: nn.Linear, parts: list[int]) -> None:
    """Initialize several maps stored in one matrix separately; as one matrix their weights would be too small."""
    for matrix in layer.weight.data.split(parts):
        nn.init.xavier_uniform_(matrix)


def init_small(model: nn.Module) -> None:
    """Linear maps and convolutions small, norms the identity, as in the code of ConvNeXt and NesT."""
    draw_layers(model, draw_small_convolution)


def init_as_pvt(model: nn.Module) -> None:
    """Linear maps small, convolutions scaled by their outputs, norms the identity, as in PVT's code and its heirs'."""
    draw_layers(model, draw_scaled_convolution)


def init_scaled_layers(model: nn.Module, blocks: Iterable[Any]) -> None:
    """As in the code of BEiT and EVA-02: the last maps of the branches are divided by √(2·number of the block)."""
    init_small(model)
    for name, weight in model.named_parameters():
        if name.endswith(".qv_bias"):
            nn.init.zeros_(weight)
    for number, block in enumerate(blocks, start=1):
        for last in (block.attn.proj, block.mlp.fc2):
            last.weight.div_(math.sqrt(2 * number))


def lecun_normal_(weight: Tensor) -> None:
    """Truncated normal with variance 1/fan-in, cut at two standard deviations."""
    std = 1 / math.sqrt(weight[0].numel()) / 0.87962566103423978  # standard deviation left by the truncation
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
