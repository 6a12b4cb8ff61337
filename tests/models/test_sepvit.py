"""SepViT: the authors' logits, attention between windows by explicit sums, files both ways, inspection, errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.layout_round_trip import check_round_trip
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.sepvit import SeparableAttention, SepViT, SepViTConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = SepViTConfig(
    image_size=(64, 32),
    stages=(2, 2),
    widths=(16, 32),
    heads=(2, 4),
    windows=(4, 4),
    odd_windows=(8, 8),
    classes=5,
)  # grids of 16×8 and 8×4


def toy(**fields: Any) -> SepViT:
    return add_weight_noise(SepViT(replace(TOY, **fields)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (64, 32)))


@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, "sepvit")
    heads = tuple(reference.config["num_heads"])
    torch.save({"model": reference.tensors}, tmp_path / "theirs.pth")
    found = check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="authors", heads=heads)
    config = found.model.config
    assert [config.list_windows(stage) for stage in range(4)] == reference.config["ws"]
    assert config.mlp_ratio == 2
    assert (found.model(reference.images) - reference.logits).abs().max() <= 2e-5


@torch.no_grad()
def test_whole_windows_are_mixed_with_the_weights_of_their_tokens() -> None:
    layer = add_weight_noise(SeparableAttention(8, 2, (2, 2)), std=0.5)
    x, grid = torch.randn(1, 6 + 24, 8), (4, 6)  # 2×3 windows
    tokens, places = x[0, :6], x[0, 6:].reshape(4, 6, 8)
    inside = list[Tensor]()
    for number in range(6):
        row, column = 2 * (number // 3), 2 * (number % 3)
        window = torch.cat([tokens[number : number + 1], places[row : row + 2, column : column + 2].reshape(4, 8)])
        q, k, v = layer.qkv(window).chunk(3, dim=-1)
        parts = [slice(4 * head, 4 * head + 4) for head in range(2)]
        heads = [(q[:, part] @ k[:, part].T / 2).softmax(-1) @ v[:, part] for part in parts]
        inside.append(window + torch.cat(heads, dim=-1))
    windows = torch.stack(inside)  # (W, 1 + m, D)
    q, k = layer.window_qk(F.gelu(layer.win_tokens_norm(windows[:, 0]))).chunk(2, dim=-1)
    mixed = windows[:, 1:].clone()
    for part in (slice(0, 4), slice(4, 8)):
        weights = (q[:, part] @ k[:, part].T / 2).softmax(-1)
        mixed[:, :, part] += torch.einsum("wu,umd->wmd", weights, windows[:, 1:, part])
    expected = mixed.reshape(2, 3, 2, 2, 8).transpose(1, 2).reshape(24, 8)
    torch.testing.assert_close(layer(x, grid)[0], layer.proj(expected))


def test_initial_weights_rates_and_gradients() -> None:
    torch.manual_seed(0)
    model: Any = SepViT(replace(TOY, stochastic_depth=0.3))
    assert not model.blocks[0][0].win_tokens.any()
    rates = [model.get_submodule(name).drop_path.rate for name in model.sequence]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert not any(each.decays for each in list_weights(model) if each.name.endswith("win_tokens"))


def test_window_tokens_are_resampled_for_another_size(tmp_path: Path) -> None:
    model = toy()
    vitrail.save(model, tmp_path / "own")
    loaded = read(tmp_path / "own", image_size=(128, 64), odd_windows=(8, 16), classes=3)
    assert loaded.report.resized.keys() == {"blocks.0.0.win_tokens", "blocks.0.1.win_tokens", "blocks.1.0.win_tokens"}
    assert loaded.model(images(128, 64)).shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.1\.win_tokens cannot be adapted to shape \(1, 32, 2, 1\)"):
        read(tmp_path / "own", image_size=(128, 64))  # one window became two, which have no tokens
    dynamic = toy(dynamic=True)
    dynamic.load_state_dict(model.state_dict())
    larger = images(128, 64)
    torch.testing.assert_close(dynamic.tokens(larger), loaded.model.tokens(larger))
    with pytest.raises(ConfigError, match=r"64×32 pixels; expected a multiple of 64×64"):
        dynamic(images(64, 32))


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"64×64 pixels; expected 64×32, which the model was built for"):
        toy()(images(64, 64))


PHOTO = np.random.default_rng(0).random((60, 60, 3))


def test_maps_of_windows() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=(64, 32)))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [(8, 2, 17, 17), (2, 2, 65, 65), (2, 4, 17, 17), (1, 4, 32, 32)]
    assert [tuple(each.shape) for each in captured.maps] == shapes
    near = subject.explain(PHOTO, "attention", layer=0, token="5,2").map
    expected = np.zeros((16, 8), bool)
    expected[4:8, :4] = True
    assert np.array_equal(near > 0, expected)
    assert subject.explain(PHOTO, "norms", layer=1).map.shape == (16, 8)
    changes = "the grid changes from 16×8 to 8×4 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")


def mix_tokens_of_windows(block: Any, x: Tensor, count: int, window: int, heads: int) -> Tensor:
    """The weights between windows, (H, W, W), of tokens (1, n, D) on a grid of 8 columns, window by window."""
    across, tokens = 8 // window, list[Tensor]()
    learned = block.win_tokens.flatten(2)[0].T  # (W, D)
    for number in range(count):
        rows, columns = number // across * window, number % across * window
        inside = x[0].unflatten(0, (-1, 8))[rows : rows + window, columns : columns + window].flatten(0, 1)
        y = block.norm1(torch.cat([learned[number : number + 1], inside]))
        q, k, v = block.attn.qkv(y).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
        attended = (q[:, :1] @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v  # (H, 1, K)
        tokens.append(y[0] + attended.flatten())
    y = F.gelu(block.attn.win_tokens_norm(torch.stack(tokens)))
    q, k = block.attn.window_qk(y).unflatten(-1, (2, heads, -1)).permute(1, 2, 0, 3)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


@torch.no_grad()
def test_maps_between_windows() -> None:
    torch.manual_seed(0)
    model: Any = toy()
    for weight in (weight for name, weight in model.named_parameters() if "window_qk" in name or "win_tokens" in name):
        weight.add_(torch.randn_like(weight), alpha=0.5)
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=(64, 32)))
    x, grid = model.embed(subject.loaded.make_batch([PHOTO]))
    expected = mix_tokens_of_windows(model.blocks[0][0], x, 8, 4, 2).numpy()  # 4×2 windows
    assert expected.std() > 0.01
    found = subject.explain(PHOTO, "windows", layer=0, token="1,0", head="all")
    np.testing.assert_allclose(found.maps.reshape(2, 8), expected[:, 2], rtol=1e-3)
    assert found.options.description == "attention between windows in layer 0, each head"
    of_all = subject.explain(PHOTO, "windows", layer=0).map
    assert of_all.shape == (4, 2)
    np.testing.assert_allclose(of_all.ravel(), expected.mean((0, 1)), rtol=1e-3)
    second = model.pos_block[0](model.blocks[0][0](x, grid), grid)
    expected = mix_tokens_of_windows(model.blocks[0][1], second, 2, 8, 2).numpy()  # 2×1 windows
    np.testing.assert_allclose(
        subject.explain(PHOTO, "windows", layer=1, head=1, token="1,0").map.ravel(), expected[1, 1], rtol=1e-3
    )
    refused: dict[Any, str] = {
        -1: "layer 3: its windows do not attend to each other; expected one of 0, 1, 2$",
        "all": "layer 'all' is",
    }
    for layer, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            subject.explain(PHOTO, "windows", layer=layer)
    with pytest.raises(ConfigError, match=r"token is '4,0'; expected one of head, or a window as row,column .* to 3,1"):
        subject.explain(PHOTO, "windows", layer=0, token="4,0")


def test_figures() -> None:
    photos = [np.random.default_rng(n).random((60, 60, 3)) for n in range(2)]
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=(64, 32)))
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} >= {"attention_distance", "patch_pca"}
