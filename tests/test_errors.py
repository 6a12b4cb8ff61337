"""Errors for unknown names suggest the nearest valid name or list the valid ones."""

import pytest

from vitrail.errors import ConfigError, VitrailError, find_nearest_name, unknown_name_error


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
        ("Dog", None),
    ],
)
def test_the_beginning_of_a_name_counts(given: str, nearest: str | None) -> None:
    names = ["resnet50", "vit_tiny_patch16_224", "vit_tiny_patch8_224", "ViT-Ti/8", "ViT-Ti/16", "tench", "goldfish"]
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
