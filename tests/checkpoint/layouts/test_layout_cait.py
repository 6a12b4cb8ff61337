"""CaiT's files of timm and facebook: timm's models at toy size, with both names, in both directions."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.layout_round_trip import check_round_trip, max_output_difference, read_tensors
from support.noisy_weights import add_weight_noise
from timm.data.config import resolve_model_data_config
from timm.models import save_for_hf

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")


def toy(**fields: Any) -> Any:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
    sizes |= {"num_classes": 5, **fields}
    return add_weight_noise(timm.create_model("cait_xxs24_224", **sizes), std=0.2)


def make_facebook_checkpoint(model: Any) -> dict[str, Any]:
    return {"model": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    "fields", [{}, {"num_classes": 0}, {"in_chans": 3, "depth_token_only": 3}], ids=["plain", "no head", "three"]
)
def test_round_trip_of_timms_files(fields: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    theirs = toy(**fields)
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(theirs.state_dict(), path)
    checkpoint = check_round_trip(path, tmp_path / f"back{suffix}", to="timm")
    assert checkpoint.description.family == "cait"
    assert checkpoint.model.config.heads == 4  # from the matrices that mix heads
    assert checkpoint.model.config.class_depth == fields.get("depth_token_only", 2)
    assert (checkpoint.report.warnings, checkpoint.report.assumed.keys()) == ((), {"preprocessing"})
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5


@pytest.mark.parametrize("fields", [{}, {"num_classes": 0}, {"mlp_ratio": 2.0, "mlp_ratio_token_only": 2.0}])
def test_round_trip_of_facebooks_files(fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = toy(**fields)
    torch.save(make_facebook_checkpoint(theirs), tmp_path / "XXS24_224.pth")
    checkpoint = check_round_trip(tmp_path / "XXS24_224.pth", tmp_path / "back.pth", to="deit")
    assert checkpoint.description.family == "cait"
    assert not checkpoint.report.warnings
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    assert all(name.startswith("module.") for name in read_tensors(tmp_path / "back.pth"))


def test_conversion_between_timm_and_facebook(tmp_path: Path) -> None:
    theirs = toy()
    torch.save(make_facebook_checkpoint(theirs), tmp_path / "theirs.pth")
    write(read(tmp_path / "theirs.pth").model, tmp_path / "timm.pth", "timm")
    assert toy().load_state_dict(torch.load(tmp_path / "timm.pth", weights_only=True))
    write(read(tmp_path / "timm.pth").model, tmp_path / "deit.safetensors", "deit")
    checkpoint = read(tmp_path / "deit.safetensors")
    assert checkpoint.layout == "deit"  # from the header
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5


def test_timm_opens_a_written_folder(tmp_path: Path) -> None:
    model = vitrail.create("cait_xxs24_224", image_size=(32, 48), width=48, depth=2, heads=4, mlp_width=96, classes=5)
    add_weight_noise(model, std=0.2)
    preprocessing = vitrail.Preprocessing(image_size=(32, 48), crop=0.75, mean=(0.1, 0.2, 0.3))
    write(model, tmp_path / "folder", "timm", preprocessing=preprocessing, labels=list("abcde"))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (32, 48)) <= 1e-5
    assert resolve_model_data_config(opened)["crop_pct"] == 0.75
    again = read(tmp_path / "folder")
    assert again.model.config == model.config
    assert (again.description.preprocessing, again.description.labels) == (preprocessing, tuple("abcde"))
    assert not again.report.warnings


def test_folders_of_timm_are_read(tmp_path: Path) -> None:
    theirs = toy()
    save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    checkpoint = read(tmp_path)
    assert max_output_difference(checkpoint.model, theirs) <= 1e-5
    save_for_hf(theirs, str(tmp_path), model_args={"global_pool": "avg"}, safe_serialization=True)
    with pytest.raises(CheckpointError, match="it has pool mean, which the family 'cait' does not"):
        read(tmp_path)


@pytest.mark.parametrize(("layout", "policy"), [("timm", "timm"), ("deit", "deit")])
def test_preprocessing_and_policy_of_the_layout(layout: str, policy: str, tmp_path: Path) -> None:
    theirs = toy()
    torch.save(theirs.state_dict() if layout == "timm" else make_facebook_checkpoint(theirs), tmp_path / "weights.pth")
    checkpoint = read(tmp_path / "weights.pth", image_size=64, classes=3)
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert (preprocessing.fit, preprocessing.crop, preprocessing.interpolation, preprocessing.mean[0]) == (
        "short_side",
        1.0,
        "bicubic",
        0.485,
    )
    assert checkpoint.report.resized == {"pos_embed": f"{policy} positions, 4×4 to 8×8"}
    assert sorted(checkpoint.report.initialized) == ["head.bias", "head.weight"]


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    now, average = toy(), toy()
    run = {"epoch": 3, "arch": "cait", "state_dict": now.state_dict(), "state_dict_ema": average.state_dict()}
    torch.save(run, tmp_path / "last.pth.tar")
    checkpoint = read(tmp_path / "last.pth.tar")
    assert checkpoint.layout == "timm"
    assert max_output_difference(checkpoint.model, average) <= 1e-5


def test_incomplete_or_other_models_are_refused(tmp_path: Path) -> None:
    tensors = toy().state_dict()
    path = tmp_path / "weights.pth"
    torch.save({name: tensor for name, tensor in tensors.items() if "only.1.attn.v" not in name}, path)
    with pytest.raises(CheckpointError, match=r"attn\.kv\.\w+ is made of 2 tensors, .* only blocks_token_only\.1"):
        read(path)
    torch.save({**tensors, "extra.weight": torch.zeros(2)}, path)
    with pytest.raises(
        CheckpointError, match=r"1 tensors that are not part of a cait .* DeiT, CaiT, T2T-ViT, hybrid or"
    ):
        read(path)
    torch.save(tensors, path)
    with pytest.raises(CheckpointError, match="heads is 4 in the checkpoint, not 2"):
        read(path, heads=2)
    mixed = {name: tensor for name, tensor in tensors.items() if "proj_l" not in name}
    torch.save(mixed, path)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.proj_l\.weight is missing"):
        read(path, heads=4)
