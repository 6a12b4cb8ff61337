"""The description of an export: round trip, and refusal of anything else."""

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from support.toy_exports import LABELS, PREPROCESSING, ExportFinder

from vitrail.base.errors import CheckpointError
from vitrail.export.description import (
    CONFIG_FILE,
    METADATA_KEY,
    ONNX_FILE,
    TORCH_PROGRAM_FILE,
    ExportDescription,
    find_onnx_file,
    is_exported,
    read_description,
)

ABOUT = ExportDescription(
    precision="int8",
    output="logits",
    classes=5,
    preprocessing=PREPROCESSING,
    labels=LABELS,
    multiple=16,
    merge=2,
    agreement={"pictures": 36, "same": 35},
    provenance={"checkpoint": "weights/ö.pth"},
    digest="0123",
)


def change_fields(**fields: Any) -> str:
    return json.dumps({**json.loads(ABOUT.to_json()), **fields})


def test_description_round_trip() -> None:
    assert ExportDescription.from_json(ABOUT.to_json(), "here") == ABOUT
    assert ExportDescription.from_json(change_fields(color="blue"), "here") == ABOUT, "a newer vitrail may add fields"
    assert ExportDescription.from_json(change_fields(agreement=None, labels=None), "here").labels is None


def remove_field(name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(ABOUT.to_json()).items() if key != name})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "does not describe an exported model"),
        ("{}", "does not describe an exported model"),
        ('{"format": 1, "family": "vit", "config": {}}', "does not describe an exported model"),
        (change_fields(exported="yes"), "does not describe an exported model"),
        (change_fields(format=2), "of format 2; expected 1: update vitrail"),
        (change_fields(format=None), "of format None"),
        (change_fields(precision="fp16"), "unknown precision 'fp16'"),
        (remove_field("precision"), "unknown precision None"),
        (change_fields(output="nonsense"), "unknown output 'nonsense'"),
        (remove_field("output"), "unknown output None"),
        (remove_field("classes"), "classes"),
        (change_fields(classes="5"), "classes is '5'"),
        (change_fields(classes=True), "classes is True"),
        (change_fields(classes=-5, labels=None), "classes is -5"),
        (change_fields(multiple=-1), "multiple is -1"),
        (change_fields(merge=1.5), "merge is 1.5"),
        (change_fields(labels=["a"]), "1 labels for 5 classes"),
        (change_fields(labels="abcde"), "labels is 'abcde'"),
        (change_fields(labels=[1, 2, 3, 4, 5]), "labels is [1, 2"),
        (change_fields(agreement={"pictures": 3}), "agreement is {'pictures': 3}"),
        (change_fields(agreement={"pictures": 3, "same": "all"}), "agreement is"),
        (change_fields(agreement=[1, 2]), "agreement is [1, 2]"),
        (change_fields(provenance=[]), "provenance is []"),
        (change_fields(digest=7), "digest is 7"),
        (change_fields(preprocessing=None), "preprocessing is None"),
        (remove_field("preprocessing"), "preprocessing is None"),
        (change_fields(preprocessing={"color": "blue"}), "unknown preprocessing field 'color'"),
        (change_fields(preprocessing={"image_size": "large"}), "image_size is 'large'"),
        (change_fields(preprocessing={"mean": [0.5], "std": [0.5, 0.5]}), "1 means and 2 stds"),
        (change_fields(preprocessing={"std": [0, 1, 1]}), "std is (0, 1, 1)"),
        (change_fields(preprocessing={"mean": [float("nan")] * 3}), "mean is"),
    ],
)
def test_invalid_description_is_refused(text: str, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ExportDescription.from_json(text, "this/config.json")
    assert str(caught.value).startswith("this/config.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def write_files(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_is_exported(tmp_path: Path) -> None:
    assert is_exported(write_files(tmp_path / "a", ONNX_FILE))
    assert is_exported(write_files(tmp_path / "b", TORCH_PROGRAM_FILE))
    assert is_exported("some.onnx")
    config_only = write_files(tmp_path / "c")
    (config_only / CONFIG_FILE).write_text(ABOUT.to_json())
    assert is_exported(config_only), "so that the error names the missing file"
    assert not is_exported(write_files(tmp_path / "d", "model.safetensors", CONFIG_FILE))
    assert not is_exported(write_files(tmp_path / "e", "model.safetensors", CONFIG_FILE, ONNX_FILE)), (
        "hubs may have both"
    )
    assert not is_exported(write_files(tmp_path / "f"))
    assert not is_exported(tmp_path / "none")
    assert not is_exported("hf-hub:owner/model")


def test_find_onnx_file_or_say_what_is_there_instead(tmp_path: Path) -> None:
    assert find_onnx_file(write_files(tmp_path / "a", ONNX_FILE)) == tmp_path / "a" / ONNX_FILE
    assert find_onnx_file(tmp_path / "a" / ONNX_FILE) == tmp_path / "a" / ONNX_FILE
    with pytest.raises(CheckpointError, match=r"contains a program for torch\.export\.load.*expected model\.onnx"):
        find_onnx_file(write_files(tmp_path / "b", TORCH_PROGRAM_FILE))
    with pytest.raises(CheckpointError, match=r"model\.onnx is missing; expected what `vitrail export` wrote"):
        find_onnx_file(write_files(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"none\.onnx is missing"):
        find_onnx_file(tmp_path / "none.onnx")


def test_config_json_overrides_the_metadata_of_the_file(exported: ExportFinder, tmp_path: Path) -> None:
    folder = exported("onnx")
    inside = {each.key: each.value for each in onnx.load(folder / ONNX_FILE).metadata_props}
    about = ExportDescription.from_json((folder / CONFIG_FILE).read_text(), "here")
    assert ExportDescription.from_json(inside[METADATA_KEY], "inside") == about
    assert (about.labels, about.preprocessing, about.classes) == (LABELS, PREPROCESSING, 5)

    shutil.copytree(folder, tmp_path / "own")
    edited = {**json.loads((folder / CONFIG_FILE).read_text()), "labels": [*"vwxyz"]}
    (tmp_path / "own" / CONFIG_FILE).write_text(
        json.dumps({name: edited[name] for name in edited if name != "checksum"})
    )
    assert read_description(tmp_path / "own", inside).labels == tuple("vwxyz")
    assert read_description(tmp_path / "own" / ONNX_FILE, inside).labels == LABELS, "the file was given, not the folder"
    (tmp_path / "own" / CONFIG_FILE).unlink()
    assert read_description(tmp_path / "own", inside).labels == LABELS
    with pytest.raises(CheckpointError, match="has no preprocessing"):
        read_description(tmp_path / "own", {})
    (tmp_path / "own" / CONFIG_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_description(tmp_path / "own", inside)
