"""BEiT, BEiT-v2 and SimMIM: outputs equal to timm and transformers; files of three libraries both ways; inspection."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.family_checks import mark_most_slow
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from timm.models.beit import Beit as TimmBeit
from torch import Tensor
from transformers import BeitConfig as TransformersConfig
from transformers import BeitForImageClassification, BeitForMaskedImageModeling, BeitModel

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.beit import PRESETS, Beit, BeitConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not specify|cannot store)")
TOY = BeitConfig(image_size=32, patch_size=8, width=32, depth=2, heads=4, classes=5)
PRETRAINED = replace(TOY, shared_bias=True, pool="class", classes=0)
TIMM: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 5,
    "use_abs_pos_emb": False,
    "use_rel_pos_bias": True,
    "init_values": 0.1,
}
OF_PRETRAINING: dict[str, Any] = {
    "use_rel_pos_bias": False,
    "use_shared_rel_pos_bias": True,
    "global_pool": "token",
    "num_classes": 0,
}


def toy(**fields: Any) -> Beit:
    return add_weight_noise(Beit(replace(TOY, layer_scale=0.1, **fields)), std=0.2)


def of_timm(**fields: Any) -> Any:
    return add_weight_noise(TimmBeit(**{**TIMM, **fields}), std=0.2)


def of_transformers(kind: type[Any] = BeitForImageClassification, **fields: Any) -> Any:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 128, "num_labels": 5, "use_relative_position_bias": True}
    return add_weight_noise(kind(TransformersConfig(**{**sizes, **fields})), std=0.2)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 32)))


@pytest.mark.parametrize("name", mark_most_slow(PRESETS))
def test_presets_have_as_many_parameters_as_in_timm(name: str) -> None:
    with torch.device("meta"):
        theirs: Any = timm.create_model(name)
        ours: Any = vitrail.create(name)
    assert sum(each.numel() for each in ours.parameters()) == sum(each.numel() for each in theirs.parameters())
    assert ours.blocks[0].norm1.eps == theirs.blocks[0].norm1.eps
    assert PRESETS[name].layer_scale == theirs.blocks[0].init_values
    assert PRESETS[name].heads == theirs.blocks[0].attn.num_heads


@pytest.mark.parametrize("fields", [{}, OF_PRETRAINING, {"img_size": (16, 40)}], ids=["tuned", "pre-trained", "oblong"])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(fields: dict[str, Any], tmp_path: Path) -> None:
    other = of_timm(**fields)
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    size = fields.get("img_size", (32, 32))
    found = check_round_trip(tmp_path / "weights.pth", tmp_path / "back.pth", to="timm", trained_size=size)
    assert found.report.assumed.keys() == {"preprocessing"}
    x = images(*size)
    assert (found.model(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(found.model.tokens(x), other.forward_features(x), rtol=1e-5, atol=1e-5)
    (expected,) = other.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(found.model.feature_maps(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_gradients_equal_timm(tmp_path: Path) -> None:
    other, x = of_timm(), images()
    torch.save(other.state_dict(), tmp_path / "weights.pth")
    ours = read(tmp_path / "weights.pth").model
    for model in (other, ours):
        model.train()(x).square().sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
    write(ours, tmp_path / "gradients.pth", "timm")
    found = torch.load(tmp_path / "gradients.pth", weights_only=True)
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_the_size_of_oblong_images_must_be_given(tmp_path: Path) -> None:
    torch.save(of_timm(img_size=(16, 40)).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"its positions are not those of a square; expected trained_size="):
        read(tmp_path / "weights.pth")


@pytest.mark.parametrize("config", [TOY, PRETRAINED], ids=["tuned", "pre-trained"])
def test_timm_opens_our_folder(config: BeitConfig, tmp_path: Path) -> None:
    model = add_weight_noise(Beit(replace(config, mlp_width=48)), std=0.2)
    write(model, tmp_path / "folder", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, theirs) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config


def test_files_of_the_authors(tmp_path: Path) -> None:
    """Their files store the index of each offset, those of pre-training also the mask token and the head."""
    other = of_timm(**OF_PRETRAINING)
    extra = {"mask_token": torch.zeros(1, 1, 32), "lm_head.weight": torch.zeros(9, 32), "lm_head.bias": torch.zeros(9)}
    index = {"rel_pos_bias.relative_position_index": torch.zeros(17, 17, dtype=torch.int64)}
    torch.save({"model": {**other.state_dict(), **extra, **index}, "epoch": 1}, tmp_path / "beit.pth")
    found = read(tmp_path / "beit.pth")
    assert (found.layout, found.model.config) == ("timm", PRETRAINED)
    assert set(found.report.ignored) == {*extra, *index}
    assert max_output_difference(found.model, other) <= 1e-5


def test_files_of_simmim(tmp_path: Path) -> None:
    """Pre-trained ones have a decoder next to the encoder; fine-tuned ones are as BEiT's."""
    other = of_timm(**OF_PRETRAINING)
    encoder = {f"encoder.{name}": tensor for name, tensor in other.state_dict().items()}
    extra = {"encoder.mask_token": torch.zeros(1, 1, 32), "decoder.0.weight": torch.zeros(192, 32, 1, 1)}
    extra["encoder.rel_pos_bias.relative_position_index"] = torch.zeros(17, 17, dtype=torch.int64)
    torch.save({"model": {**encoder, **extra}, "optimizer": {}}, tmp_path / "simmim.pth")
    found = read(tmp_path / "simmim.pth")
    assert (found.layout, found.model.config) == ("authors", PRETRAINED)
    assert set(found.report.ignored) == set(extra)
    assert max_output_difference(found.model, other) <= 1e-5
    write(found.model, tmp_path / "back.pth", "authors")
    assert_same_tensors(torch.load(tmp_path / "back.pth", weights_only=True)["model"], encoder)
    with pytest.raises(CheckpointError, match=r"shared_bias is False, which authors cannot represent; expected True"):
        write(toy(), tmp_path / "file.pth", "authors")


