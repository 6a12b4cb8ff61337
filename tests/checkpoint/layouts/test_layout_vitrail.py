"""vitrail's own format: a saved model loads unchanged; incomplete or wrong files are refused."""

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.description import Description
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.catalog.external_families import UntrustedCodeError, describe_code, load_external_family

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "own_family.py")
TOYS: dict[str, dict[str, Any]] = {
    "vit": {
        "name": "vit_tiny_patch16_224",
        "registers": 2,
        "positions": "sincos_2d",
        "pool": "map",
        "layer_scale": 0.1,
    },
    "vit, rotary": {"name": "vit_tiny_patch16_224", "positions": "rotary", "head": "mlp", "activation": "swiglu"},
    "deit": {"name": "deit_tiny_distilled_patch16_224"},
    "hybrid": {"name": "vit_tiny_r_s16_p8_224"},
    "without a head": {"name": "ViT-Ti/16", "classes": 0},
}


def toy(key: str = "deit") -> Any:
    fields: dict[str, Any] = {"classes": 3, **TOYS[key]}
    return add_weight_noise(
        vitrail.create(fields.pop("name"), image_size=(64, 32), depth=2, width=16, heads=2, **fields)
    )


@pytest.mark.parametrize("key", TOYS)
def test_save_and_load_give_the_same_model(key: str, tmp_path: Path) -> None:
    model = toy(key)
    vitrail.save(model, tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    loaded = vitrail.load(tmp_path / "a" / "b")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for (name, mine), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.requires_grad == theirs.requires_grad, name
    # the tensors have the memory layout of the file, so sums may round differently
    images = torch.randn(2, 3, 64, 32)
    torch.testing.assert_close(loaded.eval()(images), model(images), rtol=1e-5, atol=1e-6)


def test_the_description_is_saved(tmp_path: Path) -> None:
    preprocessing = Preprocessing(
        image_size=(64, 32), crop=0.875, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    vitrail.save(toy(), tmp_path, preprocessing=preprocessing, labels=["ant", "bee", "æ"], provenance={"data": "mine"})
    checkpoint = vitrail.describe(tmp_path)
    assert checkpoint.preprocessing == preprocessing
    assert checkpoint.labels == ("ant", "bee", "æ")
    assert checkpoint.provenance == {"vitrail": vitrail.__version__, "data": "mine"}
    assert json.loads((tmp_path / "config.json").read_text("utf-8"))["labels"] == ["ant", "bee", "æ"]


def test_dtypes_are_kept(tmp_path: Path) -> None:
    vitrail.save(toy().bfloat16(), tmp_path)
    assert {parameter.dtype for parameter in vitrail.load(tmp_path).parameters()} == {torch.bfloat16}


def test_an_external_family_must_be_trusted_or_passed(tmp_path: Path) -> None:
    family = load_external_family(EXAMPLE)
    model = vitrail.create(f"{EXAMPLE}:resmlp_tiny", image_size=32, depth=1, classes=2)
    vitrail.save(model, tmp_path)
    code = f"{EXAMPLE}:resmlp_tiny"
    assert vitrail.describe(tmp_path).code == code, "its family is known by its module"
    with pytest.raises(UntrustedCodeError, match=rf"add `trust_code` {code}$"):
        vitrail.load(tmp_path)
    assert vitrail.load(tmp_path, trust_code=code).config == model.config
    model.config = replace(model.config, width=384)
    assert describe_code(family, model.config) == f"{EXAMPLE}:resmlp_small", "the nearest preset"
    model.config = replace(model.config, width=192)
    edit_config(tmp_path, code=None)
    with pytest.raises(CheckpointError, match=r"unknown family 'resmlp'; .*needs `trust_code` FILE.py:NAME"):
        vitrail.load(tmp_path)
    assert vitrail.load(tmp_path, trust_code=code).config == model.config, "a folder of an earlier version"
    assert vitrail.load(tmp_path, family=family).config == model.config


def edit_config(folder: Path, **changes: Any) -> None:
    """Edit config.json as a user would, deleting its checksum; None removes a field."""
    path = folder / "config.json"
    data = json.loads(path.read_text("utf-8")) | {"checksum": None} | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}), "utf-8")


def test_old_folders_keep_loading_when_fields_are_added(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    config = dict(vitrail.describe(tmp_path).config)
    for name in ("norm_eps", "dynamic", "layer_scale"):
        del config[name]  # as in an older version
    edit_config(tmp_path, config=config, labels=None, preprocessing=None, provenance=None)
    assert vitrail.load(tmp_path).config == toy().config


def test_config_json_can_be_edited(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    edit_config(tmp_path, labels=["a", "b", "c"])
    assert vitrail.describe(tmp_path).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": ["a"]}, r"config\.json: 1 labels for 3 classes; expected one label per class"),
        (
            {"config": {"image_size": [32, 64]}},
            r"has image_size=\[32, 64\], but the weights were saved with \[64, 32\]",
        ),
        ({"config": {"heads": 4}}, r"has heads=4, but the weights were saved with 2"),
        ({"family": "vit"}, r"has family='vit', but the weights were saved with 'deit'"),
        ({"lables": ["a", "b", "c"]}, r"unknown field 'lables'; did you mean 'labels'\?"),
    ],
)
def test_an_edit_that_would_change_the_model_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        vitrail.load(tmp_path)


