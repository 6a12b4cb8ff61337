"""Position tables equal their formulas; relative and rotary positions depend on offsets."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support.noisy_weights import add_weight_noise
from torch import Tensor

from vitrail.layers.attention import SelfAttention
from vitrail.layers.positions import (
    RelativePositions,
    RotaryPositions,
    join_axes,
    resample,
    sinusoid,
    sinusoid_1d,
    sinusoid_2d,
)


def test_sinusoid_equals_a_hand_checked_matrix() -> None:
    """d = 4, n = 100, four positions: sin and cos of pos and of pos/10."""
    expected = torch.tensor(
        [
            [0.0, 1.0, 0.0, 1.0],
            [0.84147098, 0.54030231, 0.09983342, 0.99500417],
            [0.90929743, -0.41614684, 0.19866933, 0.98006658],
            [0.14112001, -0.98999250, 0.29552021, 0.95533649],
        ]
    )
    torch.testing.assert_close(sinusoid(torch.arange(4), 4, base=100), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("width", [1, 2, 5, 64])
def test_sinusoid_equals_the_formula_of_the_paper(width: int) -> None:
    table = sinusoid(torch.arange(50), width)
    for position in (0, 1, 17, 49):
        for channel in range(width):
            angle = position / 10_000 ** (2 * (channel // 2) / width)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert abs(table[position, channel].item() - expected) < 1e-5


def test_two_dimensional_tables_have_columns_then_rows() -> None:
    table = sinusoid_2d((2, 3), 8).unflatten(0, (2, 3))
    assert torch.equal(table[1, 2, :4], sinusoid(torch.arange(3), 4)[2])
    assert torch.equal(table[1, 2, 4:], sinusoid(torch.arange(2), 4)[1])
    assert torch.equal(sinusoid_1d((2, 3), 8), sinusoid(torch.arange(6), 8))


def test_join_axes_keeps_layers_separate() -> None:
    rows, columns = torch.randn(4, 2, 5), torch.randn(4, 3, 5)
    table = join_axes(rows, columns)
    assert table.shape == (4, 6, 10)
    assert torch.equal(table[3, 1 * 3 + 2], torch.cat([columns[3, 2], rows[3, 1]]))


def test_resampling_keeps_prefix_rows_and_equal_grids() -> None:
    table = torch.randn(2, 3 + 2 * 5, 8)
    assert resample(table, (2, 5), (2, 5)) is table
    larger = resample(table, (2, 5), (4, 7))
    assert larger.shape == (2, 3 + 4 * 7, 8)
    assert torch.equal(larger[:, :3], table[:, :3])
    one = F.interpolate(
        table[1:, 3:].mT.unflatten(-1, (2, 5)), size=(4, 7), mode="bicubic", antialias=True
    )  # the second table alone, channels first
    torch.testing.assert_close(larger[1, 3:], one[0].flatten(1).T)


def relative_by_hand(layer: SelfAttention, x: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """softmax((q·k + q·r)/√K), with the offset of each pair of patches in rows and columns."""
    assert isinstance(layer.positions, RelativePositions)
    q, k, _ = (part.unflatten(-1, (layer.heads, -1)) for part in layer.qkv(x)[0].chunk(3, dim=-1))  # (N, H, K)
    table = layer.positions.offsets[0].unflatten(0, layer.positions.span)
    scores = torch.einsum("ihk,jhk->hij", q, k)
    for i in range(grid[0] * grid[1]):
        for j in range(grid[0] * grid[1]):
            down, right = i // grid[1] - j // grid[1], i % grid[1] - j % grid[1]
            offset = table[down + grid[0] - 1, right + grid[1] - 1]
            scores[:, prefix + i, prefix + j] += q[prefix + i] @ offset
    return (scores / math.sqrt(q.shape[-1])).softmax(-1)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_relative_positions_add_attention_to_offsets(prefix: int) -> None:
    layer = add_weight_noise(SelfAttention(16, 2, positions=RelativePositions(8, (3, 4))), std=0.5)
    x = torch.randn(1, prefix + 12, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            layer.weights(x, (3, 4))[0], relative_by_hand(layer, x, (3, 4), prefix), rtol=1e-4, atol=1e-6
        )


def test_rotary_scores_depend_only_on_the_offset() -> None:
    """With the same q and k everywhere, the score of a pair depends only on its offset."""
    q, k = (torch.randn(1, 1, 1, 16).expand(1, 1, 21, 16) for _ in range(2))
    rotated_q, rotated_k, bias = RotaryPositions(16)(q, k, (4, 5))
    assert bias is None
    scores = (rotated_q @ rotated_k.mT)[0, 0]
    assert torch.equal(rotated_q[:, :, 0], q[:, :, 0]), "the prefix token is not rotated"
    scores = scores[1:, 1:].unflatten(0, (4, 5)).unflatten(-1, (4, 5))
    by_offset: dict[tuple[int, int], list[Tensor]] = {}
    for a, b, c, d in itertools.product(range(4), range(5), range(4), range(5)):
        by_offset.setdefault((a - c, b - d), []).append(scores[a, b, c, d])
    for same in by_offset.values():
        torch.testing.assert_close(torch.stack(same), same[0].expand(len(same)), rtol=1e-4, atol=1e-4)
    distinct = torch.stack([same[0] for same in by_offset.values()])
    assert distinct.unique().numel() == len(by_offset) == 7 * 9
    norms = rotated_q.norm(dim=-1)
    torch.testing.assert_close(norms, q.norm(dim=-1))


@pytest.mark.parametrize("kind", ["relative", "rotary"])
def test_positions_in_the_attention_adapt_to_another_grid(kind: str) -> None:
    positions = RelativePositions(8, (3, 4)) if kind == "relative" else RotaryPositions(8)
    layer = add_weight_noise(SelfAttention(16, 2, positions=positions))
    assert layer(torch.randn(2, 1 + 5 * 6, 16), (5, 6)).shape == (2, 31, 16)


def test_angles_of_rotary_positions() -> None:
    """The first K/4 pairs rotate by column·base^(−4i/K), the others by row·base^(−4i/K)."""
    q = torch.zeros(1, 1, 6, 8)
    q[..., :4] = 1  # the first coordinate of each of the four pairs
    rotated, _, _ = RotaryPositions(8, base=100.0)(q, q, (2, 3))
    angles = torch.tensor([2 * 1.0, 2 * 0.1, 1 * 1.0, 1 * 0.1])  # at row 1, column 2
    torch.testing.assert_close(rotated[0, 0, 5], torch.cat([angles.cos(), angles.sin()]))


def test_tables_are_exact_for_any_default_dtype() -> None:
    exact = sinusoid_1d((30, 20), 32)
    q = torch.randn(1, 1, 600, 16)
    rotated = RotaryPositions(16)(q, q, (30, 20))[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.testing.assert_close(sinusoid_1d((30, 20), 32), exact, check_dtype=False)
        torch.testing.assert_close(RotaryPositions(16)(q, q, (30, 20))[0], rotated)
    finally:
        torch.set_default_dtype(torch.float32)
