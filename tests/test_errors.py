"""Errors for unknown names suggest the nearest valid name; errors for missing packages name the command to run."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from vitrail.errors import ConfigError, VitrailError, find_nearest_name, missing_package_error, unknown_name_error
from vitrail.export import onnx_file, onnx_session, quantise
from vitrail.predict.output import row_formats
from vitrail.train.callbacks import TensorBoardCallback, TrainingStart

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]


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
    ],
)
def test_the_beginning_and_the_words_of_a_name_count(given: str, nearest: str | None) -> None:
    names = ["resnet50", "vit_tiny_patch16_224", "vit_tiny_patch8_224", "ViT-Ti/8", "ViT-Ti/16", "tench", "goldfish"]
    names += ["vit_base_patch14_dinov2", "dough", "Eskimo dog"]
    assert find_nearest_name(given, names) == nearest


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
    assert str(error) == "`peers` timm needs timm, which is not installed; run: pip install 'vitrail[parity]'"
    assert error.fields == ("peers",)
    assert str(missing_package_error("a figure", "matplotlib")).endswith("; run: pip install matplotlib")


def start_tensorboard() -> None:
    TensorBoardCallback().on_start(TrainingStart(steps=1, steps_per_epoch=1))


@pytest.mark.parametrize(
    ("work", "package", "extra"),
    [
        (onnx_file.check_onnx_packages, "onnx", "export"),
        (onnx_file.check_onnx_packages, "onnxscript", "export"),
        (onnx_file.check_onnx_packages, "onnxruntime", "export"),
        (onnx_session.import_onnxruntime, "onnxruntime", "export"),
        (quantise.import_onnx, "onnx", "export"),
        (row_formats.import_pyarrow, "pyarrow", "embed"),
        (start_tensorboard, "tensorboard", "log"),
    ],
)
def test_every_extra_is_named_where_its_package_is_needed(
    work: Callable[[], object], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=rf" needs {package}, .* pip install 'vitrail\[{extra}\]'$"):
        work()
    assert package in PROJECT["optional-dependencies"][extra]


def test_all_has_every_extra_of_a_user() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    named = everything.removeprefix("vitrail[").removesuffix("]").split(",")
    assert {*named} == {*PROJECT["optional-dependencies"]} - {"all", "test", "parity", "docs"}
