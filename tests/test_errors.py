"""Errors for unknown names suggest the nearest valid name or list the valid ones."""

from vitrail.errors import ConfigError, VitrailError, unknown_name_error


def test_the_nearest_name_is_suggested_in_any_case() -> None:
    assert (
        str(unknown_name_error("model", "vit-b/16", ["ViT-B/16", "ViT-L/16"]))
        == "unknown model 'vit-b/16'; did you mean 'ViT-B/16'?"
    )


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
