"""What every architecture does: starts from equal probabilities, trains every weight, exports, is inferred from shapes.

The facts of a family are one row of a table; what only this family does is in its own file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, SIZE, build_case
from support.family_checks import check_learning, check_preset_is_inferred, measure_export_difference

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint.layout import list_layouts
from vitrail.models.catalog.families import load_family

FAST_EXPORTS = ("resnet", "swin")  # convolutions, windows; 5 CPU seconds each; tests/export has tokens
EXPORTS = [case if case in FAST_EXPORTS else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", EXPORTS)
def test_export_with_any_batch(case: str, tmp_path: Path) -> None:
    assert measure_export_difference(build_case(case), tmp_path) <= 1e-4


ONE_SIZE = {
    "cvt": "CvT cannot be exported for all sizes: its grids are rounded up",
    "efficientnet, TensorFlow": "EfficientNet cannot be exported for all sizes: its padding depends on the size",
    "levit": "LeViT cannot be exported for all sizes: its grids are rounded up",
    "mobilevit": "MobileViT cannot be exported for all sizes: its grids are rounded up",
    "pvt_v2": "PVTv2 cannot be exported for all sizes: its grids are rounded up",
    "crossformer": "CrossFormer cannot be exported for all sizes: its groups are cut for one",
    "maxvit": "MaxViT cannot be exported for all sizes: its windows are cut for one grid",
    "nest": "NesT cannot be exported for all sizes: its blocks of tokens are cut for one",
    "regionvit": "RegionViT cannot be exported for all sizes: its regions are cut for one grid",
    "scalablevit": "ScalableViT cannot be exported for all sizes: its windows are cut for one grid",
    "swin": "Swin cannot be exported for all sizes: its windows are cut for one grid",
    "twins": "Twins cannot be exported for all sizes: its windows are cut for one grid",
}


@pytest.mark.parametrize("case", ONE_SIZE)
def test_export_for_all_sizes_is_refused(case: str, tmp_path: Path) -> None:
    model = build_case(case)
    model = model if model.sizes.dynamic else build_case(case, dynamic=True)
    how = vitrail.Preprocessing(image_size=model.config.image_size)
    with pytest.raises(ConfigError, match=ONE_SIZE[case]):
        vitrail.export_model(model, tmp_path / "shipped", preprocessing=how, dynamic=True)


PLAIN = "image_size=28 patch_size=7 width=64 heads=2 mlp_width=128"
SWIN = "image_size=28 patch_size=4 stages=[2,2] widths=[48,96] heads=[3,6] windows=4"  # 7×7 tokens, padded to 8×8
LEARNERS = [
    ("cait_xxs24_224", f"{PLAIN} depth=4"),
    ("convnext_tiny", "image_size=28 patch_size=4 stages=[2,2] widths=[32,64] layer_scale=0.1"),
    ("SL-ViT", "image_size=28 patch_size=7 width=64 depth=4 heads=4"),
    ("ViT-S18x2", f"{PLAIN} depth=2 layer_scale=none"),
    ("DeepViT-16B", "image_size=28 patch_size=7 width=64 depth=3 heads=4 reattending=2"),
    (
        "CrossViT-S",
        "image_size=28 patch_sizes=[4,7] scales=[1,1] widths=[32,64] heads=[2,4] branch_depths=[1,2] depth=2 "
        "mlp_ratio=2",
    ),
    ("patch_merger_tiny_patch16_224", f"{PLAIN} depth=4 merged=4"),
    ("BEiT-B/16", f"{PLAIN} depth=2 layer_scale=none"),
    ("DINOv3-S/16", f"{PLAIN} depth=2 layer_scale=none"),
    ("pit_ti_224", "image_size=28 patch_size=4 stride=2 stages=[1,2,1] widths=[32,64,128] heads=[2,4,8]"),
    ("swin_tiny_patch4_window7_224", f"{SWIN} version=1"),
    ("swin_tiny_patch4_window7_224", f"{SWIN} version=2"),
    (
        "twins_svt_small",
        "image_size=28 patch_size=2 stages=[2,2] widths=[24,48] heads=[2,4] windows=[7,7] reductions=[2,1]",
    ),
    ("pvt_v2_b0", "image_size=28 stages=[2,2] widths=[48,96] heads=[1,2] reductions=[2,1] mlp_ratios=[4,4]"),
    ("levit_128s", "image_size=32 convolutions=2 stages=[1,2,1] widths=[64,96,128] heads=[4,6,8] distilled=false"),
    ("cvt_13_224", "image_size=28 stages=[1,2] widths=[64,128] heads=[1,2]"),
    ("mobilevit_xxs", "image_size=32 convolutions=[1,1,1] stages=[0,1,2] widths=[16,32,48] token_widths=[0,48,64]"),
    ("maxvit_tiny_tf_224", "image_size=28 stem_stride=1 stem_width=8 stages=[1,1] widths=[16,32] heads=[1,2]"),
    ("nest_tiny_jx", "image_size=32 patch_size=2 stages=[1,1,1] widths=[24,48,96] heads=[2,4,8]"),
    (
        "CrossFormer-S",
        "image_size=28 kernels=[2,4,8,16] stages=[2,2] widths=[32,64] heads=[2,4] windows=[7,7] intervals=[2,1]",
    ),
    ("RegionViT-Ti", "image_size=28 patch_size=2 convolutions=false stages=[2,2] widths=[24,48] heads=[2,4]"),
    (
        "ScalableViT-S",
        "image_size=28 stride=2 stages=[2,2] widths=[24,48] heads=[2,4] windows=[7,7] reductions=[2,1] "
        "key_ratios=[1.25,1] head_width=192",
    ),
    (
        "SepViT-T",
        "image_size=28 stride=2 stages=[2,2] widths=[24,48] heads=[2,4] windows=[7,7] odd_windows=[7,7]",
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "fields"), LEARNERS)
def test_training_on_the_bundled_images_learns(name: str, fields: str, tmp_path: Path) -> None:
    check_learning(name, fields, tmp_path)


INFERRED = (
    *vitrail.list_models("crossvit*"),
    *vitrail.list_models("deepvit*"),
    *vitrail.list_models("levit*"),
    *("beitv2_base_patch16_224", "vit_small_plus_patch16_dinov3_qkvb", "vit_huge_plus_patch16_dinov3"),
    *("vit_7b_patch16_dinov3", "eva02_tiny_patch14_336", "sl_vit_patch4_32", "sl_vit_patch8_64"),
    *("cvt_13_224", "cvt_21_224", "nest_tiny_jx", "nest_base_jx"),
    *("crossformer_tiny_patch4_group7_224", "crossformer_pp_huge_patch4_group_const_224"),
    *("regionvit_tiny_224", "regionvit_base_w14_peg_224", "scalablevit_small", "scalablevit_large"),
    *("sepvit_lite_224", "sepvit_small_224"),
)


@pytest.mark.parametrize("name", INFERRED)
def test_preset_is_inferred_from_its_shapes(name: str) -> None:
    check_preset_is_inferred(name)


ALIASES = {
    "CvT-13@384": "cvt_13_384",
    "LeViT-128S": "levit_128s",
    "MobileViT-XXS": "mobilevit_xxs",
    "PiT-B-distilled": "pit_b_distilled_224",
    "Twins-SVT-B": "twins_svt_base",
}


def test_aliases_of_the_papers() -> None:
    with torch.device("meta"):
        for alias, preset in ALIASES.items():
            assert vitrail.create(alias).config == vitrail.create(preset).config


TRAINED_IN_OWN_FILE = ("crossformer", "regionvit")  # not all weights have an effect in a toy of this size
WITHOUT_EFFECT = ("proj_l.bias", "attn_pool.bias", "reatten_matrix.bias")  # constants that a softmax or a norm removes


@pytest.mark.parametrize("case", CASES)
def test_an_untrained_model_gives_equal_probabilities_and_every_weight_is_trained(case: str) -> None:
    images, (name, own) = torch.randn(2, 3, *SIZE), CASES[case]
    family = load_family(name)
    untrained = family.build(family.configure(image_size=SIZE, classes=5, **own)).eval()
    with torch.no_grad():
        assert not untrained(images).any()
    if name in TRAINED_IN_OWN_FILE:
        return
    model = build_case(case).train()
    if model.no_tokens_reason:
        loss = model(images).square().sum()
    else:
        tokens = model.tokens(images)
        loss = sum((each.square().sum() for each in model.head_logits(tokens)), tokens.square().sum())
    loss.backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
        if weight.grad is not None and not name.endswith(WITHOUT_EFFECT):
            assert weight.grad.isfinite().all(), name
            assert weight.grad.any(), name


@pytest.mark.parametrize("family", {name: None for name, _ in CASES.values()})
def test_a_layout_without_names_for_a_family_is_refused(family: str, tmp_path: Path) -> None:
    model = build_case(next(case for case, (name, _) in CASES.items() if name == family))
    named = {source.layout for source in load_family(family).checkpoint.sources}
    for layout in list_layouts():
        if layout.name not in named and layout.name != "vitrail":
            message = f"{layout.name} cannot represent a model of the family '{family}'"
            with pytest.raises(CheckpointError, match=message):
                vitrail.save(model, tmp_path / "theirs", to=layout.name)


Invalid = dict[str, list[tuple[dict[str, Any], str]]]  # by family: fields, and the error
OF_DEFAULTS: Invalid = {  # in place of the defaults
    "bit": [
        ({"width": 48}, r"width is 48; expected a multiple of 32, the groups of a norm"),
        ({"stages": ()}, r"stages is \(\); expected at least one number"),
    ],
    "cait": [
        ({"heads": 5}, "cannot be divided by 5 heads"),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 16×16.* to 224×224"),
        ({"class_depth": 0}, "class_depth is 0; expected more than 0"),
    ],
    "cct": [
        ({"image_size": (30, 32)}, r"30×32 pixels; expected a multiple of 4×4"),
        ({"kernel": 4}, r"kernel 4; expected an odd number"),
        ({"neighbors": True, "attention_dropout": 0.1}, r"attention_dropout and neighbors"),
        ({"pools": 3}, r"pools 3; expected at most 2, each after another convolution"),
        ({"pools": (1, 1)}, r"pools \(1, 1\); expected at most 2"),
        ({"pools": (3,)}, r"pools \(3,\); expected at most 2"),
    ],
    "convnext": [
        ({"widths": (96, 192)}, r"widths is \(.*\) for 4 stages; expected 4 numbers"),
        ({"image_size": 28}, r"image of 28×28 pixels; expected at least 32×32, a position of the last"),
    ],
    "crossformer": [
        ({"intervals": (2, 1)}, r"intervals is \(.*\) for 4 stages; expected 4 numbers"),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 32×32.* to 224×224"),
    ],
    "cvt": [
        ({"heads": (2, 4)}, r"heads is \(.*\) for 3 stages; expected 3 numbers"),
        ({"heads": (3, 3, 3)}, r"width 64 cannot be divided by 3 heads"),
        ({"activation": "relu"}, r"activation 'relu'"),
    ],
    "efficientnet": [
        ({"kernels": (3, 5)}, r"kernels is \(3, 5\) for 7 stages; expected 7 numbers"),
        ({"kernels": (3, 3, 4, 3, 3, 3, 3)}, r"a kernel of 4; expected odd numbers"),
        ({"strides": (1, 2, 4, 1, 1, 1, 1)}, r"a stride of 4; expected 1 or 2"),
        ({"stem_width": 30}, r"a width of 30 channels; expected a multiple of 4"),
    ],
    "eva": [
        ({"mlp_norm": True}, r"mlp_norm requires activation='swiglu', not 'gelu'"),
        ({"width": 12, "heads": 2}, r"width 12; expected a multiple of 8 for rotary positions"),
    ],
    "levit": [
        ({"heads": (2, 4)}, r"heads is \(.*\) for 3 stages; expected 3 numbers"),
        ({"widths": (100, 256, 384)}, r"a width of 100 after 4 convolutions, .*; expected a multiple of 8"),
        ({"widths": (128, 136, 384)}, r"a stage of width 136; expected a multiple of key_width 16"),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 16×16, .* to 224×224"),
        ({"answer": "class", "distilled": False}, r"answer is 'class' for a LeViT with one head"),
    ],
    "maxvit": [
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 32×32.* to 224×224"),
        (
            {"image_size": 384, "window": 7},
            r"384×384 pixels, 12×12 tokens .* window of 7; .* example 448×448 pixels, or",
        ),
        ({"heads": (2,)}, r"heads is \(.*\) for 4 stages; expected 4 numbers"),
    ],
    "mixer": [
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 16×16.* to 224×224"),
    ],
    "nest": [
        ({"image_size": (232, 224)}, r"232×224 pixels; expected a multiple of 16×16.* to 224×224"),
        ({"widths": (96, 192)}, r"widths is \(.*\) for 3 stages; expected 3 numbers"),
    ],
    "parallel_vit": [
        ({"branches": 0}, "branches is 0; expected more than 0"),
        ({"heads": 5}, "cannot be divided by 5 heads"),
    ],
    "pit": [
        ({"heads": (2, 4)}, r"heads is \(.*\) for 3 stages; expected 3 numbers"),
        ({"stages": (), "widths": (), "heads": ()}, r"stages is \(\); expected at least one number"),
        (
            {"widths": (16, 32, 48), "heads": (1, 1, 1)},
            r"a stage of width 48 after one of 32; expected a multiple of 32",
        ),
        ({"widths": (16, 32, 64), "heads": (3, 3, 3)}, r"width 16 cannot be divided by 3 heads"),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 8 of at least 16: .* to 232×224"),
        ({"patch_size": 4}, r"stride 8 of patches of 4 pixels; expected no gaps"),
        ({"answer": "class"}, r"answer is 'class' for a PiT with one head"),
    ],
    "pvt_v2": [
        ({"reductions": (8, 4)}, r"reductions is \(.*\) for 4 stages; expected 4 numbers"),
        ({"mlp_ratios": (4.0,)}, r"mlp_ratios is \(.*\) for 4 stages; expected 4 numbers"),
        ({"image_size": 28}, r"a reduction of 8 for a grid of 7×7 tokens; expected at most"),
    ],
    "regionvit": [
        (
            {"widths": (64, 100, 200, 400), "heads": (2, 2, 2, 2)},
            r"a width of 100 after 64; expected a multiple, channels become several",
        ),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 28×28.* to 224×224"),
    ],
    "regnety": [
        (
            {"stages": (2, 6, 12, 2), "widths": (64, 128), "group_width": 64},
            r"4 stages of 2 widths; expected one width per stage",
        ),
        (
            {"stages": (2, 6, 12, 2), "widths": (64, 100, 128, 192), "group_width": 64},
            r"a width of 100 in groups of 64; expected a multiple of 64",
        ),
        ({"stages": (), "widths": ()}, r"0 stages of 0 widths"),
    ],
    "resnet": [
        ({"block": "wide"}, r"unknown block 'wide'"),
        ({"stages": (2, 0)}, r"stages is \(2, 0\); expected more than 0"),
        ({"stages": ()}, r"stages is \(\); expected at least one number"),
    ],
    "sepvit": [
        ({"odd_windows": (7, 7)}, r"odd_windows is \(.*\) for 4 stages; expected 4 numbers"),
        ({"image_size": 256}, r"256×256 pixels; expected one of whole windows .* example to 224×224"),
    ],
    "sl_vit": [
        ({"heads": 5}, "cannot be divided by 5 heads"),
        ({"image_size": (30, 32)}, r"30×32 pixels; expected a multiple of 4×4"),
    ],
    "swin": [
        ({"windows": (7, 7)}, r"windows is \(.*\) for 4 stages; expected 4 numbers"),
        ({"widths": (96, 192, 384)}, r"widths is \(.*\) for 4 stages; expected 4 numbers"),
        ({"heads": (5, 6, 12, 24)}, r"width 96 cannot be divided by 5 heads"),
        ({"trained_windows": (7, 7, 7, 7)}, r"trained_windows of a Swin of version 1"),
        ({"image_size": (226, 224)}, r"226×224 pixels; expected a multiple of 4×4"),
    ],
    "t2t": [
        ({"image_size": 28}, r"image of 28×28 pixels; expected a multiple of 16×16.* to 32×32"),
        ({"image_size": (224, 230)}, r"image of 224×230 pixels; .* to 224×224"),
        ({"image_size": 7}, r"expected a multiple of 16×16.* to 16×16"),
        ({"stage": "convolution"}, r"stage 'convolution'"),
        ({"stage_width": 1}, r"stage_width is 1; expected 2 or more"),
        ({"heads": 5}, r"width 384 cannot be divided by 5 heads"),
        ({"stage_dropout": 1.0}, r"stage_dropout is 1.0; expected at least 0 and less than 1"),
    ],
    "twins": [
        ({"windows": (7, 7)}, r"windows is \(.*\) for 4 stages; expected 4 numbers"),
        (
            {
                "image_size": 32,
                "stages": (2, 2),
                "widths": (16, 32),
                "heads": (1, 2),
                "windows": (7, 7),
                "reductions": (2, 8),
            },
            r"a reduction of 8 for a grid of 4×4 tokens; expected at most",
        ),
        ({"image_size": (230, 224)}, r"230×224 pixels; expected a multiple of 32×32.* to 224×224"),
    ],
}
OF_TOYS: Invalid = {  # in place of those of the case
    "crossformer": [
        ({"kernels": (4, 7)}, r"kernels is \(4, 7\); expected the smallest first, and all even or all odd"),
        ({"merge_kernels": (4, 2)}, r"merge_kernels is \(4, 2\); expected the smallest first"),
        (
            {"kernels": (4, 8, 16, 32), "widths": (20, 32), "heads": (2, 2)},
            r"a width of 20 for 4 kernels; expected a multiple of 8",
        ),
        ({"widths": (8, 32)}, r"a width of 8; expected 16 or more, for the MLP of the biases"),
    ],
    "crossvit": [
        ({"widths": (16,)}, r"widths is \(16,\); expected two numbers, one per branch"),
        ({"heads": (2, 5)}, "cannot be divided by 5 heads"),
        ({"patch_sizes": (8, 16), "convolutions": True}, r"patch_sizes \(8, 16\) of convolutions; expected 12 and 16"),
    ],
    "deepvit": [
        ({"depth": 3, "reattending": 4}, "4 reattending of 3 blocks; expected at most 3"),
        ({"stem": "convolutions", "image_size": 28, "patch_size": 7}, r"patch_size \(7, 7\); expected even numbers"),
    ],
    "mobilevit": [
        ({"widths": (8, 16)}, r"widths is \(.*\) for 3 stages; expected 3 numbers"),
        ({"widths": (8, 12, 24)}, r"a width of 12 channels; expected a multiple of 8"),
        ({"token_widths": (0, 16, 0)}, r"2 transformer blocks of width 0; expected both, or 0 and 0"),
        ({"heads": 3}, r"width 16 cannot be divided by 3 heads"),
    ],
    "patch_merger": [
        ({"depth": 3, "merge_after": 3}, "merge_after is 3; expected less than 3, the number of blocks"),
        ({"depth": 1}, "depth is 1; expected 2 or more"),
    ],
    "regionvit": [
        ({"patch_size": 8}, r"convolutions for patches of 8 pixels .* or convolutions=False"),
    ],
    "scalablevit": [
        ({"key_ratios": (1.0,)}, r"key_ratios is \(.*\) for 2 stages; expected 2 numbers"),
        ({"key_ratios": (1.5, 1.5)}, r"a key ratio of 1.5 with a reduction of 1; expected 1"),
        ({"key_ratios": (1.3, 1.0)}, r"keys of 1.3 × 16 channels and 2 heads; expected a multiple of the heads"),
        ({"image_size": 56, "reductions": (16, 1)}, r"a reduction of 16 for a grid of 14×14 tokens; expected at most"),
    ],
    "vit": [
        ({"heads": 3}, r"width 16 cannot be divided by 3 heads; expected a divisor of 16, for example 2"),
        ({"image_size": 30, "patch_size": 16}, r"30×30 pixels; expected a multiple of 16×16, .* to 32×32"),
        ({"image_size": "big"}, r"image_size is 'big'; expected a whole number or a pair \(rows, columns\)"),
        ({"image_size": (8, 12, 3)}, r"image_size is \(8, 12, 3\); expected a whole number or a pair"),
        ({"depth": 0}, r"depth is 0; expected more than 0"),
        ({"depth": 2.5}, r"depth is 2.5; expected a whole number"),
        ({"depth": True}, r"depth is True; expected a whole number"),
        ({"classes": -1}, r"classes is -1; expected at least 0"),
        ({"norm_eps": float("nan")}, r"norm_eps is nan; expected more than 0"),
        ({"layer_scale": float("inf")}, r"layer_scale is inf; expected at most 1,048,576"),
        ({"image_size": (0, 8)}, r"image_size is \(0, 8\); expected more than 0"),
        ({"image_size": 999_999}, r"image_size is 999999×999999; expected at most 67,108,864 pixels"),
        ({"registers": -1}, r"registers is -1; expected at least 0"),
        ({"layer_scale": "x"}, r"layer_scale is 'x'; expected a number or none"),
        ({"dropout": 1.0}, r"dropout is 1.0; expected at least 0 and less than 1"),
        ({"qkv_bias": 1}, r"qkv_bias is 1; expected true or false"),
        ({"positions": "sincos2d"}, r"unknown positions 'sincos2d'; did you mean 'sincos_2d'\?"),
        ({"pool": "zzz"}, r"unknown pool 'zzz'; expected one of class, mean, mean_norm, map"),
        ({"class_token": False}, r"pool 'class' without a class token"),
        ({"positions": "rotary", "positions_at": "layers"}, r"positions 'rotary' .* expected positions_at='stem'"),
        ({"positions": "rotary", "width": 18, "heads": 3}, r"width 18; expected a multiple of 12 for .*'rotary'"),
        ({"positions": "sincos_2d", "width": 18}, r"width 18; expected a multiple of 4 for positions 'sincos_2d'"),
    ],
}


@pytest.mark.parametrize("name", OF_DEFAULTS)
def test_invalid_configs_are_refused(name: str) -> None:
    for fields, message in OF_DEFAULTS[name]:
        with pytest.raises(ConfigError, match=message):
            load_family(name).configure(**fields)


@pytest.mark.parametrize("name", OF_TOYS)
def test_invalid_toys_are_refused(name: str) -> None:
    for fields, message in OF_TOYS[name]:
        with pytest.raises(ConfigError, match=message):
            build_case(name, **fields)
