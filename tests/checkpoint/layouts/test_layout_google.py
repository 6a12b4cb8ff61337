"""Google's .npz files of every kind, compared with an independent forward pass in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.google_vit_reference import forward, random_weights
from support.google_vit_reference import tokens as reference_tokens
from support.layout_round_trip import assert_same_tensors, check_round_trip, read_tensors
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

VARIANTS: dict[str, dict[str, Any]] = {
    "original": {"layout": "original"},
    "original, pre_logits": {"layout": "original", "pre_logits": True},
    "original, mean": {"layout": "original", "pool": "gap"},
    "original, no head": {"layout": "original", "head": False},
    "original, pre_logits, no head": {"layout": "original", "head": False, "pre_logits": True},
    "optimizer": {"layout": "optimizer"},
    "big_vision": {"layout": "big_vision"},
    "big_vision, scan": {"layout": "big_vision", "scan": True, "depth": 3},
    "big_vision, map": {"layout": "big_vision", "pool": "map"},
    "big_vision, mean, scan": {"layout": "big_vision", "pool": "gap", "scan": True},
    "big_vision, pre_logits": {"layout": "big_vision", "pre_logits": True},
    "two towers": {"layout": "two_tower", "pool": "map", "head": False},
    "two towers, scan": {"layout": "two_tower", "pool": "token", "scan": True},
    "hybrid, root": {"layout": "original", "stages": (), "patch": 2, "mlp": 128},
    "hybrid, stages": {"layout": "original", "stages": (2, 1), "patch": 1, "mlp": 128},
    "hybrid, four stages": {"layout": "optimizer", "stages": (1, 1, 1, 1), "patch": 1, "mlp": 128, "image": (64, 64)},
}


def save_random_weights(path: Path, **variant: Any) -> dict[str, Any]:
    weights = random_weights(**variant)
    save_arrays(path, weights)
    return weights


def save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_and_outputs_of_all_variants(variant: str, tmp_path: Path) -> None:
    weights = save_random_weights(tmp_path / "weights.npz", **VARIANTS[variant])
    text = ("params/txt/", "params/t", "params/b")  # the text tower
    checkpoint = check_round_trip(tmp_path / "weights.npz", tmp_path / "back.npz", to="google", without=text)
    images = torch.randn(2, 3, *VARIANTS[variant].get("image", (32, 32)))
    with torch.no_grad():
        mine = checkpoint.model.double()(images.double())
    theirs = torch.from_numpy(forward(weights, images.movedim(1, -1).numpy()))
    assert mine.shape == theirs.shape
    assert theirs.std() > 0.01
    exact = 1e-5 if "hybrid" in variant else 1e-6  # filters are standardized in float32
    torch.testing.assert_close(mine, theirs.double(), rtol=0, atol=exact)
    with torch.no_grad():
        mine = checkpoint.model.tokens(images.double())
    theirs = torch.from_numpy(reference_tokens(weights, images.movedim(1, -1).numpy()))
    torch.testing.assert_close(mine, theirs.double(), rtol=0, atol=1e-5)


def test_preprocessing_and_policy_of_the_layout(tmp_path: Path) -> None:
    save_random_weights(tmp_path / "weights.npz", layout="original")
    checkpoint = read(tmp_path / "weights.npz")
    config = checkpoint.model.config
    assert (config.activation, config.norm_eps, config.heads) == ("gelu_tanh", 1e-6, 4)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.fit, preprocessing.crop, preprocessing.interpolation, preprocessing.mean) == (
        "squash",
        1.0,
        "bilinear",
        (0.5, 0.5, 0.5),
    )
    assert checkpoint.description.resampling == "google"
    assert "google positions" in read(tmp_path / "weights.npz", image_size=48).report.resized["pos_embed"]


def test_a_head_of_zeros_gives_a_warning(tmp_path: Path) -> None:
    weights = random_weights(layout="original", pre_logits=True)
    weights["head/kernel"] *= 0
    weights["head/bias"] *= 0
    save_arrays(tmp_path / "imagenet21k.npz", weights)
    assert any("head is all zeros" in each for each in read(tmp_path / "imagenet21k.npz").report.warnings)
    with pytest.warns(UserWarning, match="head is all zeros"):
        vitrail.load(tmp_path / "imagenet21k.npz")
    assert not read(tmp_path / "imagenet21k.npz", classes=0).report.warnings


def test_bfloat16_is_read_and_written(tmp_path: Path) -> None:
    weights = random_weights(layout="big_vision")
    halves = {name: torch.from_numpy(array).bfloat16() for name, array in weights.items()}
    arrays = {name: tensor.view(torch.int16).numpy().view("V2") for name, tensor in halves.items()}
    save_arrays(tmp_path / "half.npz", arrays)
    checkpoint = read(tmp_path / "half.npz")
    assert checkpoint.model.head.weight.dtype == torch.bfloat16
    assert torch.equal(checkpoint.model.head.bias, halves["params/head/bias"])
    write(checkpoint.model, tmp_path / "back.npz", "google", provenance=checkpoint.description.provenance)
    with np.load(tmp_path / "half.npz") as one, np.load(tmp_path / "back.npz") as other:
        assert sorted(one.files) == sorted(other.files)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one.files)


def test_optimizer_state_is_ignored(tmp_path: Path) -> None:
    weights = random_weights(layout="optimizer")
    more = {"opt/state/step": np.array(3), "opt/state/param_states/cls/grad_ema": np.zeros(3), "epoch": np.array(1)}
    save_arrays(tmp_path / "run.npz", {**weights, **more})
    checkpoint = read(tmp_path / "run.npz")
    assert sorted(checkpoint.report.ignored) == sorted(more)


def test_models_are_written_in_a_variant_that_supports_them(tmp_path: Path) -> None:
    toy: dict[str, Any] = {"image_size": 32, "width": 32, "heads": 2, "depth": 2, "activation": "gelu_tanh"}
    for fields, key in (
        ({}, "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"),
        ({"prefix_positions": False}, "params/Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"),
        ({"pool": "map", "class_token": False}, "params/MAPHead_0/probe"),
    ):
        model = vitrail.create("ViT-Ti/16", **toy, **fields)
        write(model, tmp_path / "ours.npz", "google")
        assert key in read_tensors(tmp_path / "ours.npz")
        again = read(tmp_path / "ours.npz")
        assert again.model.config == model.config
        assert_same_tensors(again.model.state_dict(), model.state_dict())


def test_unsupported_models_are_refused_and_not_written(tmp_path: Path) -> None:
    toy: dict[str, Any] = {"image_size": 32, "width": 32, "heads": 2, "depth": 1}
    for name, fields, message in (
        ("DeiT-Ti-distilled", {}, "distilled is True, which google cannot represent; expected False"),
        ("ViT-Ti/16", {"registers": 2}, "registers is 2"),
        ("ViT-Ti/16", {"pool": "mean"}, "class_token is True, which google cannot represent; expected False"),
        ("ViT-Ti/16", {"positions": "rotary"}, "positions is 'rotary'"),
        ("ViT-Ti/16", {"activation": "swiglu"}, "activation is 'swiglu'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            write(vitrail.create(name, **toy, **fields), tmp_path / "ours.npz", "google")
    with pytest.raises(CheckpointError, match=r"has the suffix '\.pth'; expected a file \.npz"):
        write(vitrail.create("ViT-Ti/16", **toy), tmp_path / "ours.pth", "google")
    assert list(tmp_path.iterdir()) == []


def test_wrong_names_and_shapes_are_refused(tmp_path: Path) -> None:
    weights = random_weights(layout="original")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/kernel": None}, "is made of 3 tensors"),
        ({"Transformer/encoderblock_1/LayerNorm_2/scale": None}, r"1 missing \(blocks\.1\.norm2\.weight\)"),
        ({"Transformer/posembed_input/pos_embedding": None}, "has no Transformer/posembed_input/pos_embedding"),
        (
            {"embedding/kernel": np.zeros((3, 4), np.float32)},
            "cannot be made of embedding/kernel",
        ),
        ({"head/bias": np.zeros(7, np.float32)}, r"1 of another shape \(head\.bias\)"),
        ({"new/kernel": np.zeros(7, np.float32)}, r"1 tensors that are not part of a vit .*\(new/kernel\)"),
    ]
    for change, message in changes:
        arrays = {name: array for name, array in {**weights, **change}.items() if array is not None}
        save_arrays(tmp_path / "weights.npz", arrays)
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "weights.npz")


def test_writing_a_deit_warns_about_lost_fields(tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("DeiT-Ti", image_size=32, depth=2, classes=5), 0.3)
    preprocessing = vitrail.Preprocessing(image_size=32, mean=(0.485, 0.456, 0.406))
    with pytest.warns(UserWarning, match="google") as caught:
        write(model, tmp_path / "deit.npz", "google", preprocessing=preprocessing, labels=list("abcde"))
    messages = " ".join(str(each.message) for each in caught)
    assert "google cannot store activation='gelu'" in messages
    assert "google cannot store mean=(0.485, 0.456, 0.406), and its readers use (0.5, 0.5, 0.5)" in messages
    assert "google cannot store labels" in messages


def test_given_heads_must_not_contradict_the_file(tmp_path: Path) -> None:
    save_random_weights(tmp_path / "weights.npz", layout="original")
    with pytest.raises(CheckpointError, match=r"heads is 2, but the file says 4; expected the same"):
        read(tmp_path / "weights.npz", heads=2)