SHARED: dict[str, Any] = {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}


@pytest.mark.parametrize("fields", [{}, {**SHARED, "use_mean_pooling": False}], ids=["tuned", "pre-trained"])
def test_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    other = of_transformers(**fields)
    other.save_pretrained(tmp_path / "theirs")
    found = read(tmp_path / "theirs")
    shared: dict[str, Any] = {"shared_bias": True, "pool": "class"} if fields else {}
    assert (found.layout, found.model.config) == ("hf", replace(TOY, norm_eps=1e-12, **shared))

    def run(x: Tensor) -> Tensor:
        return other(x).logits

    assert max_output_difference(found.model, run) <= 1e-5
    write(found.model, tmp_path / "back", "hf")
    assert_same_tensors(read_tensors(tmp_path / "theirs"), read_tensors(tmp_path / "back"))
    other = BeitForImageClassification.from_pretrained(tmp_path / "back").eval()
    assert max_output_difference(found.model, run) <= 1e-5
    save_file(other.state_dict(), tmp_path / "memory.safetensors")  # with the names in memory
    assert max_output_difference(read(tmp_path / "memory.safetensors", norm_eps=1e-12).model, run) <= 1e-5


@torch.no_grad()
def test_transformers_without_a_classifier(tmp_path: Path) -> None:
    other = of_transformers(BeitModel)
    other.save_pretrained(tmp_path / "features")
    assert max_output_difference(read(tmp_path / "features").model, lambda x: other(x).pooler_output) <= 1e-5
    write(read(tmp_path / "features").model, tmp_path / "back", "hf")
    assert_same_tensors(read_tensors(tmp_path / "features"), read_tensors(tmp_path / "back"))
    masked = of_transformers(BeitForMaskedImageModeling, **SHARED, use_mean_pooling=True, use_mask_token=True)
    masked.save_pretrained(tmp_path / "masked")
    found, x = read(tmp_path / "masked"), images()
    assert (found.model.config.classes, found.model.config.pool) == (0, "class")
    predicted = masked.lm_head(found.model.tokens(x)[:, 1:])
    torch.testing.assert_close(predicted, masked(x, torch.zeros(2, 16, dtype=torch.bool)).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [TOY, PRETRAINED], ids=["tuned", "pre-trained"])
