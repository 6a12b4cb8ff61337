"""T2T-ViT equals the paper's formulas written as loops and sums, in double precision."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.noisy_weights import add_weight_noise
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.inspection.attention.capture import capture_attention, find_attention_layers
from vitrail.models.parts.token_merging import add_token_merging
from vitrail.models.t2t import PRESETS, SOFT_SPLITS, T2T, T2TConfig, TokenPerformer, soft_split

# total, and trained: positions and the rows of performers are fixed
PARAMETERS = {
    "t2t_vit_7": (4_310_222, 4_255_694),
    "t2t_vit_10": (5_889_230, 5_834_702),
    "t2t_vit_12": (6_941_902, 6_887_374),
    "t2t_vit_14": (21_545_550, 21_465_806),
    "t2t_vit_19": (39_177_422, 39_085_070),
    "t2t_vit_24": (64_105_934, 64_000_974),
    "t2t_vit_t_14": (21_541_070, 21_465_422),
    "t2t_vit_t_19": (39_172_942, 39_084_686),
    "t2t_vit_t_24": (64_101_454, 64_000_590),
}
GMACS = {  # published, to one decimal; T2T-ViT-24 as 13.8
    "t2t_vit_7": 1.1,
    "t2t_vit_10": 1.5,
    "t2t_vit_12": 1.8,
    "t2t_vit_14": 4.8,
    "t2t_vit_19": 8.5,
    "t2t_vit_t_14": 6.1,
    "t2t_vit_t_19": 9.8,
    "t2t_vit_t_24": 15.0,
}
TOY = T2TConfig(image_size=(32, 48), stage_width=6, width=16, depth=2, heads=2, classes=5)
STAGES = ("performer", "transformer")


def toy(stage: Any = "performer", **fields: Any) -> T2T:
    torch.manual_seed(0)
    return add_weight_noise(T2T(replace(TOY, stage=stage, **fields)), std=0.2)


def patches(x: Tensor, side: int, step: int, padding: int) -> Tensor:
    """Every number of every patch, with loops: (C, H, W) → (h·w, C·side²)."""
    c, height, width = x.shape
    h, w = (height + 2 * padding - side) // step + 1, (width + 2 * padding - side) // step + 1
    result = torch.zeros(h * w, c * side * side, dtype=x.dtype)
    for row, column, channel, i, j in product(range(h), range(w), range(c), range(side), range(side)):
        y, z = row * step + i - padding, column * step + j - padding
        if 0 <= y < height and 0 <= z < width:
            result[row * w + column, (channel * side + i) * side + j] = x[channel, y, z]
    return result


def normalized(x: Tensor, norm: Any) -> Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def mlp(x: Tensor, layer: Any) -> Tensor:
    hidden = x @ layer.fc1.weight.T + layer.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return hidden @ layer.fc2.weight.T + layer.fc2.bias


def by_sums(q: Tensor, k: Tensor, v: Tensor, kernel: Any, least: float = 0.0) -> Tensor:
    """Values weighted by the kernel, one query at a time: (N, K), (N, K), (N, V) → (N, V)."""
    rows = list[Tensor]()
    for query in q:
        mixed, total = torch.zeros_like(v[0]), least
        for key, value in zip(k, v, strict=True):
            share = kernel(query, key)
            mixed, total = mixed + share * value, total + share
        rows.append(mixed / total)
    return torch.stack(rows)


def staged(x: Tensor, stage: Any) -> Tensor:
    """A stage on one image: (N, C) → (N, S)."""
    qkv, least = normalized(x, stage.norm1) @ stage.qkv.weight.T, 0.0
    if isinstance(stage, TokenPerformer):
        qkv, least = qkv + stage.qkv.bias, 1e-8

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        if isinstance(stage, TokenPerformer):
            features = ((w @ a - a @ a / 2).exp() * (w @ b - b @ b / 2).exp() for w in stage.w)
            return torch.stack([*features]).mean()
        return (a @ b / math.sqrt(x.shape[1])).exp()

    q, k, v = qkv.chunk(3, dim=-1)
    x = v + by_sums(q, k, v, kernel, least) @ stage.proj.weight.T + stage.proj.bias
    return x + mlp(normalized(x, stage.norm2), stage.mlp)


def by_hand(model: T2T, image: Tensor) -> Tensor:
    """All tokens of one image: (C, H, W) → (1 + n, D)."""
    module, (height, width) = model.tokens_to_token, image.shape[1:]
    x = staged(patches(image, 7, 4, 2), module.attention1)
    x = staged(patches(x.T.reshape(-1, height // 4, width // 4), 3, 2, 1), module.attention2)
    x = patches(x.T.reshape(-1, height // 8, width // 8), 3, 2, 1)
    x = torch.cat((model.cls_token[0], x @ module.project.weight.T + module.project.bias)) + model.pos_embed[0]
    for block in model.blocks:
        heads: Any = [each.chunk(model.config.heads, -1) for each in qkv_of(block, x).chunk(3, -1)]
        mixed = [by_sums(q, k, v, exponential) for q, k, v in zip(*heads, strict=True)]
        attn: Any = block.attn
        x = x + torch.cat(mixed, -1) @ attn.proj.weight.T + attn.proj.bias
        x = x + mlp(normalized(x, block.norm2), block.mlp)
    return normalized(x, model.norm)


def qkv_of(block: Any, x: Tensor) -> Tensor:
    return normalized(x, block.norm1) @ block.attn.qkv.weight.T


def exponential(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k / math.sqrt(len(q))).exp()


@pytest.mark.parametrize("stage", STAGES)
@torch.no_grad()
def test_tokens_equal_loops_and_sums(stage: str) -> None:
    model = toy(stage, image_size=(16, 32)).double()
    with torch.no_grad():
        for each in (model.tokens_to_token.attention1, model.tokens_to_token.attention2):
            each.qkv.weight.mul_(0.3)  # otherwise one key has all the weight
    images = torch.randn(1, 3, 16, 32, dtype=torch.float64)
    result = model.tokens(images)
    expected = torch.stack([by_hand(model, image) for image in images])
    assert expected.std() > 0.1
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    head: Any = model.head
    torch.testing.assert_close(model(images), expected[:, 0] @ head.weight.T + head.bias, rtol=0, atol=1e-10)
    torch.testing.assert_close(model.logits(result), model(images))


@pytest.mark.parametrize("split", sorted(set(SOFT_SPLITS)))
def test_soft_split_equals_unfold(split: tuple[int, int, int]) -> None:
    x = torch.randn(2, 5, 32, 16)
    result = soft_split(x.movedim(1, -1), *split)
    side, step, padding = split
    torch.testing.assert_close(result.flatten(1, 2), F.unfold(x, side, padding=padding, stride=step).transpose(1, 2))
    torch.testing.assert_close(result.flatten(1, 2)[1], patches(x[1], *split))
    assert result.shape == (2, 32 // step, 16 // step, 5 * side * side)


def test_drawn_features_estimate_the_kernel_without_bias() -> None:
    """The mean over 4,000 performers with rows from N(0, 1) is exp(q·k) within four standard errors."""
    torch.manual_seed(0)
    stage = TokenPerformer(8, 8, norm_eps=1e-5, dropout=0).double()
    q, k = 0.3 * torch.randn(2, 1, 6, 8, dtype=torch.float64)
    estimates = list[Tensor]()
    with torch.no_grad():
        for _ in range(4000):
            nn.init.normal_(stage.w)
            estimates.append((stage.features(q) @ stage.features(k).transpose(1, 2))[0])
    result, expected = torch.stack(estimates), (q @ k.transpose(1, 2)).exp()[0]
    error = result.std(0) / math.sqrt(len(result))
    assert ((result.mean(0) - expected).abs() < 4 * error).all()
    assert (error < 0.05 * expected).all()  # small enough to detect a wrong kernel
    assert expected.max() / expected.min() > 1.5


def test_with_enough_features_a_performer_is_a_transformer_of_scale_1() -> None:
    torch.manual_seed(0)
    stage = TokenPerformer(8, 8, norm_eps=1e-5, dropout=0).double()
    stage.w = nn.Parameter(torch.randn(200_000, 8, dtype=torch.float64), requires_grad=False)
    q, k, v = 0.3 * torch.randn(3, 1, 6, 8, dtype=torch.float64)
    expected = (q @ k.transpose(1, 2)).softmax(-1) @ v
    torch.testing.assert_close(stage.mix(q, k, v), expected, rtol=0, atol=0.01)


def test_rows_of_performers_are_orthogonal_and_fixed() -> None:
    model = T2T(replace(TOY, stage_width=64))
    for stage in (model.tokens_to_token.attention1, model.tokens_to_token.attention2):
        assert isinstance(stage, TokenPerformer)
        assert stage.w.shape == (32, 64)
        torch.testing.assert_close(stage.w @ stage.w.T, 32 * torch.eye(32), rtol=0, atol=1e-4)
    model.logits(model.tokens(torch.randn(2, 3, 32, 48))).square().sum().backward()
    fixed = {name for name, each in model.named_parameters() if each.grad is None}
    assert fixed == {"pos_embed", "tokens_to_token.attention1.w", "tokens_to_token.attention2.w"}


def test_initial_weights_are_those_of_the_authors() -> None:
    torch.manual_seed(0)
    model = T2T(TOY)
    assert not model(torch.randn(1, 3, 32, 48)).any()  # only the head differs, which is zero
    weight = model.tokens_to_token.project.weight
    assert 0.018 < weight.std() < 0.022
    assert 0.01 < model.cls_token.std() < 0.03
    rows, width = torch.arange(7.0), 16
    for column in (0, 1, 6, 7, 15):
        angle = rows / 10_000 ** (2 * (column // 2) / width)
        torch.testing.assert_close(model.pos_embed[0, :, column], angle.cos() if column % 2 else angle.sin())


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = vitrail.create(name)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert (sum(each.numel() for each in model.parameters()), trained) == PARAMETERS[name]
    assert PRESETS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", GMACS)
def test_gmacs(name: str) -> None:
    with torch.device("meta"):
        summary = vitrail.summarize(vitrail.create(name))
    assert round(summary.macs / 1e9, 1) == GMACS[name]


def test_class_token_output_and_aliases() -> None:
    model = toy()
    images = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(model.encode(images, queries=1), model.tokens(images)[:, :1])
    assert toy(classes=0)(images).shape == (2, 16)
    assert vitrail.list_models("T2T-ViT*")
    with torch.device("meta"):
        assert vitrail.create("T2T-ViT_t-14").config == PRESETS["t2t_vit_t_14"]
        assert vitrail.create("T2T-ViT-7").config == PRESETS["t2t_vit_7"]


@pytest.mark.parametrize("stage", STAGES)
def test_dynamic_model_takes_any_multiple_of_16(stage: str) -> None:
    model = toy(stage, dynamic=True)
    images = torch.randn(2, 3, 64, 16)
    tokens = model.tokens(images)
    assert tokens.shape == (2, 5, 16)
    built = T2T(replace(model.config, image_size=(64, 16)))
    state = model.state_dict() | {"pos_embed": built.pos_embed}
    built.load_state_dict(state)
    assert not torch.allclose(built.eval().tokens(images), tokens)  # resampled, not recomputed
    with pytest.raises(ConfigError, match=r"60×16 pixels; expected a multiple of 16×16.* to 64×16"):
        model(torch.randn(1, 3, 60, 16))


def test_other_image_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"48×48 pixels; expected 32×48, which the model was built for"):
        toy()(torch.randn(1, 3, 48, 48))


def test_stage_dropout_acts_only_in_training() -> None:
    model, images = toy(stage_dropout=0.5), torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(model(images), toy()(images))
    assert not torch.allclose(model.train()(images), model(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", STAGES)
@torch.no_grad()
def test_half_precision(stage: str, dtype: torch.dtype) -> None:
    model, images = add_weight_noise(T2T(replace(TOY, stage=stage))), torch.randn(2, 3, 32, 48)
    expected, result = model(images), model.to(dtype)(images.to(dtype))
    assert result.dtype == dtype
    assert (result.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", STAGES)
def test_autocast(stage: str, dtype: torch.dtype) -> None:
    model, images = add_weight_noise(T2T(replace(TOY, stage=stage))), torch.randn(2, 3, 32, 48)
    with torch.autocast("cpu", dtype):
        result = model(images)
    result.float().square().sum().backward()
    expected = model(images)
    assert (result - expected).abs().max() < 0.1 * expected.abs().max()
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def test_features_may_exceed_float16() -> None:
    stage = T2T(replace(TOY, stage_width=64)).half().tokens_to_token.attention1
    assert isinstance(stage, TokenPerformer)
    largest = stage.features(stage.w[None]).max()  # exp(|w|²/2)/√M, |w|² = M = 32
    assert 65_504 < largest < 2 * math.exp(16) / math.sqrt(32)


@pytest.mark.parametrize("stage", STAGES)
def test_only_our_layout_supports_it(stage: str, tmp_path: Path) -> None:
    model, images = toy(stage), torch.randn(2, 3, 32, 48)
    vitrail.save(model, tmp_path / "ours")
    assert torch.equal(vitrail.load(tmp_path / "ours")(images), model(images))
    other = vitrail.load(tmp_path / "ours", image_size=(48, 64), classes=3, stage_dropout=0.1)
    assert other.pos_embed.shape == (1, 13, 16)
    torch.testing.assert_close(other.pos_embed[:, 0], model.pos_embed[:, 0])
    assert other.tokens(torch.randn(1, 3, 48, 64)).shape == (1, 13, 16)
    with pytest.raises(CheckpointError, match="stage is"):
        vitrail.load(tmp_path / "ours", stage=next(each for each in STAGES if each != stage))


@pytest.mark.parametrize("stage", STAGES)
def test_attention_maps_are_of_the_backbone_only(stage: str) -> None:
    model, images = toy(stage), torch.randn(2, 3, 32, 48)
    assert len(find_attention_layers(model)) == 2
    with capture_attention(model) as captured:
        model(images)
    assert [tuple(each.shape) for each in captured.maps] == [(2, 2, 7, 7)] * 2
    assert (captured.patch_grid, captured.prefix) == ((2, 3), 1)
    with pytest.raises(ConfigError), capture_attention(model.tokens_to_token):
        pass
    assert not model.no_maps_reason


def test_tokens_can_be_merged() -> None:
    model, images = toy(), torch.randn(2, 3, 32, 48)
    assert add_token_merging(model, 1)(images).shape == (2, 5)
