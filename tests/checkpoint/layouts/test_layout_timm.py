"""timm's files and folders: its own models at toy size, in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise
from timm.data.config import resolve_model_data_config
from timm.models import save_for_hf  # pyright: ignore[reportUnknownVariableType]

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

TOY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "class": ("vit_tiny_patch16_224", {}),
    "mean, norm after": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "mean, no class token": ("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False, "fc_norm": False}),
    "map": ("vit_tiny_patch16_224", {"global_pool": "map", "class_token": False}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5}),
    "no bias, wide": ("vit_tiny_patch16_224", {"qkv_bias": False, "mlp_ratio": 5}),
    "no head": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "swiglu": ("vit_giant_patch14_dinov2", {"num_classes": 5}),
}


def toy(kind: str, **changes: Any) -> Any:
    name, fields = KINDS[kind]
    fields = {**TOY, **fields, **changes}
    return add_weight_noise(timm.create_model(name, **fields))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_outputs(kind: str, suffix: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    path = tmp_path / f"weights{suffix}"
    save_file(theirs.state_dict(), path) if suffix == ".safetensors" else torch.save(theirs.state_dict(), path)
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm", heads=4, source="timm")
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    assert len(checkpoint.report.matched) == len(theirs.state_dict())


@pytest.mark.parametrize("name", ["vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224"])
def test_round_trip_of_hybrids(name: str, tmp_path: Path) -> None:
    theirs = add_weight_noise(timm.create_model(name, img_size=64, embed_dim=32, depth=1, num_heads=4, num_classes=5))
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm", heads=4)
    assert checkpoint.description.family == "hybrid"
    assert max_output_difference(checkpoint.model, theirs, (64, 64)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_timm_opens_a_written_folder(kind: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", source="timm", heads=4)
    preprocessing = vitrail.Preprocessing(image_size=32, crop=0.75, interpolation="bilinear", mean=(0.1, 0.2, 0.3))
    write(checkpoint.model, tmp_path / "folder", "timm", preprocessing=preprocessing)
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(opened, theirs) == 0
    data = resolve_model_data_config(opened)
    assert data["crop_pct"] == 0.75
    assert data["interpolation"] == "bilinear"
    assert tuple(data["mean"]) == (0.1, 0.2, 0.3)
    again = read(tmp_path / "folder")
    assert again.description.config == checkpoint.description.config
    assert again.description.preprocessing == preprocessing
    assert not again.report.warnings


def test_a_folder_stores_the_activation(tmp_path: Path) -> None:
    model = add_weight_noise(
        vitrail.create("ViT-Ti/16", image_size=32, width=32, heads=2, depth=2, activation="gelu_tanh", classes=3)
    )
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened) <= 1e-6
    assert read(tmp_path / "folder").description.config["activation"] == "gelu_tanh"


def test_training_checkpoints_with_wrapped_names_are_read(tmp_path: Path) -> None:
    theirs = toy("class")
    wrapped = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save(
        {"epoch": 3, "arch": "vit", "state_dict": wrapped, "optimizer": {"state": {}}}, tmp_path / "last.pth.tar"
    )
    checkpoint = read(tmp_path / "last.pth.tar", heads=4)
    assert checkpoint.description.provenance["source"]["layout"] == "timm"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6


def test_old_patch_kernels_are_reshaped(tmp_path: Path) -> None:
    theirs = toy("class")
    tensors = theirs.state_dict()
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].flatten(1)
    torch.save(tensors, tmp_path / "old.pth")
    assert max_output_difference(read(tmp_path / "old.pth", heads=4).model, theirs) <= 1e-6


def test_heads_are_read_from_the_file_name(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_base_patch16_gap_224", depth=1)
    save_file(theirs.state_dict(), tmp_path / "vit_base_patch16_gap_224.some_tag.safetensors")
    checkpoint = read(tmp_path / "vit_base_patch16_gap_224.some_tag.safetensors")
    assert checkpoint.model.config.heads == 16
    # the tag is not one of timm's
    assert checkpoint.report.assumed == {"preprocessing": "mean 0.5, crop 0.9, bicubic", "labels": "imagenet"}


def test_models_with_other_tensors_are_refused(tmp_path: Path) -> None:
    theirs = toy("class", pre_norm=True)
    save_file(theirs.state_dict(), tmp_path / "clip.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 tensors that are not part of a vit .*\(norm_pre\."):
        read(tmp_path / "clip.safetensors", heads=4)


def test_incomplete_models_are_refused(tmp_path: Path) -> None:
    tensors = toy("class").state_dict()
    kept = {name: tensor for name, tensor in tensors.items() if "blocks.1.mlp" not in name}
    save_file(kept, tmp_path / "part.safetensors")
    with pytest.raises(CheckpointError, match=r"4 missing \(blocks\.1\.mlp\.fc1\.weight, .*\) of 32 tensors"):
        read(tmp_path / "part.safetensors", heads=4)


def test_images_that_are_not_square(tmp_path: Path) -> None:
    theirs = toy("class", img_size=(56, 32))
    save_file(theirs.state_dict(), tmp_path / "oblong.safetensors")
    with pytest.raises(CheckpointError, match=r"not a square; expected trained_size=\(rows, columns\)"):
        read(tmp_path / "oblong.safetensors", heads=4)
    checkpoint = read(tmp_path / "oblong.safetensors", heads=4, trained_size=(56, 32))
    assert "trained_size" not in checkpoint.report.assumed
    requested = read(tmp_path / "oblong.safetensors", heads=4, image_size=(56, 32))
    assert requested.report.assumed["trained_size"] == (56, 32)  # 7×4, but 4×7 has the same number of patches
    assert max_output_difference(checkpoint.model, theirs, (56, 32)) <= 1e-6
    write(checkpoint.model, tmp_path / "folder", "timm")
    assert read(tmp_path / "folder", image_size=(112, 64)).report.resized.keys() == {"pos_embed"}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 56, 32]


def test_ambiguous_positions_need_a_field(tmp_path: Path) -> None:
    theirs = toy("class", img_size=(48, 64))
    save_file(theirs.state_dict(), tmp_path / "oblong.safetensors")  # 6×8 and the class token, or 7×7 without it
    path = tmp_path / "oblong.safetensors"
    assert read(path, heads=4).report.assumed["prefix_positions"] is False
    with pytest.raises(CheckpointError, match=r"a square, or \(48, 64\) .*; expected prefix_positions=False or True"):
        read(path, heads=4, image_size=(48, 64))
    checkpoint = read(path, heads=4, image_size=(48, 64), prefix_positions=True)
    assert max_output_difference(checkpoint.model, theirs, (48, 64)) <= 1e-6
    assert not checkpoint.report.resized
    other = toy("class", img_size=56, no_embed_class=True)
    save_file(other.state_dict(), tmp_path / "square.safetensors")
    assert max_output_difference(read(tmp_path / "square.safetensors", heads=4).model, other, (56, 56)) <= 1e-6
    larger = read(tmp_path / "square.safetensors", heads=4, image_size=(48, 64), prefix_positions=False)
    assert larger.report.resized.keys() == {"pos_embed"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"global_pool": "avgmax"}, "global_pool is 'avgmax'"), ({"act_layer": "relu"}, "act_layer is 'relu'")],
)
def test_unsupported_model_args_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_for_hf(toy("class"), str(tmp_path), model_args={"num_heads": 4, **fields}, safe_serialization=True)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_a_folder_stores_the_pool(tmp_path: Path) -> None:
    theirs = toy("class", global_pool="avg", fc_norm=False)
    args = {"num_heads": 4, "global_pool": "avg", "fc_norm": False}
    save_for_hf(theirs, str(tmp_path / "theirs"), model_args=args, safe_serialization=True)
    checkpoint = read(tmp_path / "theirs")
    assert checkpoint.model.config.pool == "mean"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
    write(checkpoint.model, tmp_path / "ours", "timm")
    assert read(tmp_path / "ours").model.config == checkpoint.model.config
    with pytest.warns(UserWarning, match="timm cannot store pool='mean'"):
        write(checkpoint.model, tmp_path / "file.pth", "timm")


def test_incompatible_models_are_refused_by_name(tmp_path: Path) -> None:
    save_file(toy("class").state_dict(), tmp_path / "vit_base_patch16_rpn_224.tag.safetensors")
    with pytest.raises(CheckpointError, match="post-norm blocks; expected a plain ViT or DeiT"):
        read(tmp_path / "vit_base_patch16_rpn_224.tag.safetensors", heads=4)


def test_tensors_that_share_memory_are_separated(tmp_path: Path) -> None:
    tensors = toy("class").state_dict()
    tensors["blocks.1.norm1.weight"] = tensors["blocks.0.norm1.weight"]
    torch.save(tensors, tmp_path / "tied.pth")
    model = read(tmp_path / "tied.pth", heads=4).model
    with torch.no_grad():
        model.blocks[0].norm1.weight.add_(1)
    assert not torch.equal(model.blocks[0].norm1.weight, model.blocks[1].norm1.weight)
    torch.save(model.state_dict(), tmp_path / "tied.pth")  # over the file that it was read from
    assert torch.equal(read(tmp_path / "tied.pth", heads=4).model.head.bias, model.head.bias)


def test_timms_names_under_a_key_are_read(tmp_path: Path) -> None:
    theirs = toy("deit3")
    torch.save({"model": theirs.state_dict()}, tmp_path / "run.pth")
    checkpoint = read(tmp_path / "run.pth", heads=4)
    assert checkpoint.description.provenance["source"]["layout"] == "timm"
    assert max_output_difference(checkpoint.model, theirs) <= 1e-6
