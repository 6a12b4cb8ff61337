"""A flipped bit anywhere in a saved model is detected; public files and earlier versions have no checksum."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.checksums import CHECKSUM_KEY, add_checksum_to_header, checksum_tensors, matches_header_checksum

FIELDS: dict[str, Any] = {"image_size": 16, "patch_size": 8, "depth": 1, "width": 16, "heads": 2, "classes": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved") / "model"
    vitrail.save(add_weight_noise(vitrail.create("ViT-Ti/16", **FIELDS)), place, labels=["a", "b", "c"])
    return place


def test_checksum_depends_on_names_shapes_dtypes_values_and_texts() -> None:
    first = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones((), dtype=torch.bfloat16)}
    others: list[tuple[dict[str, torch.Tensor], tuple[str, ...]]] = [
        (first, ("text",)),
        (first, ("te", "xt")),
        ({**first, "a": first["a"].reshape(3, 2)}, ()),
        ({**first, "b": torch.ones(())}, ()),
        ({"a": first["a"], "c": first["b"]}, ()),
        ({**first, "a": first["a"] + 2**-20}, ()),
        ({**first, "d": torch.zeros(0)}, ()),
    ]
    sums = {checksum_tensors(first), *(checksum_tensors(tensors, *texts) for tensors, texts in others)}
    assert len(sums) == 1 + len(others)
    assert checksum_tensors(first) == checksum_tensors({"b": first["b"], "a": first["a"].t().contiguous().t()})


def test_checksum_covers_all_entries_of_the_header() -> None:
    tensors = {"a": torch.ones(3)}
    header = add_checksum_to_header(tensors, {"x": "1"})
    assert matches_header_checksum(tensors, header)
    assert matches_header_checksum(tensors, {"x": "1"}) is None
    assert not matches_header_checksum(tensors, {**header, "x": "2"})
    assert not matches_header_checksum(tensors, {**header, "y": "2"})
    assert not matches_header_checksum({"a": torch.zeros(3)}, header)


def test_flipped_bits_are_detected_or_change_nothing(saved: Path, tmp_path: Path, mutations: int) -> None:
    before = (vitrail.load(saved).state_dict(), vitrail.describe(saved))
    chance, refused = random.Random(0), 0
    for turn in range(max(40, mutations // 50)):
        name = ("model.safetensors", "config.json")[turn % 2]
        for each in saved.iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
        data = bytearray((saved / name).read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / name).write_bytes(data)
        try:
            model, description = vitrail.load(tmp_path), vitrail.describe(tmp_path)
        except CheckpointError:
            refused += 1
            continue
        assert description == before[1], data
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[0][key])
    assert refused > 30


def test_a_flipped_weight_is_refused_with_a_remedy(saved: Path, tmp_path: Path) -> None:
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 64
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"the weights do not match their checksum.*restore it from a copy"):
        vitrail.load(tmp_path)


def test_an_edited_config_needs_its_checksum_deleted(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    data = json.loads((saved / "config.json").read_text("utf-8"))
    data["labels"][0] = "ant"
    (tmp_path / "config.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(CheckpointError, match=r'config\.json: its contents .* delete its "checksum"'):
        vitrail.load(tmp_path)
    del data["checksum"]
    (tmp_path / "config.json").write_text(json.dumps(data), "utf-8")
    assert vitrail.describe(tmp_path).labels == ("ant", "b", "c")


def test_folders_of_earlier_versions_load_without_a_checksum(saved: Path, tmp_path: Path) -> None:
    with safe_open(saved / "model.safetensors", "pt") as file:
        header = file.metadata()
    assert header.pop(CHECKSUM_KEY)
    save_file(load_file(saved / "model.safetensors"), tmp_path / "model.safetensors", header)
    data = json.loads((saved / "config.json").read_text("utf-8"))
    assert data.pop("checksum")
    (tmp_path / "config.json").write_text(json.dumps(data), "utf-8")
    assert vitrail.describe(tmp_path) == vitrail.describe(saved)
    assert vitrail.load(tmp_path).state_dict().keys() == vitrail.load(saved).state_dict().keys()
