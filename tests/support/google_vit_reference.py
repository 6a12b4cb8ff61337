"""Google's JAX ViTs (vit_jax, big_vision) in plain NumPy: random files and their outputs, as a reference for tests.

B batch, n patches, N tokens, D width, H heads, K = D/H, C channels, O outputs.
"""

from math import ceil, prod, sqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Weights = dict[str, Array]
Random = np.random.Generator
Layout = Literal["original", "optimizer", "big_vision", "two_tower"]
Pool = Literal["token", "gap", "map"]

PREFIXES = {"original": "", "optimizer": "opt/target/", "big_vision": "params/", "two_tower": "params/img/"}
# norm, attention, norm, MLP: Flax numbered the parts of a block consecutively, Linen numbers them by type
PRE_LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")

NORM_EPS = 1e-6  # of layer and group norms
GROUPS = 32
STD_CONV_EPS = 1e-5  # added to the standard deviation, not to the variance
ROOT_WIDTH = 64


def random_weights(
    *,
    layout: Layout,
    scan: bool = False,
    pool: Pool = "token",
    pre_logits: bool = False,
    head: bool = True,
    stages: tuple[int, ...] | None = None,
    width: int = 32,
    heads: int = 4,
    mlp: int = 64,
    depth: int = 2,
    patch: int = 8,
    image: tuple[int, int] = (32, 32),
    classes: int = 5,
    seed: int = 0,
) -> Weights:
    """Random weights with the keys, shapes and dtype of a layout. After a ResNet, `patch` refers to its features."""
    modern = layout in ("big_vision", "two_tower")
    if (modern and stages is not None) or (not modern and (scan or pool == "map")):
        raise ValueError("a ResNet is found in the older layouts alone, scan and map in big_vision's alone")

    rng = np.random.default_rng(seed)
    channels, stride = 3, 1
    weights: Weights = {}
    if stages is not None:
        weights |= random_resnet(rng, stages)
        channels, stride = resnet_width(len(stages)), 4 * 2 ** max(len(stages) - 1, 0)
    weights |= add_name_prefix("embedding", random_dense(rng, (patch, patch, channels), (width,)))

    positions = prod(ceil(pixels / stride) // patch for pixels in image)
    if pool == "token":
        weights["cls"] = normal(rng, (1, 1, width))
        positions += 0 if modern else 1  # big_vision has no row for the class token
    name = "pos_embedding" if modern else "Transformer/posembed_input/pos_embedding"
    weights[name] = normal(rng, (1, positions, width))

    layers = [random_block(rng, LINEN if modern else PRE_LINEN, width, heads, mlp) for _ in range(depth)]
    if scan:
        stacked = {key: np.stack([layer[key] for layer in layers]) for key in layers[0]}  # (depth, ...)
        weights |= add_name_prefix("Transformer/encoderblock", stacked)
    else:
        for index, layer in enumerate(layers):
            weights |= add_name_prefix(f"Transformer/encoderblock_{index}", layer)
    weights |= add_name_prefix("Transformer/encoder_norm", random_norm(rng, (width,)))

    if pool == "map":
        weights |= add_name_prefix("MAPHead_0", random_map_head(rng, width, heads, mlp))
    if pre_logits:
        weights |= add_name_prefix("pre_logits", random_dense(rng, (width,), (width,)))
    if head:
        weights |= add_name_prefix("head", random_dense(rng, (width,), (classes,)))

    weights = {PREFIXES[layout] + key: value for key, value in weights.items()}
    if layout == "two_tower":
        weights |= random_text_tower(rng, width, classes)
    return weights


def normal(rng: Random, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> Array:
    return (mean + std * rng.standard_normal(shape)).astype(np.float32)


def add_name_prefix(name: str, weights: Weights) -> Weights:
    """Move the weights one level down, below `name`."""
    return {f"{name}/{key}": value for key, value in weights.items()}


def random_dense(rng: Random, inputs: tuple[int, ...], outputs: tuple[int, ...], gain: float = 1.0) -> Weights:
    """Kernel (*inputs, *outputs) that keeps the scale of its input, times `gain`."""
    kernel = normal(rng, inputs + outputs, std=gain / sqrt(prod(inputs)))
    return {"kernel": kernel, "bias": normal(rng, outputs, std=0.3)}


def random_norm(rng: Random, shape: tuple[int, ...]) -> Weights:
    return {"scale": normal(rng, shape, std=0.3, mean=1.0), "bias": normal(rng, shape, std=0.3)}


def random_attention(rng: Random, width: int, heads: int) -> Weights:
    """Queries and keys have a gain, for attention that is far from uniform."""
    split = (heads, width // heads)
    weights: Weights = {}
    for name, gain in (("query", 1.5), ("key", 1.5), ("value", 1.0)):
        weights |= add_name_prefix(name, random_dense(rng, (width,), split, gain))  # (D, H, K), (H, K)
    return weights | add_name_prefix("out", random_dense(rng, split, (width,)))  # (H, K, D), (D,)


def random_mlp(rng: Random, width: int, mlp: int) -> Weights:
    first = add_name_prefix("Dense_0", random_dense(rng, (width,), (mlp,), gain=1.5))
    return first | add_name_prefix("Dense_1", random_dense(rng, (mlp,), (width,)))


def random_block(rng: Random, names: tuple[str, ...], width: int, heads: int, mlp: int) -> Weights:
    norm1, attend, norm2, feed = names
    weights = add_name_prefix(norm1, random_norm(rng, (width,))) | add_name_prefix(
        attend, random_attention(rng, width, heads)
    )
    return (
        weights
        | add_name_prefix(norm2, random_norm(rng, (width,)))
        | add_name_prefix(feed, random_mlp(rng, width, mlp))
    )


def random_map_head(rng: Random, width: int, heads: int, mlp: int) -> Weights:
    weights: Weights = {"probe": normal(rng, (1, 1, width))}
    weights |= add_name_prefix("MultiHeadDotProductAttention_0", random_attention(rng, width, heads))
    return (
        weights
        | add_name_prefix("LayerNorm_0", random_norm(rng, (width,)))
        | add_name_prefix("MlpBlock_0", random_mlp(rng, width, mlp))
    )


def random_text_tower(rng: Random, width: int, classes: int) -> Weights:
    """A part of the text tower in such a file, which readers of the image tower ignore."""
    text: Weights = {"Embed_0/embedding": normal(rng, (11, width)), "pos_embedding": normal(rng, (1, 7, width))}
    text |= add_name_prefix("head", random_dense(rng, (width,), (classes,)))
    return add_name_prefix("params", add_name_prefix("txt", text) | {"t": normal(rng, (1,)), "b": normal(rng, (1,))})


def random_resnet(rng: Random, stages: tuple[int, ...]) -> Weights:
    weights = {"conv_root/kernel": random_kernel(rng, 7, 3, ROOT_WIDTH)}
    weights |= add_name_prefix("gn_root", random_norm(rng, (1, 1, 1, ROOT_WIDTH)))
    for stage, units in enumerate(stages, 1):
        for unit in range(1, units + 1):
            entering = resnet_width(stage - 1 if unit == 1 else stage)
            weights |= add_name_prefix(
                f"block{stage}/unit{unit}", random_unit(rng, entering, resnet_width(stage), unit == 1)
            )
    return weights


def random_unit(rng: Random, entering: int, leaving: int, project: bool) -> Weights:
    inner = leaving // 4
    shapes = {"1": (1, entering, inner), "2": (3, inner, inner), "3": (1, inner, leaving)}
    shapes |= {"_proj": (1, entering, leaving)} if project else {}
    weights: Weights = {}
    for name, (size, inputs, outputs) in shapes.items():
        weights[f"conv{name}/kernel"] = random_kernel(rng, size, inputs, outputs)
        weights |= add_name_prefix(f"gn{name}", random_norm(rng, (1, 1, 1, outputs)))
    return weights


def random_kernel(rng: Random, size: int, inputs: int, outputs: int) -> Array:
    """Each output has its own mean and spread, which weight standardization removes."""
    spread = rng.uniform(0.02, 0.1, outputs)
    mean = 0.05 * rng.standard_normal(outputs)
    return (mean + spread * rng.standard_normal((size, size, inputs, outputs))).astype(np.float32)


def resnet_width(stage: int) -> int:
    """Channels after a stage, counted from 1; 0 is the root."""
    return ROOT_WIDTH if stage == 0 else 4 * ROOT_WIDTH * 2 ** (stage - 1)


def forward(weights: Weights, images: Array) -> Array:
    """Logits (B, classes) of images (B, H, W, 3); without a head, the features (B, D) before it."""
    weights = strip_layout_prefix(weights)
    x = pool_tokens(weights, encode_images(weights, images))  # (B, D)
    if "pre_logits/kernel" in weights:
        x = np.tanh(dense(select_below(weights, "pre_logits"), x))
    if "head/kernel" in weights:
        x = dense(select_below(weights, "head"), x)
    return x.astype(np.float32)


def tokens(weights: Weights, images: Array) -> Array:
    """All tokens after the final norm, the class token (if any) first: (B, H, W, 3) → (B, N, D)."""
    return encode_images(strip_layout_prefix(weights), images).astype(np.float32)


def strip_layout_prefix(weights: Weights) -> Weights:
    """The image model's weights without the layout's prefix, in double precision."""
    for prefix in PREFIXES.values():
        if f"{prefix}embedding/kernel" in weights:
            mine = {key: value for key, value in weights.items() if key.startswith(prefix)}
            return {key.removeprefix(prefix): value.astype(np.float64) for key, value in mine.items()}
    raise KeyError("no embedding/kernel under any known prefix")


def select_below(weights: Weights, name: str) -> Weights:
    """Weights below `name`."""
    return {key.removeprefix(f"{name}/"): value for key, value in weights.items() if key.startswith(f"{name}/")}


def encode_images(weights: Weights, images: Array) -> Array:
    x = embed_patches(weights, images.astype(np.float64))
    for layer in list_layers(select_below(weights, "Transformer")):
        x = block(layer, x)
    return layer_norm(select_below(weights, "Transformer/encoder_norm"), x)


def embed_patches(weights: Weights, images: Array) -> Array:
    """Patches, class token and positions: (B, H, W, 3) → (B, N, D)."""
    x = resnet(weights, images) if "conv_root/kernel" in weights else images
    kernel = weights["embedding/kernel"]  # (P, P, C, D)
    x = convolve(x, kernel, stride=kernel.shape[0]) + weights["embedding/bias"]  # (B, h, w, D), no padding
    x = x.reshape(x.shape[0], -1, x.shape[-1])  # (B, n, D)
    modern = "pos_embedding" in weights  # big_vision: positions first, then the class token
    if modern:
        x = x + weights["pos_embedding"]
    if "cls" in weights:
        x = np.concatenate([np.repeat(weights["cls"], len(x), axis=0), x], axis=1)  # (B, 1 + n, D)
    return x if modern else x + weights["Transformer/posembed_input/pos_embedding"]


def list_layers(transformer: Weights) -> list[Weights]:
    """Weights of each block, from one block per layer or from stacked weights with a leading layer axis."""
    stacked = select_below(transformer, "encoderblock")
    if stacked:
        return [{key: value[i] for key, value in stacked.items()} for i in range(len(stacked["LayerNorm_0/scale"]))]
    depth = len({key.split("/")[0] for key in transformer if key.startswith("encoderblock_")})
    return [select_below(transformer, f"encoderblock_{i}") for i in range(depth)]


def block(weights: Weights, x: Array) -> Array:
    """Both halves normalize first and add at the end: (B, N, D) → (B, N, D)."""
    names = PRE_LINEN if f"{PRE_LINEN[1]}/query/kernel" in weights else LINEN
    norm1, attend, norm2, feed = (select_below(weights, name) for name in names)
    y = layer_norm(norm1, x)
    x = x + attention(attend, y, y)
    return x + mlp_block(feed, layer_norm(norm2, x))


def pool_tokens(weights: Weights, x: Array) -> Array:
    """One vector per image: attention pooling, the class token, or the mean of all tokens: (B, N, D) → (B, D)."""
    head = select_below(weights, "MAPHead_0")
    if not head:
        return x[:, 0] if "cls" in weights else x.mean(axis=1)
    x = attention(
        select_below(head, "MultiHeadDotProductAttention_0"), np.repeat(head["probe"], len(x), axis=0), x
    )  # (B, 1, D)
    x = x + mlp_block(select_below(head, "MlpBlock_0"), layer_norm(select_below(head, "LayerNorm_0"), x))
    return x[:, 0]


def dense(weights: Weights, x: Array) -> Array:
    return x @ weights["kernel"] + weights["bias"]  # (..., D) → (..., O)


def layer_norm(weights: Weights, x: Array) -> Array:
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = (centered**2).mean(axis=-1, keepdims=True)
    return centered / np.sqrt(variance + NORM_EPS) * weights["scale"] + weights["bias"]


def attention(weights: Weights, query: Array, memory: Array) -> Array:
    """Attention of queries (B, Q, D) to the memory (B, N, D): (B, Q, D)."""
    q, k, v = (
        np.einsum("bnd,dhk->bhnk", x, weights[f"{name}/kernel"]) + weights[f"{name}/bias"][:, None]  # (B, H, N, K)
        for name, x in (("query", query), ("key", memory), ("value", memory))
    )
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])  # (B, H, Q, N)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,hkd->bqd", shares @ v, weights["out/kernel"]) + weights["out/bias"]


def mlp_block(weights: Weights, x: Array) -> Array:
    return dense(select_below(weights, "Dense_1"), gelu(dense(select_below(weights, "Dense_0"), x)))


def gelu(x: Array) -> Array:
    """The tanh approximation, Flax's default."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def resnet(weights: Weights, images: Array) -> Array:
    """Root and stages, each of which but the first halves the resolution: (B, H, W, 3) → (B, h, w, C)."""
    x = std_conv(weights["conv_root/kernel"], images, stride=2)
    x = max_pool(np.maximum(group_norm(select_below(weights, "gn_root"), x), 0))
    stage = 1
    while units := select_below(weights, f"block{stage}"):
        for unit in range(1, 1 + len({key.split("/")[0] for key in units})):
            x = bottleneck(select_below(units, f"unit{unit}"), x, stride=2 if stage > 1 and unit == 1 else 1)
        stage += 1
    return x


def bottleneck(weights: Weights, x: Array, stride: int) -> Array:
    """1×1, 3×3 with the stride, 1×1, each followed by a norm; the last ReLU follows the sum."""
    shortcut = x
    if "conv_proj/kernel" in weights:
        shortcut = group_norm(select_below(weights, "gn_proj"), std_conv(weights["conv_proj/kernel"], x, stride))
    x = np.maximum(group_norm(select_below(weights, "gn1"), std_conv(weights["conv1/kernel"], x)), 0)
    x = np.maximum(group_norm(select_below(weights, "gn2"), std_conv(weights["conv2/kernel"], x, stride)), 0)
    x = group_norm(select_below(weights, "gn3"), std_conv(weights["conv3/kernel"], x))
    return np.maximum(shortcut + x, 0)


def std_conv(kernel: Array, x: Array, stride: int = 1) -> Array:
    """Convolution with a kernel (k, k, C, O) standardized for each output, with SAME padding."""
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    kernel = kernel / (kernel.std(axis=(0, 1, 2)) + STD_CONV_EPS)
    return convolve(same_padding(x, kernel.shape[0], stride), kernel, stride)


def convolve(x: Array, kernel: Array, stride: int) -> Array:
    """Convolution without padding: (B, H, W, C), (k, k, C, O) → (B, h, w, O)."""
    return np.tensordot(windows(x, kernel.shape[0], stride), kernel, axes=((4, 5, 3), (0, 1, 2)))


def max_pool(x: Array) -> Array:
    """Max pooling over 3×3 with stride 2, and SAME padding of minus infinity."""
    return windows(same_padding(x, 3, 2, fill=-np.inf), 3, 2).max(axis=(4, 5))


def windows(x: Array, size: int, stride: int) -> Array:
    """(B, H, W, C) → (B, h, w, C, k, k)."""
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]


def same_padding(x: Array, size: int, stride: int, fill: float = 0.0) -> Array:
    """Pad to ceil(side / stride) windows; an odd row or column goes to the bottom or right."""
    totals = [max((ceil(side / stride) - 1) * stride + size - side, 0) for side in x.shape[1:3]]
    rows, columns = ((total // 2, total - total // 2) for total in totals)
    return np.pad(x, ((0, 0), rows, columns, (0, 0)), constant_values=fill)


def group_norm(weights: Weights, x: Array) -> Array:
    """Group norm over positions and the channels of a group; scale and bias are (1, 1, 1, C) or (C,)."""
    groups = x.reshape(*x.shape[:3], GROUPS, -1)  # (B, h, w, G, C/G)
    centered = groups - groups.mean(axis=(1, 2, 4), keepdims=True)
    variance = (centered**2).mean(axis=(1, 2, 4), keepdims=True)
    normal_form = (centered / np.sqrt(variance + NORM_EPS)).reshape(x.shape)
    return normal_form * weights["scale"].reshape(-1) + weights["bias"].reshape(-1)
