"""Names of public weights: presets, tags, aliases and Google's file names; presets without weights name the nearest."""

import re
from pathlib import Path

import pytest

from vitrail.base.errors import CheckpointError
from vitrail.models.catalog.preset_costs import list_presets
from vitrail.models.catalog.pretrained import (
    find_nearest_preset_with_weights,
    find_pretrained_weights,
    find_weights_by_file_name,
    find_weights_by_repository,
    list_model_names,
    list_pretrained_weights,
    read_pretrained_table,
)

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
BUCKET_FILE = (
    "augreg/Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_patch16_224", TINY),
        ("ViT-Ti/16", TINY),
        (TINY, TINY),
        ("ViT-Ti/16.augreg_in21k", "vit_tiny_patch16_224.augreg_in21k"),
        ("ViT-Ti/16@384", "vit_tiny_patch16_384.augreg_in21k_ft_in1k"),
        ("vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
        ("vit_small_patch14_reg4_dinov2", "vit_small_patch14_reg4_dinov2.lvd142m"),
        ("DeiT-III-B", "deit3_base_patch16_224.fb_in1k"),
        ("CaiT-XXS24", "cait_xxs24_224.fb_dist_in1k"),
        ("R50+ViT-B/16@384", "vit_base_r50_s16_384.orig_in21k_ft_in1k"),
        (BUCKET_FILE, TINY),
        (f"gs://vit_models/{BUCKET_FILE}", TINY),
        (f"https://storage.googleapis.com/vit_models/{BUCKET_FILE}", TINY),
        ("imagenet21k/ViT-B_16.npz", "vit_base_patch16_224.orig_in21k"),
        ("imagenet21k+imagenet2012/ViT-B_16.npz", "vit_base_patch16_384.orig_in21k_ft_in1k"),
        ("gs://vit_models/sam/ViT-B_32.npz", "vit_base_patch32_224.sam_in1k"),
        ("vit_tinny", None),
        ("weights.pth", None),
        ("runs/demo", None),
        ("ViT-B_16.npz", None),
        ("", None),
        (".", None),
    ],
)
def test_names_of_weights(name: str, expected: str | None) -> None:
    weights = find_pretrained_weights(name)
    assert (None if weights is None else weights.name) == expected


def test_the_table_has_each_name_once_and_only_presets() -> None:
    rows = list(list_pretrained_weights())
    assert {each.preset for each in rows} <= list_presets().keys()
    assert len({each.name for each in rows}) == len({each.repository for each in rows}) == len(rows)
    files = [each.bucket_file for each in rows if each.bucket_file]
    assert len(set(files)) == len(files)
    assert all(each.trained_on and each.license and len(each.mean) == len(each.std) == 3 for each in rows)
    assert all(each.has_imagenet_classes for each in rows if each.top1 is not None)
    unmeasured = [each.preset for each in rows if each.has_imagenet_classes and each.top1 is None]
    assert all(re.match("(tf_)?efficientnet_|mixer_|resnetv2_", preset) for preset in unmeasured)  # not in our sources
    assert all(60 < each.top1 < 91 and each.top1_size for each in rows if each.top1 is not None)


@pytest.mark.parametrize(
    ("preset", "nearest"),
    [
        ("vit_tiny_patch8_224", "vit_tiny_patch16_224"),
        ("vit_base_patch16_512", "vit_base_patch16_384"),
        ("vit_huge_patch14_gap_224", "vit_large_patch32_384"),
        ("deit_tiny_patch16_384", "deit_tiny_patch16_224"),
        ("resnet20_cifar", "resnet18"),
        ("axial_base_patch16_224", "deit3_base_patch16_224"),
    ],
)
def test_a_preset_without_weights_names_the_nearest_that_has_some(preset: str, nearest: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_pretrained_weights(preset)
    for text in (preset, f"is {nearest}. ", f"vitrail.create({preset!r})"):
        assert text in str(caught.value)


def test_every_preset_of_images_has_a_nearest_one_with_weights() -> None:
    for preset, entry in list_presets().items():
        nearest = find_nearest_preset_with_weights(preset)
        if entry["image_size"] is None:
            assert nearest is None
            continue
        assert nearest in read_pretrained_table()
        if preset in read_pretrained_table() and read_pretrained_table()[preset][0].has_imagenet_classes:
            assert nearest == preset


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-Ti/16.augreg_in21", r"ViT-Ti/16: .*'augreg_in21'.*'augreg_in21k'"),
        ("vit_tiny_patch16_224.?", r"expected one of augreg_in21k_ft_in1k, augreg_in21k"),
        ("gs://vit_models/augreg/none.npz", "augreg/none.npz is not among the weights that have a name; download it"),
    ],
)
def test_unknown_tags_and_files_of_the_bucket_are_errors(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_pretrained_weights(name)


def test_weights_by_repository_and_by_file_name() -> None:
    (first, _) = read_pretrained_table()["vit_tiny_patch16_224"]
    assert find_weights_by_repository(f"timm/{TINY}") == first
    assert find_weights_by_repository(BUCKET_FILE) is None
    assert find_weights_by_file_name(Path(f"somewhere/{TINY}.safetensors")) == first
    assert find_weights_by_file_name(Path(TINY)) == first
    assert find_weights_by_file_name(Path("vit_tiny_patch16_224.pth")) is None
    published = find_weights_by_file_name(Path("deit_tiny_patch16_224-a1311bcf.pth"))
    assert published is not None
    assert published.name == "deit_tiny_patch16_224.fb_in1k"


def test_names_with_weights_are_suggested_first() -> None:
    names, table = list_model_names(), read_pretrained_table()
    assert all(name in table for name in names[: len(table)])
    assert set(names) >= {*list_presets(), "ViT-Ti/16"}
