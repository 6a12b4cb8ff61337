"""Windows of a grid: cut and joined, padded and shifted; attention within them equals that of all tokens and a mask.

Their constant tensors are made once per size, can be used in training afterwards, and are not kept while compiling.
"""

import math

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.inspection.attention.attention_distance import patch_distances, window_attention_distance
from vitrail.inspection.explain.explainer import multiply_row_in_windows
from vitrail.layers.attention import attention_weights
from vitrail.models.parts.windows import OffsetBias, WindowAttention, Windows, remember_tensor

CASES = {
    "whole": Windows((4, 6), (2, 3)),
    "one": Windows((3, 5), (3, 5)),
    "shifted": Windows((4, 6), (2, 3), (1, 1)),
    "padded": Windows((5, 7), (2, 3)),
    "padded and shifted": Windows((5, 7), (4, 4), (2, 2)),
    "shifted along rows": Windows((6, 3), (4, 3), (2, 0)),
    "interleaved": Windows((8, 6), (2, 3), interval=(2, 2)),
    "interleaved and padded": Windows((9, 7), (2, 2), interval=(3, 2)),
}


def find_members(windows: Windows) -> torch.Tensor:
    """The number of the token at each place of each window, −1 for padding: (W, m)."""
    count = windows.grid[0] * windows.grid[1]
    return windows.split(torch.arange(1.0, count + 1).reshape(1, -1, 1))[..., 0].long() - 1


@pytest.mark.parametrize("case", CASES)
def test_join_is_the_inverse_of_split(case: str) -> None:
    windows = CASES[case]
    x = torch.randn(2, windows.grid[0] * windows.grid[1], 3)
    parts = windows.split(x)
    assert parts.shape == (2 * math.prod(windows.counts), math.prod(windows.size), 3)
    assert torch.equal(windows.join(parts), x)
    members = find_members(windows)
    assert sorted(members[members >= 0].tolist()) == list(range(x.shape[1]))  # each token once
    assert torch.equal(windows.places(), members >= 0)


@pytest.mark.parametrize("case", CASES)
def test_regions_are_neighbors_on_the_grid(case: str) -> None:
    """Two tokens of a window see each other if they are not farther apart than the window is wide."""
    windows = CASES[case]
    extent = [side * step for side, step in zip(windows.size, windows.interval, strict=True)]
    members, regions = find_members(windows), windows.regions()
    regions = torch.ones(len(members), *2 * members.shape[1:], dtype=torch.bool) if regions is None else regions
    rows, columns = members // windows.grid[1], members % windows.grid[1]
    near = ((rows[:, None] - rows[..., None]).abs() < extent[0]) & (
        (columns[:, None] - columns[..., None]).abs() < extent[1]
    )
    real = (members >= 0)[:, None] & (members >= 0)[..., None]
    assert torch.equal(regions[real], near[real])


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("grid", [(4, 6), (2, 3), (8, 3)])
@torch.no_grad()
def test_attention_equals_that_of_all_tokens_with_a_mask(grid: tuple[int, int], shifted: bool) -> None:
    layer = add_weight_noise(WindowAttention(8, 2, (2, 3), OffsetBias(2, (2, 3)), shifted=shifted), std=0.5)
    torch.nn.init.normal_(layer.get_parameter("position_bias.table"))
    windows, n = layer.cut(grid), grid[0] * grid[1]
    x = torch.randn(2, n, 8)
    members, regions, bias = find_members(windows), windows.regions(), layer.get_submodule("position_bias")((2, 3))
    mask = torch.full((2, n, n), -math.inf)
    for number, tokens in enumerate(members):
        for i, query in enumerate(tokens):
            for j, key in enumerate(tokens):
                if regions is None or regions[number, i, j]:
                    mask[:, query, key] = bias[:, i, j]
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    weights = attention_weights(q, k, mask)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, grid), expected)

    maps = layer.weights(x, grid)  # (B·W, H, m, m)
    assert maps.shape == (2 * len(members), 2, 6, 6)
    token = np.random.default_rng(0).random((1, n)).astype(np.float32)
    row = multiply_row_in_windows(token, maps.mean(1).numpy(), windows)
    np.testing.assert_allclose(row, (torch.from_numpy(token) @ weights.mean(1))[:, 0].numpy(), rtol=1e-4, atol=1e-6)
    distances = (weights * torch.from_numpy(patch_distances(grid, (4, 4))).float()).sum(-1).mean(-1)
    np.testing.assert_allclose(window_attention_distance(maps.numpy(), windows, (4, 4)), distances.numpy(), rtol=1e-4)


def test_interleaved_windows_have_every_second_row_and_third_column() -> None:
    windows = Windows((4, 6), (2, 2), interval=(2, 3))
    assert find_members(windows).tolist()[:2] == [[0, 3, 12, 15], [1, 4, 13, 16]]
    assert windows.counts == (2, 3)
    assert Windows((5, 6), (2, 2), interval=(2, 3)).padding == (3, 0)
    maps = np.full((6, 1, 4, 4), 0.25)
    near, far = 4 * 3, 4 * 2  # pixels from a token to the next one of its window
    expected = (near + far + math.hypot(near, far)) / 4
    np.testing.assert_allclose(window_attention_distance(maps, windows, (4, 4)), [[expected]])


def test_bias_is_by_offset_from_query_to_key() -> None:
    bias = OffsetBias(1, (2, 3))
    with torch.no_grad():
        bias.table.copy_(torch.arange(15.0).reshape(1, 3, 5))
    found = bias((2, 3))[0].unflatten(0, (2, 3)).unflatten(2, (2, 3))  # (query row, column, key row, column)
    for row, column, key_row, key_column in np.ndindex(2, 3, 2, 3):
        assert found[row, column, key_row, key_column] == bias.table[0, 1 + key_row - row, 2 + key_column - column]
    smaller = bias((1, 2))[0].tolist()
    assert smaller == [[7, 8], [6, 7]]
    with pytest.raises(ConfigError, match=r"a window of 3×3; expected at most 2×3, as in the table"):
        bias((3, 3))


def test_windows_follow_the_grid() -> None:
    layer = WindowAttention(8, 2, (4, 4), shifted=True)
    assert layer.cut((8, 8)) == Windows((8, 8), (4, 4), (2, 2))
    assert layer.cut((4, 9)) == Windows((4, 9), (4, 4), (0, 2))  # one window along the rows: nothing to shift
    assert layer.cut((3, 2)) == Windows((3, 2), (3, 2))
    with pytest.raises(ConfigError, match=r"grid \(2, 3\) for 5 tokens; expected \(rows, columns\) of as many tokens"):
        layer(torch.zeros(1, 5, 8), (2, 3))


MADE = list[int]()


@remember_tensor
def make_places(size: int) -> Tensor:
    MADE.append(size)
    return torch.arange(size)


def test_a_tensor_is_made_once_per_size() -> None:
    MADE.clear()
    assert make_places(3) is make_places(3)
    assert make_places(4).shape == (4,)
    assert MADE == [3, 4]


def test_a_tensor_made_in_inference_mode_can_be_used_in_training() -> None:
    with torch.inference_mode():
        make_places(5)
    table = torch.ones(2, 6, requires_grad=True)
    table.index_select(1, make_places(5)).sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == 10


def test_nothing_is_kept_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert make_places(7) is not make_places(7)
    assert make_places(7) is make_places(7)
    assert MADE == [7, 7, 7]
