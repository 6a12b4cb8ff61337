"""CaiT's files, timm's and facebook's: timm's models at toy size, under both names, both ways."""

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
from vitrail.checkpoint import read, write
from vitrail.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")


def toy(**fields: Any) -> Any:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
    sizes |= {"num_classes": 5, **fields}
    return add_weight_noise(timm.create_model("cait_xxs24_224", **sizes), std=0.2)


def facebooks(model: Any) -> dict[str, Any]:
    return {"model": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    "fields", [{}, {"num_classes": 0}, {"in_chans": 3, "depth_token_only": 3}], ids=["plain", "no head", "three"]
)
def test_timms_files_are_ours_and_come_back(fields: dict[str, Any], ending: str, tmp_path: Path) -> None:
    theirs = toy(**fields)
    path = tmp_path / f"weights{ending}"
    (save_file if ending == ".safetensors" else torch.save)(theirs.state_dict(), path)
    found = check_round_trip(path, tmp_path / f"back{ending}", to="timm")
    assert found.description.family == "cait"
    assert found.model.config.heads == 4  # the matrices that mix them show it
    assert found.model.config.class_depth == fields.get("depth_token_only", 2)
    assert (found.report.warnings, found.report.assumed.keys()) == ((), {"preprocessing"})
    assert max_output_difference(found.model, theirs) <= 1e-5


@pytest.mark.parametrize("fields", [{}, {"num_classes": 0}, {"mlp_ratio": 2.0, "mlp_ratio_token_only": 2.0}])
def test_facebooks_files_are_ours_and_come_back(fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = toy(**fields)
    torch.save(facebooks(theirs), tmp_path / "XXS24_224.pth")
    found = check_round_trip(tmp_path / "XXS24_224.pth", tmp_path / "back.pth", to="deit")
    assert found.description.family == "cait"
    assert not found.report.warnings
    assert max_output_difference(found.model, theirs) <= 1e-5
    assert all(name.startswith("module.") for name in read_tensors(tmp_path / "back.pth"))


def test_one_becomes_the_other(tmp_path: Path) -> None:
    theirs = toy()
    torch.save(facebooks(theirs), tmp_path / "theirs.pth")
    write(read(tmp_path / "theirs.pth").model, tmp_path / "timm.pth", "timm")
    assert toy().load_state_dict(torch.load(tmp_path / "timm.pth", weights_only=True))
    write(read(tmp_path / "timm.pth").model, tmp_path / "deit.safetensors", "deit")
    found = read(tmp_path / "deit.safetensors")
    assert found.layout == "deit"  # which the file says
    assert max_output_difference(found.model, theirs) <= 1e-5


def test_a_folder_that_timm_opens_by_itself(tmp_path: Path) -> None:
    model = vitrail.create("cait_xxs24_224", image_size=(32, 48), width=48, depth=2, heads=4, mlp_width=96, classes=5)
    add_weight_noise(model, std=0.2)
    how = vitrail.Preprocessing(image_size=(32, 48), crop=0.75, mean=(0.1, 0.2, 0.3))
    write(model, tmp_path / "folder", "timm", preprocessing=how, labels=list("abcde"))
    opened = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    assert max_output_difference(model, opened, (32, 48)) <= 1e-5
    assert resolve_model_data_config(opened)["crop_pct"] == 0.75
    again = read(tmp_path / "folder")
    assert again.model.config == model.config
    assert (again.description.preprocessing, again.description.labels) == (how, tuple("abcde"))
    assert not again.report.warnings


def test_a_folder_of_timms(tmp_path: Path) -> None:
    theirs = toy()
    save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    found = read(tmp_path)
    assert max_output_difference(found.model, theirs) <= 1e-5
    save_for_hf(theirs, str(tmp_path), model_args={"global_pool": "avg"}, safe_serialization=True)
    with pytest.raises(CheckpointError, match="it has pool mean, which the family 'cait' has not"):
        read(tmp_path)


@pytest.mark.parametrize(("layout", "policy"), [("timm", "timm"), ("deit", "deit")])
def test_what_comes_with_the_layout(layout: str, policy: str, tmp_path: Path) -> None:
    theirs = toy()
    torch.save(theirs.state_dict() if layout == "timm" else facebooks(theirs), tmp_path / "weights.pth")
    found = read(tmp_path / "weights.pth", image_size=64, classes=3)
    how = found.description.preprocessing
    assert how is not None
    assert (how.fit, how.crop, how.interpolation, how.mean[0]) == ("short_side", 1.0, "bicubic", 0.485)
    assert found.report.resized == {"pos_embed": f"{policy} positions, 4×4 to 8×8"}
    assert sorted(found.report.initialised) == ["head.bias", "head.weight"]


def test_a_training_checkpoint_with_an_average(tmp_path: Path) -> None:
    now, average = toy(), toy()
    run = {"epoch": 3, "arch": "cait", "state_dict": now.state_dict(), "state_dict_ema": average.state_dict()}
    torch.save(run, tmp_path / "last.pth.tar")
    found = read(tmp_path / "last.pth.tar")
    assert found.layout == "timm"
    assert max_output_difference(found.model, average) <= 1e-5


def test_what_is_not_whole_or_not_a_cait_is_refused(tmp_path: Path) -> None:
    tensors = toy().state_dict()
    path = tmp_path / "weights.pth"
    torch.save({name: tensor for name, tensor in tensors.items() if "only.1.attn.v" not in name}, path)
    with pytest.raises(CheckpointError, match=r"attn\.kv\.\w+ is made of 2 tensors, and only blocks_token_only\.1"):
        read(path)
    torch.save({**tensors, "extra.weight": torch.zeros(2)}, path)
    with pytest.raises(
        CheckpointError, match=r"1 tensors that a timm cait has no place for .* DeiT, CaiT, T2T-ViT, hybrid or"
    ):
        read(path)
    torch.save(tensors, path)
    with pytest.raises(CheckpointError, match=r"12 of another shape \(blocks\.0\.attn\.proj_l\.weight"):
        read(path, heads=2)
    mixed = {name: tensor for name, tensor in tensors.items() if "proj_l" not in name}
    torch.save(mixed, path)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.proj_l\.weight is not there"):
        read(path, heads=4)
