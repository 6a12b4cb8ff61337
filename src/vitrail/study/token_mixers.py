"""Token mixers as plain functions, and their cost in theory: attention, its variants, LSTM and convolution.

n tokens of width d, one head, a batch of one. Attention starts from q, k, v: its linear layers are O(n·d²) in all
variants and are left out. LSTM and convolution are complete layers. A test checks that these functions equal the
attention of the model families.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.layers.attention import attention

WINDOW_SIDE = 8  # tokens
KEYS_PER_QUERY = WINDOW_SIDE * WINDOW_SIDE  # in a window (r), and after Linformer's projection (k)
KERNEL_SIZE = 3  # of the convolution, in tokens


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v with all n² scores in memory."""
    return (q / math.sqrt(q.shape[-1]) @ k.transpose(-2, -1)).softmax(-1) @ v


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, k_map: Tensor, v_map: Tensor) -> Tensor:
    """Attention to k mixtures of all n keys and values, by maps (n, k) (Wang 2020, arXiv 2006.04768)."""
    return attention(q, k_map.T @ k, v_map.T @ v)


def axial_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention along rows, then columns of a square grid: (1, 1, n, d) → (1, 1, n, d) (Ho 2019, arXiv 1912.12180)."""
    q, k, v = (x.unflatten(2, find_square_grid_shape(x)).transpose(1, 2)[0] for x in (q, k, v))  # (rows, 1, columns, d)
    rows = attention(q, k, v)
    columns = attention(q.transpose(0, 2), k.transpose(0, 2), rows.transpose(0, 2))  # (columns, 1, rows, d)
    return columns.transpose(0, 2).reshape(1, 1, -1, columns.shape[-1])


def windowed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within square windows of WINDOW_SIDE tokens on a square grid: (1, 1, n, d) → (1, 1, n, d)."""
    rows, columns = find_square_grid_shape(q)
    cut = (rows // WINDOW_SIDE, WINDOW_SIDE, columns // WINDOW_SIDE, WINDOW_SIDE)
    q, k, v = (x.unflatten(2, cut).transpose(3, 4).reshape(-1, 1, KEYS_PER_QUERY, x.shape[-1]) for x in (q, k, v))
    out = attention(q, k, v).reshape(1, 1, cut[0], cut[2], WINDOW_SIDE, WINDOW_SIDE, -1)
    return out.transpose(3, 4).flatten(2, 5)


def find_square_grid_shape(x: Tensor) -> tuple[int, int]:
    side = math.isqrt(x.shape[2])
    return side, side


@dataclass(frozen=True)
class MixerStep:
    """A repeatable call, and all tensors that it reads."""

    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]

    @property
    def input_bytes(self) -> int:
        return sum(each.nbytes for each in self.inputs)


def make_qkv_step_builder(
    mix: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], MixerStep]:
    return lambda q, k, v: MixerStep(lambda: mix(q, k, v), (q, k, v))


def build_linformer_step(q: Tensor, k: Tensor, v: Tensor) -> MixerStep:
    tokens = q.shape[2]
    k_map, v_map = torch.randn(2, tokens, min(KEYS_PER_QUERY, tokens)).div(math.sqrt(tokens)).unbind()
    return MixerStep(lambda: linformer_attention(q, k, v, k_map, v_map), (q, k, v, k_map, v_map))


def build_lstm_step(q: Tensor, _: Tensor, __: Tensor) -> MixerStep:
    layer = nn.LSTM(q.shape[-1], q.shape[-1], batch_first=True).requires_grad_(False).eval()
    return MixerStep(lambda: layer(q[0])[0], (q, *layer.parameters()))


def build_convolution_step(q: Tensor, _: Tensor, __: Tensor) -> MixerStep:
    layer = nn.Conv1d(q.shape[-1], q.shape[-1], KERNEL_SIZE, padding="same").requires_grad_(False).eval()
    x = q[0].transpose(1, 2).contiguous()  # (1, d, n)
    return MixerStep(lambda: layer(x), (x, *layer.parameters()))


@dataclass(frozen=True)
class TokenMixer:
    """A token mixer. Operations, sequential steps and maximum path length are as in table 1 of Vaswani 2017."""

    name: str
    build: Callable[[Tensor, Tensor, Tensor], MixerStep]
    operations: str
    steps: str
    path: str
    time: float  # exponent of n in theory
    memory: float
    scores: int = 0  # arrays of n² values in memory at once
    vaswani: bool = True  # whether it is in that table


TOKEN_MIXERS = (
    TokenMixer("full, fused", make_qkv_step_builder(attention), "n²·d", "1", "1", time=2, memory=1),
    TokenMixer(
        "full, explicit", make_qkv_step_builder(explicit_attention), "n²·d", "1", "1", time=2, memory=2, scores=2
    ),
    TokenMixer("Linformer", build_linformer_step, "k·n·d", "1", "1", time=1, memory=1, vaswani=False),
    TokenMixer("axial", make_qkv_step_builder(axial_attention), "n·√n·d", "1", "1", time=1.5, memory=1, vaswani=False),
    TokenMixer("windowed", make_qkv_step_builder(windowed_attention), "r·n·d", "1", "n/r", time=1, memory=1),
    TokenMixer("LSTM", build_lstm_step, "n·d²", "n", "n", time=1, memory=1),
    TokenMixer("convolution", build_convolution_step, "k·n·d²", "1", "log_k n", time=1, memory=1),
)