def test_other_sizes(config: BeitConfig, tmp_path: Path) -> None:
    """Offsets are resampled when loading as at run time; the three rows of the class token stay."""
    model: Any = add_weight_noise(Beit(config), std=0.2)
    write(model, tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(48, 64))
    assert set(loaded.report.resized.values()) == {"timm positions, 7×7 to 11×15"}
    dynamic, x = Beit(replace(config, dynamic=True)).eval(), images(48, 64)
    dynamic.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.model(x), dynamic(x))
    for name, offsets in model.state_dict().items():
        if name.endswith("offsets"):
            assert torch.equal(loaded.model.state_dict()[name][:, :3], offsets[:, :3])
    with pytest.raises(ConfigError, match=r"33×32 pixels; expected a multiple of 8×8"):
        dynamic(images(33, 32))


@torch.no_grad()
def test_a_bias_is_that_of_its_offset() -> None:
    model: Any = toy(image_size=(16, 24))
    table = model.blocks[0].attn.position_bias
    bias = table((2, 3))[0, 1]  # of head 1
    offsets = table.offsets[0, 3:, 1].reshape(3, 5)
    places = [(row, column) for row in range(2) for column in range(3)]
    for query, (row, column) in enumerate(places, start=1):
        for key, (other_row, other_column) in enumerate(places, start=1):
            assert bias[query, key] == offsets[row - other_row + 1, column - other_column + 2]
    to_patches, to_class, to_itself = table.offsets[0, :3, 1]
    assert (bias[0, 1:] == to_patches).all()
    assert (bias[1:, 0] == to_class).all()
    assert bias[0, 0] == to_itself
    with pytest.raises(ConfigError, match=r"grid \(2, 2\) for 7 tokens; expected \(rows, columns\) of one token less"):
        model.blocks[0].attn(torch.zeros(1, 7, 32), (2, 2))


def test_initial_weights_are_those_of_the_authors() -> None:
    model: Any = Beit(replace(TOY, width=64, stochastic_depth=0.2))
    for number, block in enumerate(model.blocks, start=1):
        assert block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert block.mlp.fc2.weight.std().item() == pytest.approx(0.02 / (2 * number) ** 0.5, rel=0.05)
        assert not block.attn.position_bias.offsets.any()
        assert block.ls2.gamma.unique().tolist() == [pytest.approx(1e-5)]
    assert [block.drop_path.rate for block in model.blocks] == [0, 0.2]


def test_layer_decay_levels() -> None:
    weights = {weight.name: weight for weight in list_weights(toy(shared_bias=True))}
    assert weights["rel_pos_bias.offsets"].level == weights["cls_token"].level == 0
    assert weights["fc_norm.weight"].level == 3
    assert not weights["rel_pos_bias.offsets"].decays


@torch.no_grad()
def test_masked_keys_have_no_influence() -> None:
    for model in (toy(), toy(shared_bias=True)):
        x, grid = model.embed(images())
        mask = torch.ones(17, 17, dtype=torch.bool)
        mask[:, 5] = False
        changed = x.clone()
        changed[:, 5] += 1
        ours, others = model.run(x, grid, mask=mask), model.run(changed, grid, mask=mask)
        torch.testing.assert_close(ours[:, :5], others[:, :5])


PHOTO = np.random.default_rng(0).random((40, 40, 3))


@pytest.mark.parametrize("config", [TOY, PRETRAINED], ids=["tuned", "pre-trained"])
def test_attention_can_be_inspected(config: BeitConfig) -> None:
    model = add_weight_noise(Beit(config), std=0.2)
    subject = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32))
    with torch.no_grad(), capture_attention(model) as captured:
        model(images())
    assert [tuple(each.shape) for each in captured.maps] == [(2, 4, 17, 17)] * 2
    for weights in captured.maps:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    for method in ("rollout", "attention", "norms"):
        assert subject.explain(PHOTO, method).maps.shape == (1, 1, 4, 4)


def test_figures() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=32))
    figures = vitrail.look(subject, [np.random.default_rng(n).random((40, 40, 3)) for n in range(4)])
    assert {"filters", "attention_distance"} <= {each.name for each in figures.figures}


@pytest.mark.slow
@pytest.mark.parametrize("shared_bias", [False, True])
def test_export_for_all_sizes(shared_bias: bool, tmp_path: Path) -> None:
    model, how = toy(dynamic=True, shared_bias=shared_bias), vitrail.Preprocessing(image_size=32)
    _, check = vitrail.export_model(model, tmp_path / "exported", preprocessing=how, dynamic=True)
    assert check.difference <= 1e-4
