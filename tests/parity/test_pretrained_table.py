"""The table of public weights against timm's `pretrained_cfg`, and its rows against the models that timm builds."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import get_pretrained_cfg  # pyright: ignore[reportUnknownVariableType]

from vitrail.checkpoint.layout import get_layout
from vitrail.checkpoint.reading import add_timm_config, build_meta_model, translate_with_layout
from vitrail.checkpoint.weight_files import RawContents
from vitrail.models.catalog.families import find_preset
from vitrail.models.catalog.preset_costs import list_presets
from vitrail.models.catalog.pretrained import PretrainedWeights, list_pretrained_weights, read_pretrained_table

ROWS = list(list_pretrained_weights())
TIMM_NAMES: list[str] = timm.list_pretrained()


def get_timm_config(name: str) -> Any:
    return get_pretrained_cfg(name)


def test_the_table_has_all_weights_that_timm_has_on_the_hub_for_our_presets() -> None:
    """A preset's default is timm's default."""
    for preset in list_presets():
        names = [name for name in TIMM_NAMES if name.split(".")[0] == preset]
        hosted = [name for name in names if get_timm_config(name).hf_hub_id]
        weights = read_pretrained_table().get(preset, ())
        assert {each.name for each in weights} == set(hosted)
        if weights:
            assert weights[0].tag == get_timm_config(preset).tag


def test_a_row_is_as_in_timm() -> None:
    for weights in ROWS:
        theirs = get_timm_config(weights.name)
        assert weights.repository == theirs.hf_hub_id
        assert weights.file == (theirs.hf_hub_filename or "model.safetensors")
        assert weights.license == theirs.license
        assert weights.classes == theirs.num_classes
        assert theirs.input_size == (3, weights.image_size, weights.image_size)
        assert (weights.crop, weights.interpolation) == (theirs.crop_pct, theirs.interpolation)
        assert (weights.mean, weights.std) == (theirs.mean, theirs.std)
        assert weights.fit == ("squash" if theirs.crop_mode == "squash" else "short_side")
        assert theirs.label_names is None
        address = theirs.url if isinstance(theirs.url, str) and "/vit_models/" in theirs.url else ""
        assert not address or address.endswith(f"/vit_models/{weights.bucket_file}")


def check_file_of_timm(weights: PretrainedWeights) -> None:
    """Read tensors with timm's names and shapes as the downloaded file, with what the table knows about it."""
    with torch.device("meta"):
        theirs: Any = timm.create_model(weights.name, pretrained=False, num_classes=weights.classes)
    tensors = {  # without memory
        name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in theirs.state_dict().items()
    }
    contents = RawContents(path=Path(weights.file), kind="safetensors", tensors=tensors, weights=weights)
    translated = translate_with_layout(add_timm_config(contents, weights), get_layout("timm"), {}, weights.name)
    description = translated.description
    assert (translated.assumed, translated.warnings, translated.ignored) == ({}, (), ())
    family, preset = find_preset(weights.preset)
    assert description.family == family.name
    config = build_meta_model(translated, family, "").config
    changed = {"image_size": config.image_size, "classes": config.classes}
    if getattr(preset, "layer_scale", None) is not None:
        assert config.layer_scale is not None
        changed["layer_scale"] = config.layer_scale  # its initial value is not in the weights
    assert family.configure(preset, **changed) == config
    assert config.classes == weights.classes
    assert config.image_size in (weights.image_size, (weights.image_size,) * 2)
    assert description.preprocessing is not None
    assert (description.preprocessing.mean, description.preprocessing.crop) == (weights.mean, weights.crop)
    assert (description.labels is not None) == weights.has_imagenet_classes


SMALLEST = {  # one row per family and kind of head, which are quick to build
    *("vit_tiny_patch16_224.augreg_in21k", "vit_tiny_patch16_224.augreg_in21k_ft_in1k", "vit_small_patch16_224.dino"),
    *("vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_reg4_dinov2.lvd142m", "vit_giant_patch14_dinov2.lvd142m"),
    *("deit_tiny_distilled_patch16_224.fb_in1k", "deit3_small_patch16_224.fb_in1k", "cait_xxs24_224.fb_dist_in1k"),
    *("vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k", "resnet18.a1_in1k", "resnet50.tv2_in1k", "regnety_040.pycls_in1k"),
    *("vit_base_patch16_224.mae", "vit_base_r50_s16_224.orig_in21k", "pit_ti_224.in1k", "pit_b_distilled_224.in1k"),
    *("swin_tiny_patch4_window7_224.ms_in22k", "swin_s3_tiny_224.ms_in1k", "swinv2_tiny_window8_256.ms_in1k"),
    *("swinv2_base_window12to24_192to384.ms_in22k_ft_in1k", "twins_svt_small.in1k", "pvt_v2_b0.in1k"),
    *("pvt_v2_b2_li.in1k", "levit_128s.fb_dist_in1k", "mobilevit_xxs.cvnets_in1k"),
    *("convnext_atto.d2_in1k", "convnext_base.clip_laion2b", "convnext_tiny.dinov3_lvd1689m"),
    *("maxvit_tiny_tf_224.in1k", "maxvit_tiny_tf_384.in1k", "nest_tiny_jx.goog_in1k"),
    *("beit_base_patch16_384.in22k_ft_in22k_in1k", "beitv2_base_patch16_224.in1k_ft_in22k"),
    *("vit_small_patch16_dinov3.lvd1689m", "vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m"),
    *("eva02_tiny_patch14_224.mim_in22k", "eva02_base_patch14_448.mim_in22k_ft_in1k"),
    *("tf_efficientnet_b0.ap_in1k", "resnetv2_50x1_bit.goog_distilled_in1k", "mixer_b16_224.miil_in21k_ft_in1k"),
    *("vit_base_patch32_siglip_256.v2_webli", "vit_base_patch16_siglip_gap_224.webli"),
}


@pytest.mark.parametrize(
    "weights",
    [pytest.param(each, id=each.name, marks=[] if each.name in SMALLEST else pytest.mark.slow) for each in ROWS],
)
def test_weights_of_timm_are_read_as_the_preset_without_assumptions(weights: PretrainedWeights) -> None:
    check_file_of_timm(weights)
