"""Token mixers match their formulas."""

import math

import pytest
import torch
from torch import Tensor

from vitrail.layers.attention import attention, attention_weights
from vitrail.models import axial, linformer
from vitrail.study.sequence_cost import (
    KERNEL_SIZE,
    KEYS_PER_QUERY,
    TOKEN_MIXERS,
    WINDOW_SIDE,
    TokenMixer,
    axial_attention,
    explicit_attention,
    linformer_attention,
    windowed_attention,
)


def sequence(side: int = 2 * WINDOW_SIDE, width: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 1, side * side, width, dtype=torch.float64, generator=torch.manual_seed(0)).unbind()
    return q, k, v


def places(tokens: int) -> tuple[Tensor, Tensor]:
    """Row and column of each token."""
    number = torch.arange(tokens)
    side = math.isqrt(tokens)
    return number // side, number % side


def same(a: Tensor) -> Tensor:
    return a[:, None] == a[None]


def test_explicit_attention_equals_fused_attention() -> None:
    q, k, v = sequence()
    torch.testing.assert_close(explicit_attention(q, k, v), attention(q, k, v))


def test_linformer_with_identity_maps_is_full_attention() -> None:
    q, k, v = sequence()
    whole = torch.eye(q.shape[2], dtype=q.dtype)
    torch.testing.assert_close(linformer_attention(q, k, v, whole, whole), attention(q, k, v))
    k_map, v_map = torch.randn(2, q.shape[2], 5, dtype=q.dtype).unbind()
    expected = attention_weights(q, k_map.T @ k) @ (v_map.T @ v)
    torch.testing.assert_close(linformer_attention(q, k, v, k_map, v_map), expected)


def test_axial_attention_is_masked_full_attention() -> None:
    q, k, v = sequence()
    row, column = places(q.shape[2])
    expected = attention(q, k, attention(q, k, v, same(row)), same(column))
    torch.testing.assert_close(axial_attention(q, k, v), expected)


def test_windowed_attention_is_masked_full_attention() -> None:
    q, k, v = sequence()
    row, column = places(q.shape[2])
    window = same(row // WINDOW_SIDE) & same(column // WINDOW_SIDE)
    assert window.sum(1).eq(KEYS_PER_QUERY).all()
    torch.testing.assert_close(windowed_attention(q, k, v), attention(q, k, v, window))


def test_models_compute_the_same_attention() -> None:
    q, k, v = sequence()
    k_map, v_map = torch.randn(2, q.shape[2], 5, dtype=q.dtype).unbind()
    theirs = linformer.linear_attention(q, k, v, k_map[None], v_map[None])
    torch.testing.assert_close(linformer_attention(q, k, v, k_map, v_map), theirs)
    grid = (2 * WINDOW_SIDE, 2 * WINDOW_SIDE)
    rows = axial.axial_attention(q, k, v, grid, rows=True)
    torch.testing.assert_close(axial_attention(q, k, v), axial.axial_attention(q, k, rows, grid, rows=False))


@pytest.mark.parametrize("mixer", TOKEN_MIXERS, ids=lambda mixer: mixer.name)
def test_steps_read_their_inputs(mixer: TokenMixer) -> None:
    q, k, v = torch.randn(3, 1, 1, 256, 16).unbind()
    step = mixer.build(q, k, v)
    out = step.run()
    assert out.numel() == q.numel()
    assert out.isfinite().all()
    assert step.input_bytes == sum(each.numel() * 4 for each in step.inputs)
    for each in step.inputs:
        before = step.run()
        each.mul_(1.5).add_(0.1)
        assert not torch.equal(step.run(), before), "it reads its inputs"


def test_weights_match_the_complexities() -> None:
    """O(k·n·d) with k rows of n, O(n·d²) and O(k·n·d²) with that many d × d matrices."""
    q, k, v = torch.randn(3, 1, 1, 256, 16).unbind()
    numbers = {each.name: sum(x.numel() for x in each.build(q, k, v).inputs) for each in TOKEN_MIXERS}
    assert numbers["full, fused"] == numbers["axial"] == numbers["windowed"] == 3 * q.numel()
    assert numbers["Linformer"] == 3 * q.numel() + 2 * KEYS_PER_QUERY * 256
    assert numbers["LSTM"] == q.numel() + 8 * 16 * 16 + 8 * 16
    assert numbers["convolution"] == q.numel() + KERNEL_SIZE * 16 * 16 + 16
