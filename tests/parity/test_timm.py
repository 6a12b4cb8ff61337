"""Models are compared with timm: its state dict loads strictly by name, and the logits agree.

Toy sizes are always tested, full sizes are marked slow. A CaiT is loaded through its name table: LayerScale, and the
keys and values of its class blocks, have other names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from support.noisy_weights import add_weight_noise
from timm.layers.mlp import SwiGLUPacked
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import vitrail
from vitrail.checkpoint.name_table import convert_to_our_tensors
from vitrail.models.base.checks import pair
from vitrail.models.cait import NAME_TABLE, CaiT, CaiTConfig
from vitrail.models.deit import DeiT, DeiTConfig
from vitrail.models.vit import ViT, ViTConfig

TOLERANCE = 1e-5


def assert_equal_models(
    theirs: Any, ours: Any, size: tuple[int, int], tokens_within: float = 0.0, maps_within: float = TOLERANCE
) -> None:
    """Load their random weights into ours by name, strictly, and compare logits and tokens.

    Tokens come from the same operations in the same order, so they are bit-identical. Our logits need not be: the last
    block computes only what the head reads.
    """
    add_weight_noise(theirs)
    ours.load_state_dict(get_renamed_tensors(theirs))
    ours.eval()
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        logits = theirs(images)
        assert logits.std() > 0.01
        assert (ours(images) - logits).abs().max() <= TOLERANCE
        assert (ours.tokens(images) - theirs.forward_features(images)).abs().max() <= tokens_within
        (our_map,), (their_map,) = ours.feature_maps(images), theirs.forward_intermediates(images, 1, norm=False)[1]
        assert our_map.shape == their_map.shape
        assert (our_map - their_map).abs().max() <= maps_within


def get_renamed_tensors(theirs: nn.Module) -> dict[str, Tensor]:
    """Their state dict with our names, which differ only for a CaiT; no tensor is left over."""
    if not isinstance(theirs, Cait):
        return theirs.state_dict()
    tensors, unknown = convert_to_our_tensors(theirs.state_dict(), NAME_TABLE)
    assert not unknown
    return tensors


THEIRS: Any = partial(VisionTransformer, img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=7)
OURS = partial(ViTConfig, image_size=32, patch_size=8, width=48, depth=3, heads=4, classes=7)

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], ViTConfig]]] = {
    "class": (partial(THEIRS), partial(OURS)),
    "mean": (
        partial(THEIRS, global_pool="avg", class_token=False, fc_norm=False),
        partial(OURS, pool="mean", class_token=False),
    ),
    "mean, class token kept": (partial(THEIRS, global_pool="avg", fc_norm=False), partial(OURS, pool="mean")),
    "mean, norm after": (partial(THEIRS, global_pool="avg"), partial(OURS, pool="mean_norm")),
    "map": (partial(THEIRS, global_pool="map", class_token=False), partial(OURS, pool="map", class_token=False)),
    "map, tanh": (
        partial(THEIRS, global_pool="map", act_layer="gelu_tanh"),
        partial(OURS, pool="map", activation="gelu_tanh"),
    ),
    "registers": (partial(THEIRS, reg_tokens=4), partial(OURS, registers=4)),
    "registers without positions": (
        partial(THEIRS, reg_tokens=4, no_embed_class=True),
        partial(OURS, registers=4, prefix_positions=False),
    ),
    "layer scale": (partial(THEIRS, init_values=0.1), partial(OURS, layer_scale=0.1)),
    "swiglu": (
        partial(THEIRS, mlp_layer=SwiGLUPacked, mlp_ratio=4, act_layer=nn.SiLU),
        partial(OURS, activation="swiglu", mlp_width=96),
    ),
    "no qkv bias": (partial(THEIRS, qkv_bias=False), partial(OURS, qkv_bias=False)),
    "no positions": (partial(THEIRS, pos_embed="none"), partial(OURS, positions="none")),
    "no head": (partial(THEIRS, num_classes=0), partial(OURS, classes=0)),
    "another MLP and epsilon": (
        partial(THEIRS, mlp_ratio=2.5, norm_layer=partial(nn.LayerNorm, eps=1e-3)),
        partial(OURS, mlp_width=120, norm_eps=1e-3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_vit_equals_timm(case: str) -> None:
    theirs, ours = CASES[case]
    assert_equal_models(theirs(), ViT(ours()), (32, 32))


def test_vit_on_oblong_images_and_patches() -> None:
    theirs = THEIRS(img_size=(24, 64), patch_size=(12, 8))
    assert_equal_models(theirs, ViT(OURS(image_size=(24, 64), patch_size=(12, 8))), (24, 64))


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (16, 48), (72, 8)])
def test_dynamic_sizes_resample_positions_as_timm_does(size: tuple[int, int]) -> None:
    assert_equal_models(THEIRS(dynamic_img_size=True, reg_tokens=2), ViT(OURS(dynamic=True, registers=2)), size)


DEIT = partial(DeiTConfig, image_size=32, patch_size=8, width=48, depth=3, heads=4, classes=7)


def test_deit_equals_timm() -> None:
    assert_equal_models(THEIRS(), DeiT(DEIT()), (32, 32))


def test_deit3_equals_timm() -> None:
    theirs = THEIRS(init_values=0.1, no_embed_class=True)
    assert_equal_models(theirs, DeiT(DEIT(layer_scale=0.1, prefix_positions=False)), (32, 32))


def test_distilled_deit_equals_timm() -> None:
    theirs = VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=7, weight_init="jax"
    )
    ours = DeiT(DEIT(distilled=True))
    assert_equal_models(theirs, ours, (32, 32))
    theirs.set_distilled_training(True)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = theirs.train()(images)
        for mine, other in zip(ours.head_logits(ours.tokens(images)), expected, strict=True):
            assert (mine - other).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, {}),
        ({"img_size": (16, 40)}, {"image_size": (16, 40)}),
        ({"num_classes": 0, "depth_token_only": 1}, {"classes": 0, "class_depth": 1}),
        ({"mlp_ratio": 2.0, "mlp_ratio_token_only": 2.0}, {"mlp_width": 96}),
    ],
    ids=["plain", "oblong", "no head", "another MLP"],
)
def test_cait_equals_timm(fields: dict[str, Any], own: dict[str, Any]) -> None:
    given: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}
    given |= {"num_classes": 7, "init_values": 0.1, **fields}
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "heads": 4, "classes": 7}
    config = CaiTConfig(**(sizes | own))
    assert_equal_models(Cait(**given), CaiT(config), pair(config.image_size), tokens_within=TOLERANCE)


def test_training_gradients_of_a_cait_equal_timm() -> None:
    theirs = add_weight_noise(
        Cait(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7, init_values=0.1)
    )
    ours = CaiT(CaiTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, classes=7))
    ours.load_state_dict(get_renamed_tensors(theirs))
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for model in (theirs, ours):
        nn.functional.cross_entropy(model.train()(images), labels).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    expected, _ = convert_to_our_tensors(gradients, NAME_TABLE)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


HYBRIDS = ["vit_base_r50_s16_224", "vit_small_r26_s32_224", "vit_tiny_r_s16_p8_224", "vit_base_r26_s32_224"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_equals_timm(name: str) -> None:
    theirs = timm.create_model(name, img_size=64, depth=2, num_classes=7)
    ours = vitrail.create(name, image_size=64, depth=2, classes=7)
    assert_equal_models(theirs, ours, (64, 64), tokens_within=TOLERANCE, maps_within=1e-4)  # before the norm: larger


def test_training_gradients_equal_timm() -> None:
    """Gradients agree although our last block computes only the class token."""
    theirs, ours = add_weight_noise(THEIRS()), ViT(OURS())
    ours.load_state_dict(theirs.state_dict())
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    for model in (theirs, ours):
        nn.functional.cross_entropy(model.train()(images), labels).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


FULL = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_small_patch32_384",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_base_patch32_224",
    "vit_base_patch16_gap_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_reg4_dinov2",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit_base_distilled_patch16_224",
    "deit3_small_patch16_224",
    "deit3_base_patch16_224",
    "cait_xxs24_224",
    "cait_xs24_384",
    "cait_s24_224",
    "vit_tiny_r_s16_p8_224",
    "vit_small_r26_s32_224",
    "vit_base_r50_s16_224",
    "resnet18",
    "resnet50",
    "resnet101",
    "regnety_040",
    "regnety_160",
    "tf_efficientnet_b0",
    "mixer_s32_224",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_size_equals_timm(name: str) -> None:
    """A preset with timm's initial weights and a new random head."""
    ours: Any = vitrail.create(name)
    theirs = timm_model(name, ours)
    for key, parameter in theirs.named_parameters():
        if key.startswith(("head", "fc.", "classifier.")):
            nn.init.normal_(parameter, std=0.02)
    ours.load_state_dict(get_renamed_tensors(theirs.eval()))
    ours.eval()
    images = torch.randn(1, 3, *ours.config.image_size)
    with torch.inference_mode():
        assert (ours(images) - theirs(images)).abs().max() <= TOLERANCE


