"""Exact parameter counts and GMACs to three decimals, as published for these models."""

import pytest
import torch

import vitrail

# from Google's tests (1000 classes, 224 pixels), then from timm, DeiT and torchvision
PARAMETERS = {
    "ViT-Ti/16": 5_717_416,
    "ViT-S/32": 22_878_952,
    "ViT-S/16": 22_050_664,
    "ViT-B/32": 88_224_232,
    "ViT-B/16": 86_567_656,
    "ViT-B/8": 86_576_872,
    "ViT-L/32": 306_535_400,
    "ViT-L/16": 304_326_632,
    "ViT-H/14": 632_045_800,
    "ViT-B/16-gap": 86_566_120,
    "ViT-B/32-gap": 88_222_696,
    "ViT-S/16-gap": 22_049_896,
    "ViT-S/32-gap": 22_878_184,
    "R+ViT-Ti/16": 6_337_704,
    "R26+ViT-S/32": 36_431_912,
    "R26+ViT-B/32": 101_383_976,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-L/32": 328_994_856,
    "vit_tiny_patch16_384": 5_790_376,
    "vit_small_patch16_384": 22_196_584,
    "vit_small_patch32_384": 22_915_432,
    "vit_base_patch16_384": 86_859_496,
    "vit_base_patch32_384": 88_297_192,
    "vit_large_patch16_384": 304_715_752,
    "vit_large_patch14_224": 304_203_752,
    "vit_giant_patch14_224": 1_012_611_432,
    "vit_gigantic_patch14_224": 1_844_440_680,
    "vit_base_r50_s16_384": 98_950_952,
    "vit_large_patch16_512": 305_174_504,
    "vit_huge_patch14_518": 633_470_440,
    "deit_tiny_patch16_224": 5_717_416,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_patch16_224": 22_050_664,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_patch16_224": 86_567_656,
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit_base_patch16_384": 86_859_496,
    "deit_base_distilled_patch16_384": 87_630_032,
    "deit3_small_patch16_224": 22_059_496,
    "deit3_medium_patch16_224": 38_849_512,
    "deit3_base_patch16_224": 86_585_320,
    "deit3_large_patch16_224": 304_374_760,
    "deit3_huge_patch14_224": 632_126_440,
    "cait_xxs24_224": 11_956_264,
    "cait_xxs24_384": 12_029_224,
    "cait_xxs36_224": 17_299_720,
    "cait_xxs36_384": 17_372_680,
    "cait_xs24_384": 26_670_088,
    "cait_s24_224": 46_916_200,
    "cait_s24_384": 47_062_120,
    "cait_s36_384": 68_366_632,
    "cait_m36_384": 271_221_352,
    "cait_m48_448": 356_460_520,
    "ResNet-18": 11_689_512,
    "ResNet-50": 25_557_032,
    "ResNet-101": 44_549_160,
    "ResNet-152": 60_192_808,
    "resnet20_cifar": 269_722,
    "resnet32_cifar": 464_154,
    "resnet56_cifar": 853_018,
    "RegNetY-4GF": 20_646_656,
    "RegNetY-8GF": 39_180_068,
    "RegNetY-12GF": 51_822_544,
    "RegNetY-16GF": 83_590_140,
}

# as published by torchvision, to three decimals
GMACS = {
    "vit_base_patch16_224": 17.564,
    "vit_base_patch16_384": 55.484,
    "vit_base_patch32_224": 4.409,
    "vit_large_patch16_224": 61.555,
    "vit_large_patch16_512": 361.986,
    "vit_large_patch32_224": 15.378,
    "vit_huge_patch14_224": 167.295,
    "vit_huge_patch14_518": 1016.717,
    "resnet18": 1.814,
    "resnet50": 4.089,
    "resnet101": 7.801,
    "resnet152": 11.514,
    "regnety_160": 15.912,
}

# the closed form L·(4·D²·N + 2·D·M·N + 2·N²·D) + n·3·P²·D + D·C gives these to four
MORE_GMACS = {
    "vit_tiny_patch16_224": 1.2537,
    "vit_small_patch16_224": 4.5989,
    "vit_small_patch32_224": 1.1429,
    "vit_base_patch8_224": 78.1483,
    "vit_giant_patch14_224": 267.0315,
    "vit_gigantic_patch14_224": 483.7476,
}


# keras-hub's backbones: these without a head
BACKBONES = {
    "vit_base_patch16_224": 85_798_656,
    "vit_base_patch16_384": 86_090_496,
    "vit_large_patch16_224": 303_301_632,
    "vit_large_patch16_384": 303_690_752,
    "vit_base_patch32_384": 87_528_192,
}


@pytest.mark.parametrize("name", BACKBONES)
def test_parameters_without_a_head(name: str) -> None:
    with torch.device("meta"):
        model = vitrail.create(name, classes=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == BACKBONES[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = vitrail.create(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", GMACS | MORE_GMACS)
def test_gmacs(name: str) -> None:
    with torch.device("meta"):
        gmacs = vitrail.summarize(vitrail.create(name)).macs / 1e9
    assert round(gmacs, 3 if name in GMACS else 4) == (GMACS | MORE_GMACS)[name]
