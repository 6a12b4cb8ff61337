"""LeViT: outputs equal to timm and transformers, other sizes, weights by name and back, inspection layer by layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from timm.models.levit import Levit, LevitDistilled
from torch import Tensor
from transformers import LevitConfig, LevitForImageClassificationWithTeacher

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.levit import LeViT, LeViTConfig
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import has_distillation_head
from vitrail.train.optim import freeze_all_but_last_blocks, list_weights, set_frozen_batch_norms_to_eval

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = LeViTConfig(image_size=80, stages=(2, 1, 1), widths=(32, 48, 64), heads=(2, 3, 4), key_width=8, classes=5)
TIMM: dict[str, Any] = {
    "img_size": 80,
    "embed_dim": (32, 48, 64),
    "key_dim": 8,
    "depth": (2, 1, 1),
    "num_heads": (2, 3, 4),
}
SMALL: dict[str, Any] = {
    "embed_dim": (32, 48, 64),
    "key_dim": 8,
    "num_heads": (2, 3, 4),
    "num_classes": 5,
}  # of timm, at 224 pixels
NUMBERS: dict[str, Any] = {"num_labels": 5}


def toy(**fields: Any) -> LeViT:
    return randomize_batch_norms(add_weight_noise(LeViT(replace(TOY, **fields))))


def theirs(kind: type = LevitDistilled, **fields: Any) -> Any:
    return randomize_batch_norms(add_weight_noise(kind(**{**TIMM, "num_classes": 5, **fields})))


def copy_weights(model: LeViT, other: Any) -> LeViT:
    """Their biases are flat."""
    wanted = model.state_dict()
    model.load_state_dict({name: each.reshape(wanted[name].shape) for name, each in other.state_dict().items()})
    return model


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (80, 80)))


@pytest.mark.parametrize("size", [(80, 80), (64, 96)])
@pytest.mark.parametrize("distilled", [False, True])
@torch.no_grad()
def test_output_and_feature_maps_equal_timm(distilled: bool, size: tuple[int, int]) -> None:
    other = theirs(LevitDistilled if distilled else Levit, img_size=size)
    ours, x = copy_weights(toy(distilled=distilled, image_size=size), other), images(*size)
    assert (ours(x) - other(x)).abs().max() <= 1e-5
    torch.testing.assert_close(ours.tokens(x), other.forward_features(x))
    for mine, its in zip(ours.feature_maps(x), other.forward_intermediates(x, intermediates_only=True), strict=True):
        assert (mine - its).abs().max() <= 1e-5


def test_gradients_and_statistics_equal_timm() -> None:
    other = theirs()
    ours, x = copy_weights(toy(), other), images()
    for model in (other, ours):
        for part in model.modules():
            part.training = True  # timm's train() returns nothing
        model(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad.reshape(expected[name].shape), expected[name], rtol=1e-3, atol=1e-4)
    statistics = dict(other.named_buffers())
    for name, mine in ours.named_buffers():
        torch.testing.assert_close(mine, statistics[name], msg=name)


def test_biases_are_not_kept_after_eval() -> None:
    """timm keeps the biases that it looked up in eval mode, so that later changes of the weights have no effect."""
    other = theirs()
    ours, x = copy_weights(toy(), other), images()
    with torch.no_grad():
        before = other(x), ours(x)
        for model in (other, ours):
            table = model.get_parameter("stages.0.blocks.0.attn.attention_biases")
            table.add_(torch.randn_like(table))
        assert torch.equal(other(x), before[0])
        assert not torch.allclose(ours(x), before[1])


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = LeViT(replace(TOY, stochastic_depth=0.1))
    block: Any = model.get_submodule("stages.0.blocks.0")
    x = torch.randn(2, 25, 32)
    assert torch.equal(block(x, (5, 5)), x)  # branches start as zero
    assert block.drop_path.rate == 0.1


@pytest.mark.parametrize("answer", ["both", "class", "distill"])
@torch.no_grad()
def test_answers_of_the_two_heads(answer: Any) -> None:
    model, x = toy(answer=answer), images()
    first, second = model.head_logits(model.tokens(x))
    torch.testing.assert_close(model(x), {"both": (first + second) / 2, "class": first, "distill": second}[answer])
    assert has_distillation_head(model)
    assert not has_distillation_head(toy(distilled=False))
    assert toy(classes=0)(x).shape == (2, 64)


def test_other_sizes_and_classes(tmp_path: Path) -> None:
    """A loaded model of another size computes the same as a dynamic one, whose biases are resampled in each pass."""
    model = toy()
    write(model, tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(96, 64), classes=3)
    assert loaded.report.resized["stages.1.downsample.attn_downsample.attention_biases"] == "timm positions, 5×5 to 6×4"
    assert {name.split(".")[1] for name in loaded.report.initialized} == {"linear"}  # not the norms of the heads
    dynamic, x = toy(dynamic=True), images(96, 64)
    dynamic.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.model.tokens(x), dynamic.tokens(x))
    table = model.get_parameter("stages.0.blocks.0.attn.attention_biases").detach()
    larger = read(tmp_path / "ours", image_size=144).model.get_parameter("stages.0.blocks.0.attn.attention_biases")
    torch.testing.assert_close(larger[:, 0, 0], table[:, 0, 0], atol=0.02, rtol=0.2)  # distance 0 stays in place
    with pytest.raises(ConfigError, match=r"96×64 pixels; expected 80×80, which the model was built for"):
        model(x)
    with pytest.raises(ConfigError, match=r"90×80 pixels; expected a multiple of 16×16"):
        dynamic(images(90, 80))


def test_a_new_head_can_learn(tmp_path: Path) -> None:
    """The scale of its batch norm is 1, not 0."""
    write(toy(classes=0), tmp_path / "backbone")
    model: Any = read(tmp_path / "backbone", classes=3).model
    assert not model.eval()(images()).any()
    assert model.head.bn.weight.eq(1).all()
    assert model.head.bn.running_var.eq(1).all()


def test_a_batch_of_one_image_is_refused_in_training() -> None:
    assert toy()(images()[:1]).shape == (1, 5)
    with pytest.raises(ConfigError, match=r"a batch of one image in training, which has no statistics; expected at"):
        toy().train()(images()[:1])


@pytest.mark.parametrize("fields", [{}, {"num_classes": 0}], ids=["distilled", "no head"])
def test_round_trip_of_timms_files(fields: dict[str, Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {**SMALL, **fields}
    other = randomize_batch_norms(add_weight_noise(timm.create_model("levit_128s", **arguments)))
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm")
    assert checkpoint.report.assumed.keys() == {"preprocessing"}
    assert max_output_difference(checkpoint.model, other, (224, 224)) <= 1e-5


def test_files_of_timms_convolutional_variant(tmp_path: Path) -> None:
    """The same weights as 1×1 convolutions."""
    other = randomize_batch_norms(add_weight_noise(timm.create_model("levit_conv_128s", **SMALL)))
    save_file(other.state_dict(), tmp_path / "weights.safetensors")
    assert max_output_difference(read(tmp_path / "weights.safetensors").model, other, (224, 224)) <= 1e-5


def test_folders_of_timm(tmp_path: Path) -> None:
    model = toy(convolutions=3)
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (80, 80)) <= 1e-5
    assert read(tmp_path / "folder").model.config == model.config
    with pytest.raises(CheckpointError, match=r"timm opens folders of a LeViT with two heads only"):
        write(toy(distilled=False), tmp_path / "single", "timm")
    torch.save(model.state_dict(), tmp_path / "levit_512.pth")
    with pytest.raises(CheckpointError, match=r"levit_512 has SiLU in place of Hardswish; expected levit_128s"):
        read(tmp_path / "levit_512.pth", source="timm")


def their_transformer(*depths: int) -> Any:
    sizes: dict[str, Any] = {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]}
    config = LevitConfig(**sizes, depths=list(depths), **NUMBERS)
    other = randomize_batch_norms(add_weight_noise(LevitForImageClassificationWithTeacher(config)))
    for part in other.modules():
        part.training = False  # its train() returns nothing
    return other


@pytest.mark.parametrize("depths", [(2, 3, 4), (4, 4, 4)])
def test_folders_of_transformers(depths: tuple[int, ...], tmp_path: Path) -> None:
    other = their_transformer(*depths)
    other.save_pretrained(tmp_path / "theirs")
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf")
    assert checkpoint.model.config.stages == depths
    assert checkpoint.description.preprocessing is not None
    assert checkpoint.description.preprocessing.crop == 0.875
    assert max_output_difference(checkpoint.model, lambda x: other(x).logits, (224, 224)) <= 1e-5
    opened = LevitForImageClassificationWithTeacher.from_pretrained(tmp_path / "back")
    assert_same_tensors(opened.state_dict(), other.state_dict())


def test_processors_of_transformers(tmp_path: Path) -> None:
    """Theirs resizes to 256/224 of its size; the one that is written says so in numbers."""
    their_transformer(2, 3, 4).save_pretrained(tmp_path / "theirs")
    for size in ('{"shortest_edge": 224}', "224"):
        text = f'{{"feature_extractor_type": "LevitFeatureExtractor", "size": {size}, "crop_size": 224, "resample": 3}}'
        (tmp_path / "theirs" / "preprocessor_config.json").write_text(text)
        checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf")
        how = checkpoint.description.preprocessing
        assert how is not None
        assert (how.crop, how.fit, how.interpolation) == (0.875, "short_side", "bicubic")
        assert read(tmp_path / "back").description.preprocessing == how


def test_files_of_the_authors(tmp_path: Path) -> None:
    """They count the layers of all stages."""
    model = toy(image_size=224, stages=(2, 3, 4))
    write(model, tmp_path / "levit.pth", "authors")
    tensors = torch.load(tmp_path / "levit.pth")["model"]
    assert {"patch_embed.6.c.weight", "blocks.0.m.qkv.c.weight", "blocks.1.m.2.bn.running_var"} <= tensors.keys()
    assert {"blocks.4.q.1.c.weight", "blocks.5.m.0.c.weight", "blocks.6.m.proj.1.c.weight"} <= tensors.keys()
    assert {"blocks.21.m.2.c.weight", "head.l.weight", "head_dist.bn.bias"} <= tensors.keys()
    assert len({name.split(".")[1] for name in tensors if name.startswith("blocks")}) == 2 * (2 + 3 + 4) + 2 * 2
    tensors["blocks.0.m.attention_bias_idxs"] = torch.zeros(196, 196)
    torch.save({"model": tensors}, tmp_path / "with_index.pth")
    loaded = read(tmp_path / "with_index.pth")
    assert loaded.layout == "authors"
    assert loaded.model.config == model.config
    assert_same_tensors(loaded.model.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match=r"stages is \(2, 1, 1\), which authors cannot represent"):
        write(toy(), tmp_path / "other.pth", "authors")


def test_layer_decay_and_frozen_norms() -> None:
    model = toy()
    levels = {weight.name: weight.level for weight in list_weights(model)}
    assert levels["stem.conv1.linear.weight"] == 0
    assert levels["stages.1.downsample.attn_downsample.kv.linear.weight"] == 3
    assert levels["head.linear.weight"] == levels["head_dist.bn.weight"] == 7
    decays = {weight.name for weight in list_weights(model) if weight.decays}
    assert not any(name.endswith(("attention_biases", "bn.weight", "bias")) for name in decays)
    freeze_all_but_last_blocks(Classification(model), 0)
    set_frozen_batch_norms_to_eval(model.train())
    assert not model.get_submodule("stages.2.blocks.0.mlp.ln1.bn").training
    assert model.get_submodule("head.bn").training


PHOTO = np.random.default_rng(0).random((84, 84, 3))


def test_maps_by_layer() -> None:
    """Between stages, the tokens of the next grid attend to those of the grid before."""
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=80))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [(2, 25, 25), (2, 25, 25), (4, 9, 25), (3, 9, 9), (6, 4, 9), (4, 4, 4)]
    assert [tuple(each.shape[1:]) for each in captured.maps] == shapes
    assert [captured.grids[layer][0] for layer in range(6)] == [5, 5, 3, 3, 2, 2]
    found = subject.explain(PHOTO, "attention", layer=2, token="2,1").map
    np.testing.assert_allclose(found, captured.maps[2][0].mean(0)[2 * 3 + 1].reshape(5, 5), rtol=1e-4)
    assert subject.explain(PHOTO, "heads", layer=4).maps.shape == (1, 6, 3, 3)
    assert subject.explain(PHOTO, "norms", layer=2).maps.shape == (1, 1, 3, 3)
    assert subject.default_method == "attention"
    changes = "the grid changes from 5×5 to 3×3 between layers 1 and 2"
    with pytest.raises(ConfigError, match=f"^method 'grad-rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "grad-rollout")
    photos = [np.random.default_rng(n).random((84, 84, 3)) for n in range(4)]
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} >= {"filters", "attention_distance", "alignment", "occlusion"}