def timm_model(name: str, ours: Any) -> Any:
    """timm's model of that name, with a head if ours has one."""
    return timm.create_model(name, num_classes=ours.config.classes)


class SkipInitialization(TorchFunctionMode):
    """Skip the filling of weights: on the meta device it takes half of the time and has no effect."""

    names = ("uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "trunc_normal_", "kaiming_uniform_")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.names:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def test_presets_equal_timm() -> None:
    """Tensors have the same names and shapes; heads, norms and activations, which shapes do not tell, agree too."""
    kinds = (
        "swin*",
        "beit*",
        "*siglip*",
        "*dinov3*",
        "eva02*",
        "convnext*",
        "maxvit*",
        "nest*",
        "levit*",
        "mobilevit*",
        "*_bit",
    )
    elsewhere = {each for kind in kinds for each in vitrail.list_models(kind)}  # tests/models
    shared = [name for name in vitrail.list_models() if timm.is_model(name) and name not in elsewhere]
    assert len(shared) >= 55
    for name in shared:
        with torch.device("meta"), SkipInitialization():
            ours: Any = vitrail.create(name)
            theirs = timm_model(name, ours)
        expected = {key: value.shape for key, value in get_renamed_tensors(theirs).items()}
        assert {key: value.shape for key, value in ours.state_dict().items()} == expected, name
        block: Any = theirs.blocks[0] if hasattr(theirs, "blocks") else None
        if not hasattr(block, "attn"):  # norms and activations of other blocks are compared at toy size
            continue
        assert (block.attn.num_heads, block.norm1.eps) == (ours.config.heads, ours.config.norm_eps), name
        assert type(block.mlp.act) is type(getattr(ours.blocks[0].mlp, "act", nn.SiLU())), name
