"""SigLIP's image towers, presets of the ViT: outputs equal to timm and transformers, files both ways, inspection."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.family_checks import count_parameters, measure_export_difference
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from torch import Tensor
from transformers import SiglipConfig, SiglipModel, SiglipVisionConfig, SiglipVisionModel

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.models.vit import PRESETS, ViT, ViTConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
NAMES = vitrail.list_models("*siglip*")
TOY = replace(PRESETS["vit_base_patch16_siglip_224"], image_size=32, patch_size=8, width=32, depth=2, heads=4)
TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def test_parameters() -> None:
    assert count_parameters("SigLIP-B/16") == 92_884_224
    for name in ("vit_large_patch16_siglip_256", "vit_so400m_patch14_siglip_224", "vit_giantopt_patch16_siglip_256"):
        with torch.device("meta"):
            theirs = timm.create_model(name)
        assert count_parameters(name) == sum(each.numel() for each in theirs.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_those_of_timm(name: str) -> None:
    """384 pixels are not whole patches of 14 pixels: timm cuts the images, and has the same weights for 378."""
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, depth=1)
        ours: Any = vitrail.create(name, depth=1)
    shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert theirs.default_cfg["input_size"][1:] == ours.config.image_size
    assert theirs.blocks[0].attn.num_heads == ours.config.heads
    tanh = type(theirs.blocks[0].mlp.act).__name__ == "GELUTanh"
    assert ours.config.activation == ("gelu_tanh" if tanh else "gelu")


@pytest.mark.parametrize("pool", ["map", "mean"])
def test_output_equals_timm(pool: str, tmp_path: Path) -> None:
    theirs: Any = timm.create_model(f"vit_base_patch16_siglip_{'' if pool == 'map' else 'gap_'}224", **TIMM)
    save_file(add_weight_noise(theirs, std=0.1).state_dict(), tmp_path / "theirs.safetensors")
    found = check_round_trip(tmp_path / "theirs.safetensors", tmp_path / "back.safetensors", to="timm", heads=4)
    assert found.model.config == replace(TOY, pool=pool)
    assert max_output_difference(found.model, theirs) <= 1e-5
    x = torch.randn(1, 3, 32, 32)
    (expected,) = theirs.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(found.model.feature_maps(x)[0], expected, atol=1e-5, rtol=0)


def test_the_name_of_a_file_tells_the_activation(tmp_path: Path) -> None:
    """All towers were trained with the tanh approximation of GELU; timm runs only some of them with it."""
    path = tmp_path / "vit_base_patch32_siglip_256.v2_webli.safetensors"
    theirs: Any = add_weight_noise(timm.create_model("vit_base_patch32_siglip_256", **TIMM), std=0.1)
    save_file(theirs.state_dict(), path)
    found = read(path, heads=4)
    assert found.model.config == replace(TOY, activation="gelu_tanh")
    assert max_output_difference(found.model, theirs) <= 1e-5


def run(theirs: Any) -> Callable[[Tensor], Tensor]:
    def pool(x: Tensor) -> Tensor:
        return theirs(x).pooler_output

    return pool


def test_tower_of_transformers(tmp_path: Path) -> None:
    theirs: Any = add_weight_noise(SiglipVisionModel(SiglipVisionConfig(**VISION)), std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read(tmp_path / "theirs")
    assert (found.layout, found.model.config) == ("hf", replace(TOY, activation="gelu_tanh"))
    assert max_output_difference(found.model, run(theirs)) <= 1e-5
    write(found.model, tmp_path / "back", "hf")
    names = {name.removeprefix("vision_model."): each for name, each in read_tensors(tmp_path / "theirs").items()}
    assert_same_tensors(names, read_tensors(tmp_path / "back"))
    again = SiglipVisionModel.from_pretrained(tmp_path / "back").eval()
    assert max_output_difference(found.model, run(again)) <= 1e-5
    with pytest.raises(
        CheckpointError, match=r"classes is 5, which .*siglip_vision_model cannot represent; expected 0"
    ):
        write(ViT(replace(TOY, classes=5)), tmp_path / "head", "hf")


def test_both_towers_of_transformers(tmp_path: Path) -> None:
    """Of a model for images and text, the image tower is read."""
    text = {"vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = SiglipConfig(vision_config=VISION, text_config={**text, "max_position_embeddings": 4})
    theirs: Any = add_weight_noise(SiglipModel(config), std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    found = read(tmp_path / "theirs")
    assert found.model.config == replace(TOY, activation="gelu_tanh")
    assert any(name.startswith("text_model.") for name in found.report.ignored)
    assert max_output_difference(found.model, run(theirs.vision_model)) <= 1e-5


def test_other_sizes_and_classes(tmp_path: Path) -> None:
    model = add_weight_noise(ViT(TOY))
    write(model, tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(48, 32), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    assert set(loaded.report.initialized) == {"head.weight", "head.bias"}
    assert loaded.model(torch.randn(2, 3, 48, 32)).shape == (2, 3)


@torch.no_grad()
def test_the_pooled_features_are_a_weighted_mean() -> None:
    """The pool's weights of the patches sum to 1, and are where rollout starts."""
    model: Any = add_weight_noise(ViT(TOY), std=0.1)
    tokens: Tensor = model.tokens(torch.randn(2, 3, 32, 32))
    weights = model.attn_pool.weights(tokens)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32))
    assert subject.explain(np.random.default_rng(0).random((40, 40, 3)), "rollout").maps.shape == (1, 1, 4, 4)


@pytest.mark.slow
def test_exported_model_with_a_head_gives_the_same_logits(tmp_path: Path) -> None:
    assert measure_export_difference(add_weight_noise(ViT(replace(TOY, classes=5)), std=0.1), tmp_path) <= 1e-4


def test_names_in_configs() -> None:
    assert PRESETS["vit_so400m_patch14_siglip_378"] == ViTConfig(
        image_size=378, patch_size=14, width=1152, depth=27, heads=16, mlp_width=4304, classes=0, class_token=False,
        pool="map",
    )  # fmt: skip