@pytest.mark.parametrize("content", [b"{oops", b"\xff\xfe", b"[]", b"[" * 100_000])
def test_an_invalid_config_is_named(content: bytes, tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        vitrail.load(tmp_path)


def test_the_weights_contain_the_description(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path, labels=["a", "b", "c"])
    (tmp_path / "config.json").unlink()
    assert vitrail.describe(tmp_path).labels == ("a", "b", "c")
    assert vitrail.load(tmp_path).config == toy().config


def fail_fsync_at(step: int, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """Let the given call of fsync fail, as on a full disk."""
    calls = 0
    real = os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_an_interrupted_save_leaves_a_complete_model(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = toy("deit"), toy("vit")
    vitrail.save(old, tmp_path)
    fail_fsync_at(step, monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device"):
        vitrail.save(new, tmp_path)
    monkeypatch.undo()
    loaded = vitrail.load(tmp_path).eval()
    expected = old if step == 1 else new  # after the rename, the new weights are the model
    images = torch.randn(1, 3, 64, 32)
    torch.testing.assert_close(loaded(images), expected(images), rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_unwritable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*file"):
        vitrail.save(toy(), tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*: Not a directory"):
        vitrail.save(toy(), tmp_path / "file" / "below")


def test_models_that_cannot_be_loaded_are_not_saved(tmp_path: Path) -> None:
    swapped, whole, empty = toy(), toy(), toy().to("meta")
    swapped.head = torch.nn.Linear(16, 7)
    vitrail.save(whole, tmp_path)
    with pytest.raises(CheckpointError, match=r"the model does not fit its config: 2 of another shape \(head\.weight"):
        vitrail.save(swapped, tmp_path)
    with pytest.raises(CheckpointError, match=r"without values"):
        vitrail.save(empty, tmp_path)
    wrongs: list[dict[str, Any]] = [
        {"labels": [1, 2, 3]},
        {"labels": 3},
        {"labels": ["\ud800"] * 3},
        {"provenance": {"x": float("nan")}},
    ]
    for wrong in wrongs:
        with pytest.raises(CheckpointError):
            vitrail.save(whole, tmp_path, **wrong)
    assert torch.equal(vitrail.load(tmp_path).head.weight, whole.head.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # raised inside torch's compiler
def test_a_compiled_model_is_unwrapped(tmp_path: Path) -> None:
    model = toy()
    compiled: Any = torch.compile(model)
    vitrail.save(compiled, tmp_path)
    assert vitrail.load(tmp_path).config == model.config


def test_files_have_the_default_mode(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    (tmp_path / "reference").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1, "the same mode as other files of the user"


def test_wrong_labels_and_provenance_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 labels for 3 classes; expected one label per class"):
        vitrail.save(toy(), tmp_path, labels=["a", "b"])
    with pytest.raises(CheckpointError, match=r"cannot be written as JSON: .*; expected strings"):
        vitrail.save(toy(), tmp_path, provenance={"when": object()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, r"format 99 of a newer vitrail; expected 2: update vitrail"),
        ({"format": "1"}, r"has no format version"),
        ({"family": "vitt"}, r"unknown family 'vitt'; did you mean 'vit'\?"),
        ({"family": 3}, r"family is 3; expected a text"),
        ({"config": []}, r"config is \[\]; expected an object"),
        ({"config": {"widht": 3}}, r"unknown deit field 'widht'; did you mean 'width'\?"),
        ({"config": {"width": 17, "heads": 2}}, r"width 17 cannot be divided by 2 heads"),
        ({"config": {"depth": 1000000}}, r"1000000 blocks and \d+ tensors; expected more tensors"),
        ({"labels": "abc"}, r"labels is 'abc'; expected a list of strings"),
        ({"preprocessing": {"cropp": 1}}, r"unknown preprocessing field 'cropp'; did you mean 'crop'\?"),
        ({"preprocessing": {"mean": "gray"}}, r"mean is 'gray'; expected a list of numbers"),
        ({"extra": 1}, r"unknown field 'extra'"),
    ],
)
def test_wrong_config_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    save_file(
        load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    )  # without the copy in the header
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        vitrail.load(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["norm.weight"]
    tensors["head.bias"] = torch.zeros(4)
    tensors["more"] = torch.zeros(1, dtype=torch.int64)
    save_file(tensors, path)
    expected = (
        r"1 missing \(norm\.weight\); 1 unexpected \(more\); 1 of another shape \(head\.bias\); 1 not of a floating"
    )
    with pytest.raises(CheckpointError, match=expected):
        vitrail.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64, b"\xff" * 8 + b"{}", b"PK\x03\x04" + b"\x00" * 100])
def test_files_without_weights_are_refused(content: bytes, tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        vitrail.load(tmp_path)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; expected a checkpoint file or folder"):
        vitrail.load(tmp_path / "nowhere")


def test_description_json_round_trip() -> None:
    description = Description(
        family="vit", config={"width": 16}, preprocessing=Preprocessing(), labels=("a",), save="1"
    )
    assert Description.from_json(description.to_json(), "here") == description
    assert asdict(description)["preprocessing"]["mean"] == (0.5, 0.5, 0.5)
