"""Errors for unknown names suggest the nearest valid name; errors for missing packages name the command to run."""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.base.errors import (
    ConfigError,
    VitrailError,
    find_nearest_name,
    format_install_command,
    missing_package_error,
    unknown_name_error,
)
from vitrail.export import onnx_file, onnx_session, quantize
from vitrail.predict.output import resumable_rows
from vitrail.train.callbacks import TensorBoardCallback, TrainingStart

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_nearest_name_is_suggested_in_any_case() -> None:
    assert (
        str(unknown_name_error("model", "vit-b/16", ["ViT-B/16", "ViT-L/16"]))
        == "unknown model 'vit-b/16'; did you mean 'ViT-B/16'?"
    )


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("vit_tinny", "vit_tiny_patch16_224"),
        ("VIT_TINY", "vit_tiny_patch16_224"),
        ("ViT-Ti/6", "ViT-Ti/16"),
        ("Dinov2", "vit_base_patch14_dinov2"),
        ("dog", "Eskimo dog"),
        ("Cow", None),
        ("vit_b61", "ViT-B/16"),
    ],
)
def test_the_beginning_and_the_words_of_a_name_count(given: str, nearest: str | None) -> None:
    names = ["resnet50", "vit_tiny_patch16_224", "vit_tiny_patch8_224", "ViT-Ti/8", "ViT-Ti/16", "tench", "goldfish"]
    names += ["vit_base_patch14_dinov2", "dough", "Eskimo dog", "ViT-B/16"]
    assert find_nearest_name(given, names) == nearest


@pytest.mark.parametrize(
    ("names", "typos", "others"),
    [
        ("dino mae scratch finetune linear-probe", "dion diino mea scrach finetun liner-probe", "nope foo resnet cat"),
        ("ants bees Egyptian_cat goldfish", "ant bes goldfsh egyptian_kat", "wasp dog fly g"),
        ("early-size early-share eval-every", "early-siez earlysize eval-evry", "early-stopping evaluate-now"),
        ("short_side squash", "shortside squahs", "long_side crop"),
        ("env eval export embed", "evn eavl exprot emebd", "run serve test lint"),
    ],
)
def test_only_a_typo_is_corrected(names: str, typos: str, others: str) -> None:
    for typo in typos.split():
        assert find_nearest_name(typo, names.split()) is not None, typo
    for other in others.split():
        assert find_nearest_name(other, names.split()) is None, other


def test_a_class_is_suggested_in_its_own_spelling() -> None:
    error = unknown_name_error("class", "egyptian kat", ["tabby", "Egyptian cat", "West Highland white terrier"])
    assert "'Egyptian cat'" in str(error)


def test_synonyms_are_suggested() -> None:
    error = unknown_name_error("vit field", "embed_dim", ["width", "depth"], synonyms={"embed_dim": "width"})
    assert str(error) == "unknown vit field 'embed_dim'; did you mean 'width'?"
    error = unknown_name_error("mixer field", "reg_tokens", ["width", "depth"], synonyms={"reg_tokens": "registers"})
    assert str(error) == "unknown mixer field 'reg_tokens'; expected one of width, depth"


def test_a_long_list_is_abbreviated() -> None:
    assert str(unknown_name_error("model", "?", [f"m{n}" for n in range(100)])).endswith(
        "m0, m1, m2, m3, m4 and 95 more"
    )


def test_config_error_is_a_vitrail_error() -> None:
    assert issubclass(ConfigError, VitrailError)


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    error = missing_package_error("`peers` timm", "timm", "parity")
    command = format_install_command("parity")
    assert str(error) == f"`peers` timm needs timm, which is not installed; run: {command}"
    assert error.fields == ("peers",)
    assert str(missing_package_error("a figure", "matplotlib")).endswith("; run: pip install matplotlib")


def write_dist_info(folder: Path, origin: Any) -> None:
    """What pip writes when it installs the package, with its direct_url.json if it did not come from an index."""
    info = folder / f"vitrail-{vitrail.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vitrail\nVersion: {vitrail.__version__}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


GIT = {"url": "https://example.org/vitrail.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}


@pytest.mark.parametrize(
    ("origin", "command", "again"),
    [
        (
            {"dir_info": {}},
            "cd 'a clone' && pip install -c constraints.txt '.[text]'",
            "cd 'a clone' && pip install -c constraints.txt .",
        ),
        (
            {"dir_info": {"editable": True}},
            "cd 'a clone' && pip install -c constraints.txt -e '.[text]'",
            "cd 'a clone' && pip install -c constraints.txt -e .",
        ),
        ({"archive_info": {}}, "pip install 'a clone/vitrail.whl[text]'", "pip install 'a clone/vitrail.whl'"),
        (GIT, f"pip install 'vitrail[text] @ git+{GIT['url']}'", f"pip install 'vitrail @ git+{GIT['url']}'"),
        (None, "pip install 'vitrail[text]'", "pip install vitrail"),
    ],
    ids=["folder", "editable", "wheel", "git", "index"],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: Any, command: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "constraints.txt").touch()
    (clone / "vitrail.whl").touch()
    if origin is not None and "url" not in origin:
        origin = {**origin, "url": (clone / "vitrail.whl" if "archive_info" in origin else clone).as_uri()}
    write_dist_info(tmp_path, origin)
    monkeypatch.syspath_prepend(tmp_path)
    assert format_install_command("text") == command.replace("a clone", str(clone))
    assert format_install_command().startswith(again.replace("a clone", str(clone)))
    monkeypatch.chdir(clone)
    assert "cd " not in format_install_command("text")
    (clone / "constraints.txt").unlink()
    assert "-c " not in format_install_command("text")
    (clone / "vitrail.whl").unlink()
    monkeypatch.chdir(tmp_path)
    clone.rmdir()
    if origin is not GIT:  # where it came from is gone
        assert format_install_command("text") == "pip install 'vitrail[text]'"


def start_tensorboard() -> None:
    TensorBoardCallback().on_start(TrainingStart(steps=1, steps_per_epoch=1))


@pytest.mark.parametrize(
    ("work", "package", "extra"),
    [
        (onnx_file.check_onnx_packages, "onnx", "export"),
        (onnx_file.check_onnx_packages, "onnxscript", "export"),
        (onnx_file.check_onnx_packages, "onnxruntime", "export"),
        (onnx_session.import_onnxruntime, "onnxruntime", "export"),
        (quantize.import_onnx, "onnx", "export"),
        (resumable_rows.import_pyarrow, "pyarrow", "embed"),
        (start_tensorboard, "tensorboard", "log"),
    ],
)
def test_every_extra_is_named_where_its_package_is_needed(
    work: Callable[[], object], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=rf" needs {package}, .*; run: {re.escape(format_install_command(extra))}$"):
        work()
    assert package in PROJECT["optional-dependencies"][extra]


def test_all_has_every_extra_of_a_user() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    named = everything.removeprefix("vitrail[").removesuffix("]").split(",")
    assert {*named} == {*PROJECT["optional-dependencies"]} - {"all", "test", "parity", "docs"}
