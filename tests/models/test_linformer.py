"""Linformer: equal to explicit sums, to full attention if nothing is mixed, and other numbers of patches."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.checkpoint.resample import resample_projection as resample_checkpoint_projection
from vitrail.layers.attention import SelfAttention, attention
from vitrail.models.linformer import (
    PRESETS,
    Linformer,
    LinformerAttention,
    LinformerConfig,
    linear_attention,
    resample_projection,
)

TOY = LinformerConfig(image_size=(64, 48), width=16, depth=3, heads=2, classes=5, projected=4)
SHARED: tuple[str, ...] = get_args(get_type_hints(LinformerConfig)["shared"])
PROJECTIONS = {"none": 2 * 2, "heads": 2, "kv": 1}  # of a layer with two heads
VIT = {"tiny": 5_717_416, "small": 22_050_664, "base": 86_567_656}  # published, with 1,000 classes


def toy(shared: Any = "kv", **fields: Any) -> Any:
    return add_weight_noise(Linformer(replace(TOY, shared=shared, **fields)), std=0.2)


def explicit(attn: LinformerAttention, x: Tensor, table: Tensor) -> Tensor:
    """The paper's eq. 7 with loops over images, heads, queries and mixtures: (B, N, D) → (B, N, D)."""
    (b, n, d), heads = x.shape, attn.heads
    k = d // heads
    out = torch.zeros(b, n, d, dtype=x.dtype)
    for image in range(b):
        for head in range(heads):
            part = slice(head * k, (head + 1) * k)
            e, f = table[0 if len(table) < 3 else head], table[-1 if len(table) < 3 else heads + head]  # (N, k) each
            tokens = x[image]
            q = tokens @ attn.q.weight[part].T + attn.q.bias[part]
            keys = [sum(e[t, m] * (attn.k.weight[part] @ tokens[t]) for t in range(n)) for m in range(e.shape[1])]
            values = [sum(f[t, m] * (attn.v.weight[part] @ tokens[t]) for t in range(n)) for m in range(e.shape[1])]
            for t in range(n):
                scores = torch.stack([q[t] @ key / math.sqrt(k) for key in keys]).exp()
                shares = scores / scores.sum()
                out[image, t, part] = sum(share * value for share, value in zip(shares, values, strict=True))
    return out @ attn.proj.weight.T + attn.proj.bias


