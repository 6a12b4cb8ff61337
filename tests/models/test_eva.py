"""DINOv3 and EVA-02: outputs equal to timm and transformers, files in three layouts, rotations, inspection."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from torch import Tensor
from transformers import DINOv3ViTConfig, DINOv3ViTModel

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.eva import PRESETS, Eva, EvaConfig, Rotation

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, "classes": 5}
TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
DINO = EvaConfig(**SIZES)
EVA02 = replace(PRESETS["eva02_base_patch14_448"], **SIZES, mlp_width=85)
CASES: dict[str, tuple[str, EvaConfig]] = {
    "dinov3": ("vit_small_patch16_dinov3", DINO),
    "dinov3, biases": ("vit_small_patch16_dinov3_qkvb", replace(DINO, qv_bias=True)),
    "dinov3, swiglu": ("vit_small_plus_patch16_dinov3_qkvb", replace(DINO, qv_bias=True, activation="swiglu")),
    "eva02, small": ("eva02_tiny_patch14_224", replace(EVA02, mlp_norm=False)),
    "eva02, large": ("eva02_base_patch14_448", EVA02),
    "eva": ("eva_giant_patch14_224", replace(EVA02, mlp_norm=False, activation="gelu", mlp_width=139, rotary="none")),
}


def toy(config: EvaConfig = DINO, **fields: Any) -> Eva:
    return add_weight_noise(Eva(replace(config, **fields)), std=0.2)


def of_timm(name: str, **fields: Any) -> Any:
    return add_weight_noise(timm.create_model(name, **{**TIMM, **fields}), std=0.2)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 32)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_those_of_timm(name: str) -> None:
    """All but the depth, of which one block is built: the largest has 7 billion parameters."""
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, depth=1, num_classes=PRESETS[name].classes)
        ours: Any = vitrail.create(name, depth=1)
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters())
    assert theirs.default_cfg["input_size"][1:] == ours.config.image_size
    block = theirs.blocks[0]
    assert (block.attn.num_heads, block.norm1.eps) == (ours.config.heads, ours.config.norm_eps)
    assert (block.init_values or None) == ours.config.layer_scale
    assert (theirs.default_cfg["num_classes"] == 0) == (ours.config.classes == 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(32, 32), (16, 40)], ids=["square", "oblong"])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(case: str, size: tuple[int, int], tmp_path: Path) -> None:
    name, config = CASES[case]
    other = of_timm(name, img_size=size)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    found = check_round_trip(tmp_path / "weights.pth", tmp_path / "back.pth", to="timm", trained_size=size, heads=4)
    assert found.model.config == replace(config, image_size=size)
    assert found.report.assumed.keys() <= {"preprocessing"}
    x = images(*size)
    assert (found.model(x) - other(x)).abs().max() <= 1e-5
    (expected,) = other.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(found.model.feature_maps(x)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["dinov3, swiglu", "eva02, large"])
def test_gradients_equal_timm(case: str, tmp_path: Path) -> None:
    other, x = of_timm(CASES[case][0]), images()
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours = read(tmp_path / "weights.pth", heads=4, trained_size=32).model
    for model in (other, ours):
        model.train()(x).square().sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
    write(ours, tmp_path / "gradients.pth", "timm")
    found = torch.load(tmp_path / "gradients.pth", weights_only=True)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_timm_opens_our_folder(case: str, tmp_path: Path) -> None:
    model = toy(CASES[case][1], pool="class")
    write(model, tmp_path / "folder", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, theirs) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
def test_transformers(gated: bool, tmp_path: Path) -> None:
    """The pooled output is the class token, as in the authors' code; timm's is the mean of the patches."""
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 48, "num_register_tokens": 3, "use_gated_mlp": gated}
    config = DINOv3ViTConfig(**sizes, hidden_act="silu" if gated else "gelu")
    other: Any = add_weight_noise(DINOv3ViTModel(config), std=0.2)
    other.save_pretrained(tmp_path / "theirs")
    found = read(tmp_path / "theirs")
    expected = replace(DINO, registers=3, mlp_width=48, qv_bias=True, pool="class", classes=0)
    assert (found.layout, found.model.config) == (
        "hf",
        replace(expected, activation="swiglu" if gated else "gelu"),
    )

    def run(x: Tensor) -> Tensor:
        return other(x).pooler_output

    assert max_output_difference(found.model, run) <= 1e-5
    write(found.model, tmp_path / "back", "hf")
    theirs = {name: each for name, each in read_tensors(tmp_path / "theirs").items() if not name.endswith("mask_token")}
    assert_same_tensors(theirs, read_tensors(tmp_path / "back"))
    save_file(other.state_dict(), tmp_path / "memory.safetensors")  # with the names in memory
    assert max_output_difference(read(tmp_path / "memory.safetensors", heads=4, trained_size=32).model, run) <= 1e-5
    with pytest.raises(CheckpointError, match=r"pool is 'mean', which .*dinov3_vit cannot represent; expected 'class'"):
        write(toy(classes=0, qv_bias=True), tmp_path / "refused", "hf")


@pytest.mark.parametrize("case", ["dinov3, biases", "dinov3, swiglu"])
def test_files_of_the_authors(case: str, tmp_path: Path) -> None:
    """Facebook's names; the bias of k is stored, but masked."""
    model = toy(CASES[case][1], pool="class", classes=0)
    write(model, tmp_path / "back.pth", "authors")
    tensors = torch.load(tmp_path / "back.pth", weights_only=True)
    assert tensors["blocks.1.attn.qkv.bias"].shape == (96,)
    assert not tensors["blocks.1.attn.qkv.bias"][32:64].any()
    assert tensors["storage_tokens"].shape == (1, 4, 32)
    extra = {"mask_token": torch.zeros(1, 32), "rope_embed.periods": torch.ones(2)}
    extra |= {f"blocks.{n}.attn.qkv.bias_mask": torch.full((96,), torch.nan) for n in (0, 1)}
    torch.save({**tensors, **extra}, tmp_path / "theirs.pth")
    found = read(tmp_path / "theirs.pth", heads=4, trained_size=32)
    assert (found.layout, found.model.config) == ("authors", model.config)
    assert set(found.report.ignored) == set(extra)
    assert max_output_difference(found.model, model) == 0


