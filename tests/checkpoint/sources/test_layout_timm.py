"""timm's files and folders: its own models at toy size, both ways."""

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
from vitrail.checkpoint import read, write
from vitrail.errors import CheckpointError

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


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", KINDS)
def test_its_models_are_ours_and_come_back(kind: str, ending: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    path = tmp_path / f"weights{ending}"
    save_file(theirs.state_dict(), path) if ending == ".safetensors" else torch.save(theirs.state_dict(), path)
    found = check_round_trip(path, tmp_path / f"back{ending}", to="timm", heads=4, source="timm")
    assert max_output_difference(found.model, theirs) <= 1e-6
    assert len(found.report.matched) == len(theirs.state_dict())


@pytest.mark.parametrize("name", ["vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224"])
def test_hybrids(name: str, tmp_path: Path) -> None:
    theirs = add_weight_noise(timm.create_model(name, img_size=64, embed_dim=32, depth=1, num_heads=4, num_classes=5))
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    found = check_round_trip(tmp_path / "weights.safetensors", tmp_path / "back.safetensors", to="timm", heads=4)
    assert found.description.family == "hybrid"
    assert max_output_difference(found.model, theirs, (64, 64)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_timm_opens_by_itself(kind: str, tmp_path: Path) -> None:
    theirs = toy(kind)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    found = read(tmp_path / "weights.pth", source="timm", heads=4)
    how = vitrail.Preprocessing(image_size=32, crop=0.75, interpolation="bilinear", mean=(0.1, 0.2, 0.3))
    write(found.model, tmp_path / "folder", "timm", preprocessing=how)
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(opened, theirs) == 0
    data = resolve_model_data_config(opened)
    assert data["crop_pct"] == 0.75
    assert data["interpolation"] == "bilinear"
    assert tuple(data["mean"]) == (0.1, 0.2, 0.3)
    again = read(tmp_path / "folder")
    assert again.description.config == found.description.config
    assert again.description.preprocessing == how
    assert not again.report.warnings


def test_the_folder_says_tanh(tmp_path: Path) -> None:
    model = add_weight_noise(
        vitrail.create("ViT-Ti/16", image_size=32, width=32, heads=2, depth=2, activation="gelu_tanh", classes=3)
    )
    write(model, tmp_path / "folder", "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened) <= 1e-6
    assert read(tmp_path / "folder").description.config["activation"] == "gelu_tanh"


def test_a_training_checkpoint_and_wrapped_names(tmp_path: Path) -> None:
    theirs = toy("class")
    wrapped = {f"module.{name}": tensor for name, tensor in theirs.state_dict().items()}
    torch.save(
        {"epoch": 3, "arch": "vit", "state_dict": wrapped, "optimizer": {"state": {}}}, tmp_path / "last.pth.tar"
    )
    found = read(tmp_path / "last.pth.tar", heads=4)
    assert found.description.provenance["source"]["layout"] == "timm"
    assert max_output_difference(found.model, theirs) <= 1e-6


def test_a_patch_kernel_of_old_is_a_matrix(tmp_path: Path) -> None:
    theirs = toy("class")
    tensors = theirs.state_dict()
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].flatten(1)
    torch.save(tensors, tmp_path / "old.pth")
    assert max_output_difference(read(tmp_path / "old.pth", heads=4).model, theirs) <= 1e-6


def test_what_the_file_does_not_say_is_taken_from_its_name_and_said(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_base_patch16_gap_224", depth=1)
    save_file(theirs.state_dict(), tmp_path / "vit_base_patch16_gap_224.some_tag.safetensors")
    found = read(tmp_path / "vit_base_patch16_gap_224.some_tag.safetensors")
    assert found.model.config.heads == 16
    assert found.report.assumed == {"preprocessing": "mean 0.5, crop 0.9, bicubic"}  # the tag is none of timm's


def test_a_model_with_more_than_ours_is_refused_and_not_half_loaded(tmp_path: Path) -> None:
    theirs = toy("class", pre_norm=True)
    save_file(theirs.state_dict(), tmp_path / "clip.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 tensors that a timm vit has no place for \(norm_pre\."):
        read(tmp_path / "clip.safetensors", heads=4)


def test_a_backbone_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    tensors = toy("class").state_dict()
    kept = {name: tensor for name, tensor in tensors.items() if "blocks.1.mlp" not in name}
    save_file(kept, tmp_path / "part.safetensors")
    with pytest.raises(CheckpointError, match=r"4 missing \(blocks\.1\.mlp\.fc1\.weight, .*\) of 32 tensors"):
        read(tmp_path / "part.safetensors", heads=4)


def test_pictures_that_are_no_squares(tmp_path: Path) -> None:
    theirs = toy("class", img_size=(56, 32))
    save_file(theirs.state_dict(), tmp_path / "oblong.safetensors")
    with pytest.raises(CheckpointError, match=r"not a square; expected trained_size=\(rows, columns\)"):
        read(tmp_path / "oblong.safetensors", heads=4)
    found = read(tmp_path / "oblong.safetensors", heads=4, trained_size=(56, 32))
    assert "trained_size" not in found.report.assumed
    asked = read(tmp_path / "oblong.safetensors", heads=4, image_size=(56, 32))
    assert asked.report.assumed["trained_size"] == (56, 32)  # 7×4, but 4×7 has as many places
    assert max_output_difference(found.model, theirs, (56, 32)) <= 1e-6
    write(found.model, tmp_path / "folder", "timm")
    assert read(tmp_path / "folder", image_size=(112, 64)).report.resized.keys() == {"pos_embed"}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 56, 32]


def test_positions_that_can_be_read_in_two_ways(tmp_path: Path) -> None:
    theirs = toy("class", img_size=(48, 64))
    save_file(theirs.state_dict(), tmp_path / "oblong.safetensors")  # 6×8 and the class token, or 7×7 without it
    path = tmp_path / "oblong.safetensors"
    assert read(path, heads=4).report.assumed["prefix_positions"] is False
    with pytest.raises(CheckpointError, match=r"a square, or \(48, 64\) .*; expected prefix_positions=False or True"):
        read(path, heads=4, image_size=(48, 64))
    found = read(path, heads=4, image_size=(48, 64), prefix_positions=True)
    assert max_output_difference(found.model, theirs, (48, 64)) <= 1e-6
    assert not found.report.resized
    other = toy("class", img_size=56, no_embed_class=True)
    save_file(other.state_dict(), tmp_path / "square.safetensors")
    assert max_output_difference(read(tmp_path / "square.safetensors", heads=4).model, other, (56, 56)) <= 1e-6
    larger = read(tmp_path / "square.safetensors", heads=4, image_size=(48, 64), prefix_positions=False)
    assert larger.report.resized.keys() == {"pos_embed"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"global_pool": "avgmax"}, "global_pool is 'avgmax'"), ({"act_layer": "relu"}, "act_layer is 'relu'")],
)
def test_a_card_that_says_what_ours_is_not(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_for_hf(toy("class"), str(tmp_path), model_args={"num_heads": 4, **fields}, safe_serialization=True)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_the_pool_is_in_the_card(tmp_path: Path) -> None:
    theirs = toy("class", global_pool="avg", fc_norm=False)
    args = {"num_heads": 4, "global_pool": "avg", "fc_norm": False}
    save_for_hf(theirs, str(tmp_path / "theirs"), model_args=args, safe_serialization=True)
    found = read(tmp_path / "theirs")
    assert found.model.config.pool == "mean"
    assert max_output_difference(found.model, theirs) <= 1e-6
    write(found.model, tmp_path / "ours", "timm")
    assert read(tmp_path / "ours").model.config == found.model.config
    with pytest.warns(UserWarning, match="timm cannot say pool 'mean'"):
        write(found.model, tmp_path / "file.pth", "timm")


def test_the_same_names_for_another_forward_are_refused_by_name(tmp_path: Path) -> None:
    save_file(toy("class").state_dict(), tmp_path / "vit_base_patch16_rpn_224.tag.safetensors")
    with pytest.raises(CheckpointError, match="norms after its layers; expected a plain ViT or DeiT"):
        read(tmp_path / "vit_base_patch16_rpn_224.tag.safetensors", heads=4)


def test_tensors_that_share_memory_are_loaded_apart(tmp_path: Path) -> None:
    tensors = toy("class").state_dict()
    tensors["blocks.1.norm1.weight"] = tensors["blocks.0.norm1.weight"]
    torch.save(tensors, tmp_path / "tied.pth")
    model = read(tmp_path / "tied.pth", heads=4).model
    with torch.no_grad():
        model.blocks[0].norm1.weight.add_(1)
    assert not torch.equal(model.blocks[0].norm1.weight, model.blocks[1].norm1.weight)
    torch.save(model.state_dict(), tmp_path / "tied.pth")  # in place, over what it was read from
    assert torch.equal(read(tmp_path / "tied.pth", heads=4).model.head.bias, model.head.bias)


def test_its_names_under_a_key_as_facebook_saves(tmp_path: Path) -> None:
    theirs = toy("deit3")
    torch.save({"model": theirs.state_dict()}, tmp_path / "run.pth")
    found = read(tmp_path / "run.pth", heads=4)
    assert found.description.provenance["source"]["layout"] == "timm"
    assert max_output_difference(found.model, theirs) <= 1e-6
