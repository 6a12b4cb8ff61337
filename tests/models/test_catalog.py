"""Models by name: presets, aliases, families from outside, and what is said when there is none."""

import sys
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.catalog import families, find
from vitrail.models.vit import ViT

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_family.py"


def test_create_replaces_fields() -> None:
    model = vitrail.create("vit_tiny_patch16_224", classes=10, image_size=(32, 64), depth=1)
    assert isinstance(model, ViT)
    assert model.config.image_size == (32, 64)
    assert model(torch.randn(2, 3, 32, 64)).shape == (2, 10)


def test_aliases_name_presets() -> None:
    for family in families():
        for alias, preset in family.aliases.items():
            assert find(alias) == (family, family.presets[preset]), alias
    assert find("ViT-B/16")[1] == find("vit_base_patch16_224")[1]
    assert find("DeiT-Ti")[1] == find("deit_tiny_patch16_224")[1]
    assert find("R50+ViT-B/16")[1] == find("vit_base_r50_s16_224")[1]


def test_no_two_models_share_a_name() -> None:
    names = [name for family in families() for name in (*family.presets, *family.aliases)]
    assert len(names) == len(set(names))


def test_list_models() -> None:
    everything = vitrail.list_models()
    assert len(everything) == sum(len(family.presets) for family in families())
    assert set(vitrail.list_models("deit*")) == {name for name in everything if name.startswith("deit")}
    assert vitrail.list_models("vit_base_patch*_224") == [
        "vit_base_patch8_224",
        "vit_base_patch14_224",
        "vit_base_patch16_224",
        "vit_base_patch16_gap_224",
        "vit_base_patch16_mean_224",
        "vit_base_patch32_224",
        "vit_base_patch32_mean_224",
    ]
    assert vitrail.list_models("ViT-L/16*") == [f"vit_large_patch16_{pixels}" for pixels in (224, 384, 512)]
    assert vitrail.list_models("nothing*") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_base_patch61_224", r"unknown model 'vit_base_patch61_224'; did you mean 'vit_base_patch16_224'\?"),
        ("VIT-b/16", r"unknown model 'VIT-b/16'; did you mean 'ViT-B/16'\?"),
        ("resnet50", r"unknown model 'resnet50'; "),
        ("", r"unknown model ''; expected one of .* in all\)"),
        (
            "no_such_package:tiny",
            r"cannot import the family 'no_such_package': ModuleNotFoundError: .*; expected a module or a \.py",
        ),
        ("missing.py:tiny", r"cannot import the family 'missing\.py': FileNotFoundError"),
        ("json:tiny", r"'json' has no FAMILY; expected FAMILY = vitrail\.models\.family\.Family"),
        (
            f"{EXAMPLE}:tinny",
            r"unknown model 'tinny'; did you mean 'mixer_tiny'\?|unknown model 'tinny'; expected one of",
        ),
    ],
)
def test_unknown_models(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vitrail.create(name)


def test_unknown_fields() -> None:
    with pytest.raises(VitrailError, match=r"unknown field of vit 'image_sise'; did you mean 'image_size'\?"):
        vitrail.create("ViT-Ti/16", image_sise=384)
    with pytest.raises(ConfigError, match=r"unknown field of vit 'num_classes'; did you mean 'classes'\?"):
        vitrail.create("ViT-Ti/16", num_classes=10)
    with pytest.raises(ConfigError, match=r"unknown field of deit 'registers'; "):
        vitrail.create("DeiT-Ti", registers=4)


def test_a_family_from_outside_by_file_and_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = vitrail.create(f"{EXAMPLE}:mixer_tiny", classes=3, depth=1)
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # pyright: ignore[reportUnknownMemberType]
    by_module = vitrail.create("own_family:mixer_tiny", classes=3, depth=1)
    sys.modules.pop("own_family")
    for model in (by_file, by_module):
        assert model(torch.randn(2, 3, 224, 224)).shape == (2, 3)
    assert vitrail.summarize(by_file).parameters == sum(parameter.numel() for parameter in by_file.parameters())