def test_dinov3_takes_other_sizes_without_a_table(tmp_path: Path) -> None:
    write(toy(), tmp_path / "dino")
    loaded, x = read(tmp_path / "dino", image_size=(48, 64)), images(48, 64)
    assert not loaded.report.resized
    write(toy(EVA02), tmp_path / "eva")
    larger = read(tmp_path / "eva", image_size=(48, 64))
    assert larger.report.resized.keys() == {"pos_embed"}
    for each in (loaded, larger):
        dynamic = Eva(replace(each.model.config, image_size=(32, 32), dynamic=True)).eval()
        dynamic.load_state_dict(read(tmp_path / ("eva" if each is larger else "dino")).model.state_dict())
        torch.testing.assert_close(each.model(x), dynamic(x))


def test_a_score_depends_on_the_offset_of_two_patches() -> None:
    for kind in ("centered", "indexed"):
        rotation, grid = Rotation(8, kind), (5, 6)
        q, k = (torch.randn(1, 1, 1, 8).expand(1, 1, 32, 8) for _ in range(2))  # two prefix tokens
        turned, turned_keys = rotation(q, k, grid)
        scores = (turned @ turned_keys.mT)[0, 0, 2:, 2:].reshape(5, 6, 5, 6)
        torch.testing.assert_close(scores[0, 0, 1, 2], scores[3, 2, 4, 4])
        torch.testing.assert_close(scores[4, 1, 2, 0], scores[2, 5, 0, 4])
        assert (scores[0, 0, 0, 1] - scores[0, 0, 1, 0]).abs() > 1e-4
        assert torch.equal(turned[:, :, :2], q[:, :, :2])


def test_initial_weights() -> None:
    model: Any = Eva(replace(EVA02, width=64, stochastic_depth=0.2))
    for number, block in enumerate(model.blocks, start=1):
        assert block.mlp.fc2.weight.std().item() == pytest.approx(0.02 / (2 * number) ** 0.5, rel=0.05)
        assert not block.attn.qkv.qv_bias.any()
    assert [block.drop_path.rate for block in model.blocks] == [0, 0.2]


def test_a_grid_of_more_tokens_is_refused() -> None:
    model: Any = toy()
    with pytest.raises(ConfigError, match=r"grid \(4, 4\) for 9 tokens; expected \(rows, columns\) of no more tokens"):
        model.blocks[0].attn(torch.zeros(1, 9, 32), (4, 4))


PHOTO = np.random.default_rng(0).random((40, 40, 3))


@pytest.mark.parametrize("config", [DINO, EVA02], ids=["dinov3", "eva02"])
def test_attention_can_be_inspected(config: EvaConfig) -> None:
    model = toy(config)
    with torch.no_grad(), capture_attention(model) as captured:
        model(images())
    tokens = 17 + config.registers
    assert [tuple(each.shape) for each in captured.maps] == [(2, 4, tokens, tokens)] * 2
    for weights in captured.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32))
    for method in ("rollout", "attention", "norms"):
        assert subject.explain(PHOTO, method).maps.shape == (1, 1, 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DINO, EVA02], ids=["dinov3", "eva02"])
def test_export_for_all_sizes(config: EvaConfig, tmp_path: Path) -> None:
    model, how = toy(config, dynamic=True), vitrail.Preprocessing(image_size=32)
    _, check = vitrail.export_model(model, tmp_path / "exported", preprocessing=how, dynamic=True)
    assert check.difference <= 1e-4
