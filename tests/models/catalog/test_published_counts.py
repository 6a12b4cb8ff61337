"""Exact parameter counts and GMACs to three decimals, as published for these models."""

from collections.abc import Iterable

import torch

import vitrail
from vitrail.models.catalog.preset_costs import PresetListing, list_presets, resolve_alias

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
    "ViT-b/32": 22_878_952,
    "ViT-b/32@384": 22_915_432,
    "ViT-B/16-gap": 86_566_120,
    "ViT-B/32-gap": 88_222_696,
    "ViT-S/16-gap": 22_049_896,
    "ViT-S/32-gap": 22_878_184,
    "R+ViT-Ti/16": 6_337_704,
    "R26+ViT-S/32": 36_431_912,
    "R26+ViT-B/32": 101_383_976,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-L/32": 328_994_856,
    "R50+ViT-B/32": 110_945_832,
    "R50+ViT-B/32@384": 111_018_792,
    "R50+ViT-L/16": 316_483_624,
    "R50+ViT-L/16@384": 316_872_744,
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
    # of timm, or of the authors' code
    "cct_2_3x2_32": 283_723,
    "cct_4_3x2_32": 482_123,
    "cct_6_3x1_32": 3_233_803,
    "cct_7_3x1_32": 3_760_139,
    "cct_7_3x2_32": 3_853_259,
    "cct_14_7x2_224": 22_367_273,
    "cct_14_7x2_384": 22_513_193,
    "ConvNeXt-T": 28_589_128,
    "ConvNeXt-B": 88_591_464,
    "CrossFormer-T": 27_776_794,
    "CrossFormer-S": 30_657_394,
    "CrossFormer-B": 51_971_554,
    "CrossFormer-L": 91_971_184,
    "CrossFormer++-S": 23_325_340,
    "CrossFormer++-B": 51_994_594,
    "CrossFormer++-L": 92_001_904,
    "CrossFormer++-H": 95_962_944,
    "cvt_13_224": 19_997_480,
    "cvt_13_384": 19_997_480,
    "cvt_21_224": 31_622_696,
    "cvt_21_384": 31_622_696,
    "cvt_w24_384": 277_196_392,
    "levit_128s": 7_777_058,
    "levit_128": 9_213_936,
    "levit_192": 10_947_069,
    "levit_256": 18_893_876,
    "levit_384": 39_128_836,
    "MaxViT-T": 30_916_528,
    "MaxViT-S": 68_927_956,
    "MaxViT-B": 119_467_708,
    "MaxViT-L": 211_785_560,
    "MaxViT-T@384": 30_977_008,
    "MaxViT-S@384": 69_018_676,
    "MaxViT-B@384": 119_653_468,
    "MaxViT-L@384": 212_033_240,
    "MaxViT-XL@384": 475_323_472,
    "maxvit_t": 30_919_624,
    "NesT-T": 17_057_608,
    "NesT-S": 38_351_176,
    "NesT-B": 67_723_368,
    "RegionViT-Ti": 13_842_676,
    "RegionViT-S": 30_586_618,
    "RegionViT-M": 41_215_906,
    "RegionViT-B": 72_747_232,
    "regionvit_small_w14_224": 31_354_714,
    "ScalableViT-S": 32_000_472,
    "ScalableViT-B": 81_881_624,
    "ScalableViT-L": 109_288_840,
    "SepViT-Lite": 3_661_128,
    "SepViT-T": 31_182_856,
    "SepViT-S": 46_570_504,
    "SepViT-B": 82_377_064,
    "Swin-T": 28_288_354,
    "Swin-S": 49_606_258,
    "Swin-B": 87_768_224,
    "Swin-L": 196_532_476,
    "SwinV2-T/8": 28_347_154,
    "CrossViT-Ti": 7_014_800,
    "CrossViT-S": 26_856_272,
    "CrossViT-B": 105_025_232,
    "CrossViT-9": 8_553_296,
    "CrossViT-15": 27_528_464,
    "CrossViT-18": 43_271_408,
    "CrossViT-9†": 8_776_592,
    "CrossViT-15†": 28_209_008,
    "CrossViT-18†": 44_266_976,
    "CrossViT-15†@408": 28_500_080,
    "CrossViT-18†@408": 44_606_560,
    "deepvit_patch16_224_re_attn_16b": 24_426_664,
    "deepvit_patch16_224_re_attn_24b": 36_261_448,
    "deepvit_patch16_224_re_attn_32b": 48_096_232,
    "DeepViT-S": 27_312_632,
    "DeepViT-L": 58_883_708,
    "vit_small_patch16_18x2_224": 64_665_448,
    "vit_base_patch16_18x2_224": 256_731_880,
    "deit_small_patch16_18x2_LS": 64_665_064,
    "deit_base_patch16_18x2_LS": 256_731_112,
    "deit_small_patch16_18x2": 64_637_416,
    "deit_base_patch16_18x2": 256_675_816,
    "iGPT-S": 76_571_648,
    "iGPT-M": 455_157_760,
    "iGPT-L": 1_362_250_752,
    "BEiT-B/16": 86_530_984,
    "BEiTv2-B/16": 86_530_984,
    "DINOv3-S/16": 21_586_944,
    "EVA-02-B/14@448": 87_117_544,
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
    # convolutions, matrix products and attention of the published code, for all tokens
    "ViT-b/32": 1.1429,
    "R50+ViT-B/32": 8.4578,
    "R50+ViT-B/32@384": 24.9415,
    "R50+ViT-L/16": 65.5391,
    "R50+ViT-L/16@384": 202.7755,
    "tf_efficientnet_b0": 0.3858,
    "tf_efficientnet_b4": 4.3938,
    "tf_efficientnet_b7": 37.7459,
    "resnetv2_50x1_bit": 4.0892,
    "resnetv2_152x4_bit": 182.7773,
    "mixer_s32_224": 1.0024,
    "mixer_b16_224": 12.6018,
    "mixer_l16_224": 44.5477,
}


# keras-hub's backbones: these without a head
BACKBONES = {
    "vit_base_patch16_224": 85_798_656,
    "vit_base_patch16_384": 86_090_496,
    "vit_large_patch16_224": 303_301_632,
    "vit_large_patch16_384": 303_690_752,
    "vit_base_patch32_384": 87_528_192,
}


def test_parameters_without_a_head() -> None:
    for name, expected in BACKBONES.items():
        with torch.device("meta"):
            model = vitrail.create(name, classes=0)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected, name


def list_stored_costs(names: Iterable[str]) -> list[tuple[str, PresetListing]]:
    """Those of the package's table; tests/inspection/test_preset_costs.py compares it with what is built."""
    return [(name, list_presets()[resolve_alias(name) or name]) for name in names]


def test_parameters() -> None:
    assert {name: costs["parameters"] for name, costs in list_stored_costs(PARAMETERS)} == PARAMETERS


def test_gmacs() -> None:
    for expected, digits in ((GMACS, 3), (MORE_GMACS, 4)):
        assert {
            name: round((costs["macs"] or 0) / 1e9, digits) for name, costs in list_stored_costs(expected)
        } == expected
