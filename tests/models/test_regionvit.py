"""RegionViT: the authors' logits, regions and masks by explicit loops, files both ways, inspection, errors."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.layout_round_trip import check_round_trip
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.parts.windows import TokenWindows
from vitrail.models.regionvit import OFFSETS, RegionAttention, RegionViT, RegionViTConfig, mask_padding

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = RegionViTConfig(image_size=(48, 32), window=4, stages=(1, 2), widths=(16, 32), heads=(2, 4), classes=5)


def toy(**fields: Any) -> RegionViT:
    return add_weight_noise(RegionViT(replace(TOY, **fields)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (48, 32)))


@pytest.mark.parametrize("name", ["regionvit_3conv", "regionvit_1conv_peg"])
@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    name: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, name)
    theirs = reference.config
    torch.save({"model": reference.tensors}, tmp_path / "theirs.pth")
    check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="authors")
    found = read(tmp_path / "theirs.pth", image_size=theirs["img_size"])
    config = found.model.config
    assert (config.stages, config.heads, config.window) == (tuple(theirs["depth"]), tuple(theirs["num_heads"]), 4)
    assert (config.convolutions, config.position_convolution) == (theirs["patch_conv_type"] == "3conv", theirs["peg"])
    assert not found.report.assumed
    assert (found.model(reference.images) - reference.logits).abs().max() <= 2e-5


def test_the_authors_table_wraps() -> None:
    """Offset Δ is in row (Δ + r//2) mod (2r − 1) of their table."""
    theirs = torch.arange(49.0).reshape(1, 49)  # r = 4
    ours = OFFSETS.to_ours([theirs])
    for row, column in np.ndindex(7, 7):
        place = (row - 3 + 2) % 7 * 7 + (column - 3 + 2) % 7
        assert ours[0, row, column] == theirs[0, place]
    assert torch.equal(OFFSETS.to_theirs(ours, 1)[0], theirs)


@torch.no_grad()
def test_each_region_attends_to_its_own_tokens_and_biases_are_between_local_ones() -> None:
    layer = add_weight_noise(RegionAttention(8, 2, 2), std=0.5)
    torch.nn.init.normal_(layer.get_parameter("position_bias.table"))
    table = layer.get_parameter("position_bias.table")
    x, grid = torch.randn(1, 6 + 24, 8), (4, 6)  # 2×3 regions
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 2
    shown = torch.zeros(30, 30, dtype=torch.bool)
    places = [None] * 6 + [(row, column) for row in range(4) for column in range(6)]
    regions = [*range(6), *(row // 2 * 3 + column // 2 for row in range(4) for column in range(6))]
    for i, query in enumerate(places):
        for j, key in enumerate(places):
            shown[i, j] = regions[i] == regions[j]
            if shown[i, j] and query is not None and key is not None:
                scores[0, :, i, j] += table[:, 1 + key[0] - query[0], 1 + key[1] - query[1]]
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, grid), expected)


def test_padding_is_masked_as_in_the_authors_code() -> None:
    """In the last window, tokens see what is within the grid along one side; in the others, along both."""
    windows = TokenWindows((8, 12), (4, 4))
    mask = mask_padding((6, 9), windows, torch.device("cpu"))
    assert mask is not None
    for number in range(6):
        rows = [True, *((number // 3 * 4 + place // 4) < 6 for place in range(16))]
        columns = [True, *((number % 3 * 4 + place % 4) < 9 for place in range(16))]
        for i, j in np.ndindex(17, 17):
            along = (rows[i] and rows[j], columns[i] and columns[j])
            assert mask[number, i, j] == ((any if number == 5 else all)(along) or i == j)
    assert mask_padding((8, 12), windows, torch.device("cpu")) is None
    x = torch.randn(2, 6 + 96, 3)
    assert torch.equal(windows.join(windows.split(x)), x)


def test_initial_weights_rates_and_gradients() -> None:
    torch.manual_seed(0)
    model: Any = RegionViT(replace(TOY, stochastic_depth=0.4))
    rates = [model.get_submodule(name).drop_path.rate for name in model.sequence]
    assert rates == pytest.approx([0, 0.2, 0.4])
    assert model.layers[1].block[1].attn.position_bias.table.std().item() == pytest.approx(0.02, rel=0.3)
    for fields in ({"position_convolution": True}, {"convolutions": False, "patch_size": 2, "image_size": (24, 16)}):
        model = toy(**fields).train()  # 3×2 regions, then 2×1, padded
        model(images(*model.config.image_size)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            unread = name == "layers.1.block.2.attn.position_bias.table"  # the head does not read the last local tokens
            assert unread == (parameter.grad.abs().sum() == 0), name


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"40×32 pixels; expected a multiple of 16×16"):
        toy()(images(40, 32))
    with pytest.raises(
        ConfigError, match=r"RegionViT has no sequence of tokens: it has tokens of regions and of their"
    ):
        toy().tokens(images())
    vitrail.save(toy(), tmp_path / "own")
    resized = read(tmp_path / "own", image_size=(64, 96), classes=3)
    assert not resized.report.resized
    assert resized.model(images(64, 96)).shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"cls_token\.proj\.weight cannot be adapted to shape \(16, 3, 8, 8\)"):
        read(tmp_path / "own", window=2)


PHOTO = np.random.default_rng(0).random((60, 60, 3))


def test_maps_of_regions() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=(48, 32)))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    assert [tuple(each.shape) for each in captured.maps] == [(6, 2, 17, 17), (2, 4, 17, 17), (2, 4, 17, 17)]
    near = subject.explain(PHOTO, "attention", layer=0, token="5,2").map
    expected = np.zeros((12, 8), bool)
    expected[4:8, :4] = True
    assert np.array_equal(near > 0, expected)
    of_head = subject.explain(PHOTO, "attention", layer=0).map  # of all region tokens
    shares = captured.maps[0].mean(1)[:, 0, 1:]  # (R, m)
    np.testing.assert_allclose(of_head[4:8, :4], shares[2].reshape(4, 4) / shares.sum(), rtol=1e-4)
    assert subject.explain(PHOTO, "attention", layer=1).map.shape == (6, 4)  # without the padding to 8×4
    last = subject.explain(PHOTO, "heads", layer=2, token="5,3").maps
    assert last.shape == (1, 4, 6, 4)
    assert last.sum((-2, -1)) == pytest.approx(1)
    changes = "the grid changes from 12×8 to 6×4 between layers 0 and 1"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")
    with pytest.raises(ConfigError, match="method 'norms' needs a model with blocks and a final norm"):
        subject.explain(PHOTO, "norms")
    with pytest.raises(
        ConfigError, match="RegionViT declares no blocks of tokens; expected a transformer with a final"
    ):
        vitrail.look(subject, [PHOTO])


@torch.no_grad()
def test_maps_between_regions() -> None:
    """The weights of the attention within regions, without its bias, applied to the region tokens alone."""
    model: Any = add_weight_noise(toy(), std=0.3)
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=(48, 32)))
    pixels, seen = subject.loaded.make_batch([PHOTO]), dict[int, Tensor]()
    blocks = [model.get_submodule(name) for name in model.sequence]

    def record(block: nn.Module, given: tuple[Any, ...]) -> None:
        seen[blocks.index(block)] = given[0]

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(record))
        model(pixels)
    for layer, (count, heads, grid) in enumerate([(6, 2, (3, 2)), (2, 4, (2, 1)), (2, 4, (2, 1))]):
        y = blocks[layer].norm0(seen[layer][0, :count])  # the region tokens come first
        q, k, _ = blocks[layer].attn.qkv(y).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        expected = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).numpy()  # (H, R, R)
        np.testing.assert_allclose(expected.sum(-1), 1, rtol=1e-5)
        found = subject.explain(PHOTO, "windows", layer=layer, token="1,0", head="all").maps
        assert found.shape == (1, heads, *grid)
        np.testing.assert_allclose(found.reshape(heads, count), expected[:, grid[1]], rtol=1e-3)
        of_all = subject.explain(PHOTO, "windows", layer=layer).map.ravel()
        np.testing.assert_allclose(of_all, expected.mean((0, 1)), rtol=1e-3)
    with pytest.raises(ConfigError, match=r"token is 'region'; expected one of head, or a window as row,column"):
        subject.explain(PHOTO, "windows", layer=0, token="region")
