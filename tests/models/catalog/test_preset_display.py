"""What `vitrail models` shows of the presets and their public weights."""

import json

import pytest

from vitrail.base.errors import ConfigError
from vitrail.models.catalog.preset_display import (
    describe_presets,
    find_presets,
    list_comparison_cells,
    list_preset_cells,
)
from vitrail.models.catalog.pretrained import read_pretrained_table


def test_presets_by_pattern_alias_or_part() -> None:
    assert find_presets("vit_tiny_patch16_224") == find_presets("ViT-Ti/16") == ["vit_tiny_patch16_224"]
    assert find_presets("distilled_patch16_384") == find_presets("*distilled_patch16_384")
    assert find_presets("vit_tiny_patch*4", pretrained=True) == ["vit_tiny_patch16_224", "vit_tiny_patch16_384"]
    assert find_presets("*", pretrained=True) == list(read_pretrained_table())
    with pytest.raises(ConfigError, match=r"'resnet20\*' has public weights; .* resnet18"):
        find_presets("resnet20*", pretrained=True)
    with pytest.raises(ConfigError, match=r"'vit_tinny'.*'vit_tiny_patch16_224'"):
        find_presets("vit_tinny")


def test_cells_show_the_default_weights_and_their_top1() -> None:
    names = [
        "vit_tiny_patch8_224",
        "vit_tiny_patch16_224",
        "resnet50",
        "vit_base_patch14_dinov2",
        "vit_large_patch32_224",
    ]
    heading, rows, alignments = list_preset_cells(names)
    assert len(heading) == len(alignments)
    column = heading.index("weights")
    assert [tuple(row[column : column + 2]) for row in rows] == [
        ("", ""),
        ("augreg_in21k_ft_in1k", "75.5"),
        ("a1_in1k", "81.2 @288"),
        ("lvd142m", "features"),
        ("orig_in21k", "features"),
    ]


def test_json_has_all_tags_with_licence_and_training_data() -> None:
    found = json.loads(json.dumps(describe_presets(["vit_base_patch16_224", "vit_tiny_patch8_224"])))
    assert found["vit_tiny_patch8_224"]["weights"] == []
    weights = {each["tag"]: each for each in found["vit_base_patch16_224"]["weights"]}
    assert next(iter(weights)) == "augreg2_in21k_ft_in1k"
    assert weights["mae"]["name"] == "vit_base_patch16_224.mae"
    assert weights["mae"]["repository"] == "timm/vit_base_patch16_224.mae"
    assert (weights["mae"]["license"], weights["mae"]["trained_on"]) == ("cc-by-nc-4.0", "ImageNet-1k")
    assert weights["orig_in21k_ft_in1k"]["top1"] == 81.79


def test_comparison_is_sorted_by_cost() -> None:
    names = ["vit_base_patch16_224", "transformer_base", "vit_tiny_patch16_224"]
    heading, rows, alignments = list_comparison_cells(names)
    assert len(heading) == len(alignments)
    assert [row[0] for row in rows] == ["transformer_base", "vit_tiny_patch16_224", "vit_base_patch16_224"]
    assert rows[1] == ("vit_tiny_patch16_224", "vit", "5.7 M", "1.25", "75.5", "apache-2.0")
    heading, rows, alignments = list_comparison_cells(names, {"vit_tiny_patch16_224": 98.76})
    assert len(heading) == len(alignments)
    assert [row[-1] for row in rows] == ["", "98.8", ""]
