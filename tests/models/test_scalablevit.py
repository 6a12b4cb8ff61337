"""ScalableViT: the authors' logits, both kinds of attention by explicit sums, files both ways, inspection, errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.layout_round_trip import check_round_trip
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.inspection.attention.capture import capture_attention
from vitrail.layers.attention import SelfAttention
from vitrail.models.scalablevit import ConnectedWindowAttention, ScalableViT, ScalableViTConfig, ScaledKeyAttention

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = ScalableViTConfig(
    image_size=56,
    stages=(2, 2),
    widths=(16, 32),
    heads=(2, 4),
    windows=(7, 7),
    reductions=(2, 1),
    key_ratios=(1.5, 1.0),
    head_width=24,
    classes=5,
)


def toy(**fields: Any) -> ScalableViT:
    return add_weight_noise(ScalableViT(replace(TOY, **fields)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (56, 56)))


@torch.no_grad()
def test_logits_are_those_of_the_authors_and_their_file_comes_back(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, "scalablevit")
    theirs = reference.config
    torch.save({"model": reference.tensors}, tmp_path / "theirs.pth")
    heads = tuple(theirs["num_heads"])
    check_round_trip(tmp_path / "theirs.pth", tmp_path / "back.pth", to="authors", heads=heads)
    fields: dict[str, Any] = {"image_size": theirs["img_size"], "heads": heads, "windows": theirs["wss"]}
    found = read(tmp_path / "theirs.pth", **fields)
    config = found.model.config
    assert (config.reductions, config.key_ratios) == (tuple(theirs["sr_ratios"]), tuple(theirs["c_ratios"]))
    assert found.report.assumed.keys() == {"windows"}
    assert (found.model(reference.images) - reference.logits).abs().max() <= 2e-5
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 32, 48, 64\)"):
        read(tmp_path / "theirs.pth")


@torch.no_grad()
def test_windows_are_connected_by_a_convolution_of_the_values() -> None:
    """Windows of 4×4 on a grid of 5×7; what the grid does not have is left out."""
    layer = add_weight_noise(ConnectedWindowAttention(8, 2, (4, 4)), std=0.5)
    plain = SelfAttention(8, 2)
    plain.qkv = layer.qkv
    plain.set_submodule("proj", torch.nn.Identity())
    x = torch.randn(2, 5, 7, 8)
    expected = layer.lim_func(layer.qkv(x)[..., 16:].movedim(-1, 1)).movedim(1, -1)
    for rows in (slice(0, 4), slice(4, 5)):
        for columns in (slice(0, 4), slice(4, 7)):
            part = x[:, rows, columns]
            expected[:, rows, columns] += plain(part.flatten(1, 2)).reshape(part.shape)
    torch.testing.assert_close(layer(x.flatten(1, 2), (5, 7)), layer.proj(expected).flatten(1, 2))


@torch.no_grad()
def test_few_keys_have_a_width_of_their_own() -> None:
    layer = add_weight_noise(ScaledKeyAttention(8, 2, 2, 12), std=0.5)
    x = torch.randn(1, 4, 6, 8)
    fewer = layer.norm_act(layer.reduction(x.movedim(-1, 1)).flatten(2).mT)  # (1, 6, 12)
    q, k, v = layer.q(x.flatten(1, 2))[0], layer.k(fewer)[0], layer.v(fewer)[0]
    heads = [
        (q[:, 6 * n : 6 * n + 6] @ k[:, 6 * n : 6 * n + 6].T / 6**0.5).softmax(-1) @ v[:, 4 * n : 4 * n + 4]
        for n in range(2)
    ]
    torch.testing.assert_close(layer(x.flatten(1, 2), (4, 6))[0], layer.proj(torch.cat(heads, dim=-1)))


def test_initial_weights_rates_and_gradients() -> None:
    torch.manual_seed(0)
    model: Any = ScalableViT(replace(TOY, stochastic_depth=0.3))
    rates = [model.get_submodule(name).drop_path.rate for name in model.sequence]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert model.stages[1][0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    model = toy().train()
    model(images(64, 40)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"60×56 pixels; expected a multiple of 8×8"):
        toy()(images(60, 56))
    vitrail.save(toy(), tmp_path / "own")
    resized = read(tmp_path / "own", image_size=(64, 96), classes=3)
    assert not resized.report.resized
    assert resized.report.initialized == ("head.3.weight", "head.3.bias")
    assert resized.model(images(64, 96)).shape == (2, 3)


PHOTO = np.random.default_rng(0).random((60, 60, 3))


def test_maps_of_windows_and_of_fewer_keys() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=56))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [(4, 2, 49, 49), (1, 2, 196, 49), (1, 4, 49, 49), (1, 4, 49, 49)]
    assert [tuple(each.shape) for each in captured.maps] == shapes
    assert subject.explain(PHOTO, "heads", layer=1).maps.shape == (1, 2, 7, 7)
    changes = "the grid changes from 14×14 to 7×7 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")