@pytest.mark.parametrize("shared", SHARED)
def test_attention_equals_the_paper(shared: str) -> None:
    model = toy(shared, image_size=(32, 48)).double()
    attn, x = model.blocks[0].attn, torch.randn(2, 7, 16, dtype=torch.float64)
    table = model.projection if shared == "layers" else attn.projection
    assert table.shape == (PROJECTIONS.get(shared, 1), 7, 4)
    given = {"shared": table} if shared == "layers" else {}
    expected = explicit(attn, x, table)
    assert expected.std() > 0.05
    torch.testing.assert_close(attn(x, **given), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(attn(x, queries=2, **given), expected[:, :2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("count", [1, 2, 4], ids=["one", "keys and values", "each head"])
def test_identity_projection_gives_full_attention(count: int) -> None:
    full: Any = add_weight_noise(SelfAttention(16, 2), std=0.3).double()
    attn: Any = LinformerAttention(16, 2, (2, 3), nn.Parameter(torch.eye(7).expand(count, 7, 7).clone())).double()
    q, k, v = full.qkv.weight.chunk(3)
    biases = full.qkv.bias.chunk(3)
    with torch.no_grad():
        for part, weight in ((attn.q, q), (attn.k, k), (attn.v, v), (attn.proj, full.proj.weight)):
            part.weight.copy_(weight)
        attn.q.bias.copy_(biases[0])
        attn.proj.bias.copy_(full.proj.bias + full.proj.weight @ biases[2])  # the bias of the keys has no effect
    x = torch.randn(3, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(attn(x), full(x), rtol=0, atol=1e-12)
    q, k, v = (torch.randn(3, 2, 7, 8, dtype=torch.float64) for _ in range(3))
    one = torch.eye(7, dtype=torch.float64)[None]
    torch.testing.assert_close(linear_attention(q, k, v, one, one), attention(q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_a_vit_and_the_projections(name: str) -> None:
    config = PRESETS[name]
    with torch.device("meta"):
        model = Linformer(config)
    (h, w), kernel = model.grid, config.width * 3 * (math.prod(model.patch_embed.patch) - 16 * 16)
    more = config.width * (h * w - 14 * 14) + kernel - 12 * 2 * config.width  # keys and values have no bias
    expected = VIT[name.split("_")[1]] + more + 12 * (1 + h * w) * 64
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(("shared", "matrices"), [("none", 24 * 3), ("heads", 24), ("kv", 12), ("layers", 1)])
def test_number_of_projections(shared: Any, matrices: int) -> None:
    with torch.device("meta"):
        model = Linformer(replace(PRESETS["linformer_tiny_patch16_224"], shared=shared))  # 12 layers of 3 heads
    result = [parameter for name, parameter in model.named_parameters() if name.endswith("projection")]
    assert sum(parameter.numel() for parameter in result) == matrices * 197 * 64


@pytest.mark.parametrize("shared", SHARED)
def test_macs(shared: str) -> None:
    with torch.device("meta"):
        result = vitrail.summarize(vitrail.create("linformer_tiny_patch16_224", shared=shared)).macs
    n, d, k = 197, 192, 64
    mixing = (1 if shared in ("kv", "layers") else 2) * k * n * d
    maps = 2 * n * d * d + 2 * (n if shared == "none" else k) * d * d  # of q and proj; of k and v
    assert result == 196 * 3 * 256 * d + 12 * (maps + mixing + 2 * n * k * d + 8 * n * d * d) + 1000 * d


@pytest.mark.parametrize("shared", SHARED)
def test_output_shape_and_gradients_of_every_weight(shared: str) -> None:
    model, images = toy(shared), torch.randn(2, 3, 64, 48)
    assert model.tokens(images).shape == (2, 13, 16)
    torch.testing.assert_close(model(images), model.logits(model.tokens(images)))
    gradients = list[list[Tensor]]()
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        model.train().zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for (name, _), gradient, again in zip(model.named_parameters(), *gradients, strict=True):
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, again), name


def test_initial_output_is_uniform_and_mixtures_keep_the_scale() -> None:
    model: Any = Linformer(replace(TOY, image_size=224, projected=64))
    assert not model(torch.randn(2, 3, 224, 224)).any()
    mixed = model.blocks[0].attn.projection[0].T @ torch.randn(197, 500)  # (k, D)
    assert 0.8 < mixed.square().mean() / (197 / (197 + 64)) < 1.2  # variance N/(N + k), as in the authors' code


def test_another_length_is_refused() -> None:
    model = toy()
    with pytest.raises(
        ConfigError, match=r"64×64 pixels; expected 64×48, which the model was built for: .*dynamic=True"
    ):
        model(torch.randn(1, 3, 64, 64))
    with pytest.raises(ConfigError, match=r"60×48 pixels; expected a multiple of 16×16, .* to 64×48"):
        model(torch.randn(1, 3, 60, 48))
    attn = model.blocks[0].attn
    with pytest.raises(ConfigError, match=r"^10 tokens; expected 13, the length of the projection"):
        attn(torch.randn(1, 10, 16))
    with pytest.raises(ConfigError, match=r"^no projection; expected one"):
        toy("layers").blocks[0].attn(torch.randn(1, 13, 16))


def test_resampled_projection_keeps_its_sums() -> None:
    even = torch.full((2, 1 + 12, 3), 0.25)
    larger = resample_projection(even, (4, 3), (6, 8))
    torch.testing.assert_close(larger[:, :1], even[:, :1])
    torch.testing.assert_close(larger[:, 1:].sum(1), even[:, 1:].sum(1))
    assert resample_projection(even, (4, 3), (4, 3)) is even
    smooth = torch.linspace(0, 1, 8)[:, None] * torch.linspace(-1, 2, 6)  # an image with twice as many patches per side
    tokens = torch.stack([smooth.cos(), smooth.sin()], dim=-1)  # (8, 6, 2)
    table = torch.cat([torch.randn(1, 1, 4), tokens[None].flatten(1, 2).repeat(1, 1, 2)], dim=1)  # smooth too
    twice = tokens.repeat_interleave(2, 0).repeat_interleave(2, 1)
    mixed = table[0, 1:].T @ tokens.flatten(0, 1)
    again = resample_projection(table, (8, 6), (16, 12))[0, 1:].T @ twice.flatten(0, 1)
    torch.testing.assert_close(again, mixed, rtol=0.02, atol=0.1)
    assert mixed.abs().max() > 5


@pytest.mark.parametrize("shared", SHARED)
def test_dynamic_equals_loading_at_another_size(shared: str, tmp_path: Path) -> None:
    model = toy(shared, dynamic=True)
    vitrail.save(model, tmp_path)
    same, images = vitrail.load(tmp_path), torch.randn(2, 3, 64, 48)
    assert torch.equal(same.eval()(images), model(images))
    result, images = read(tmp_path, image_size=(96, 96), dynamic=False), torch.randn(2, 3, 96, 96)
    loaded: Any = result.model
    assert not loaded.config.dynamic
    torch.testing.assert_close(loaded.eval()(images), model(images))
    tables = ["projection"] if shared == "layers" else [f"blocks.{n}.attn.projection" for n in range(3)]
    about = {"pos_embed": "timm positions, 4×3 to 6×6", **dict.fromkeys(tables, "timm projection, 4×3 to 6×6")}
    assert result.report.resized == about
    state = model.state_dict()[tables[0]]
    expected = resample_checkpoint_projection(state, (4, 3), (6, 6), "google")
    by_google: Any = read(tmp_path, image_size=(96, 96), policy="google").model
    assert torch.equal(by_google.state_dict()[tables[0]], expected)


def test_mismatched_checkpoints_and_configs_are_refused(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"projected is 4 in the checkpoint, not 8; .*: image_size"):
        vitrail.load(tmp_path / "ours", projected=8)
    with pytest.raises(ConfigError, match=r"unknown shared 'head'; did you mean 'heads'\?"):
        vitrail.create("linformer_tiny_patch16_224", shared="head")
    with pytest.raises(ConfigError, match=r"projected is 0; expected more than 0"):
        vitrail.create("linformer_tiny_patch16_224", projected=0)
