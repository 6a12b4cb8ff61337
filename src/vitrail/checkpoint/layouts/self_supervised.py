"""Backbones of self-supervised training: DINO and DINOv2, MAE, MoCo v3.

Many files have the names of any ViT: they are recognized by their wrapper, their fixed position table or what training
added, and the owner's number of heads is assumed only where the file is known to be the owner's.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, find_source, is_sincos_table, is_timm_family_unknown_to
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.layouts.state_dicts import (
    make_deit_preprocessing,
    make_imagenet_preprocessing,
    read_state_dict,
    write_state_dict,
)
from vitrail.checkpoint.name_table import convert_to_our_tensors
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames, make_entry
from vitrail.models.names.hf_names import HF_VIT_TABLE

PROJECTION_PATTERN = r"mask_token|head\..*|dino_head\..*|ibot_head\..*"  # of DINO, needed only for training
PUBLISHED_DINO_FILE = re.compile(r"dino(v2)?_(deit|vit).*_pretrain")
DECODER_PATTERN = r"mask_token|decoder_.*"  # of MAE
HF_DECODER_PREFIX = "decoder."  # in transformers
HF_DECODER_BLOCK = re.compile(r"decoder_(?:layers|encoder\.layer)\.")  # the second since v5
ENCODER_PREFIX = "base_encoder."  # of MoCo, next to momentum_encoder. and predictor.


def get_dino_tensors(contents: RawContents) -> dict[str, Tensor]:
    """Tensors with the names of the backbone; blocks that training grouped into chunks are numbered consecutively."""
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    if f"backbone.{timm.PATCH_KERNEL}" in tensors:
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name): tensor for name, tensor in tensors.items()}


def is_dino_owned(contents: RawContents, names: Mapping[str, object]) -> bool:
    """Whether it is a teacher, or has tensors that only DINOv2 has."""
    return contents.wrapper == "teacher" or bool({"mask_token", "register_tokens"} & names.keys())


def matches_dino(contents: RawContents) -> bool:
    names = get_dino_tensors(contents)
    other = {"decoder_embed.weight", "head.weight"} & names.keys()
    own = contents.wrapper == "teacher" or (is_dino_owned(contents, names) and not other)
    others = ("head", "dist_token", "reg_token", "fc_norm", "attn_pool", "patch_embed.backbone", "blocks_token_only")
    flat = contents.kind == "pickle" and not contents.wrapper and not any(name.startswith(others) for name in names)
    return timm.PATCH_KERNEL in names and (own or flat) and not is_timm_family_unknown_to("dino", names)


def read_dino(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read the backbone, of a training run that of the teacher. DINOv2 may also have registers and SwiGLU."""
    backbone = get_dino_tensors(contents)
    tensors = {name: tensor for name, tensor in backbone.items() if not re.fullmatch(PROJECTION_PATTERN, name)}
    if "register_tokens" in tensors and "pos_embed" in tensors:
        tensors["pos_embed"] = layout.insert_zero_register_positions(tensors["pos_embed"], tensors["register_tokens"])
    ignored = [name for name in contents.tensors if re.search(rf"(^|\.)({PROJECTION_PATTERN})$", name)]
    translated = read_state_dict(
        "dino",
        contents,
        tensors,
        known,
        make_dino_preprocessing,
        kernel=timm.PATCH_KERNEL,
        owned=(  # any other backbone may not be DINO's
            known.get(layout.LAYOUT_NAMED_KEY)
            or is_dino_owned(contents, backbone)
            or PUBLISHED_DINO_FILE.match(contents.path.name) is not None
        ),
        policy="timm" if "register_tokens" in tensors else "dino",  # with registers, DINOv2 antialiases too
        warnings=["its classification head is ignored: DINO's files have none"] * ("head.weight" in backbone),
    )
    return replace(translated, ignored=tuple(ignored))


def make_dino_preprocessing(source: SourceNames, config: Mapping[str, Any]) -> Preprocessing:
    return make_imagenet_preprocessing(source, config, crop=0.875 if max(config["image_size"]) <= 256 else 1.0)


def write_dino(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source("dino", description)
    layout.check_representable("dino", config, source.supported)
    renamed = layout.add_zero_prefix_positions(tensors, config, 1 + config.get("registers", 0))
    return write_state_dict("dino", layout.remove_zero_register_positions("dino", renamed, config), description, path)


def matches_mae(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    tuned = "fc_norm.weight" in names and "norm.weight" not in names
    own = "decoder_embed.weight" in names or (contents.wrapper == "model" and ("head.weight" not in names or tuned))
    others = {"dist_token", "blocks.0.gamma_1", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = own and timm.PATCH_KERNEL in names and not others & names.keys()
    return own and not is_timm_family_unknown_to("mae", names)


def read_mae(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read the encoder, perhaps next to a decoder; or a fine-tuned model, with a norm after the mean of patches."""
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    owned = (
        bool(known.get(layout.LAYOUT_NAMED_KEY))
        or "norm.weight" not in tensors
        or "decoder_embed.weight" in tensors
        or is_sincos_table(tensors.get("pos_embed"), columns_first=True)
    )
    kernel, ignore = timm.PATCH_KERNEL, DECODER_PATTERN
    return read_state_dict(
        "mae", contents, tensors, known, make_deit_preprocessing, kernel=kernel, owned=owned, ignore=ignore
    )


def write_mae(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write the encoder, perhaps with a decoder by its names here, or the fine-tuned model.

    A file without a head does not say how tokens are pooled: an encoder that pools the patches can be written.
    """
    _, source = choose_source("mae", description)
    heads, config, assumed = description.config["heads"], description.config, source.assumed
    if not config["classes"] and config.get("pool") == "mean":
        config, assumed = {**config, "pool": "class"}, {**assumed, "pool": "class"}
    layout.check_representable("mae", config, source.supported)
    decoder = [make_entry(name, name) for name in tensors if re.fullmatch(DECODER_PATTERN, name)]
    layout.rename_and_write_tensors("mae", tensors, (*decoder, *source.table), heads, path, wrapper="model")
    return assumed


def collect_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MAE's decoder in a file of the authors or of transformers, by the authors' names; empty if there is none."""
    names = layout.strip_common_prefixes(tensors, *timm.WRAPPER_PREFIXES)
    found = {name.removeprefix(HF_DECODER_PREFIX): tensor for name, tensor in names.items()}
    found = {name: tensor for name, tensor in found.items() if re.fullmatch(DECODER_PATTERN, name)}
    if "decoder_embed.weight" not in found:
        return {}
    layers = {name: tensor for name, tensor in found.items() if HF_DECODER_BLOCK.match(name)}
    prefix = "layers." if any(".mlp." in name for name in layers) else "encoder.layer."  # in memory, and on disk
    renamed = {HF_DECODER_BLOCK.sub(prefix, name): tensor for name, tensor in layers.items()}
    blocks, _ = convert_to_our_tensors(renamed, HF_VIT_TABLE)
    rest = {name: tensor for name, tensor in found.items() if name not in layers}
    return {**rest, **{f"decoder_{name}": tensor for name, tensor in blocks.items()}}


def matches_moco(contents: RawContents) -> bool:
    """A probe, or the output of MoCo's convert_to_deit.py, has the names of any ViT, but a fixed position table."""
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    if ENCODER_PREFIX + timm.PATCH_KERNEL in names:
        return True
    kernel = names.get(timm.PATCH_KERNEL)
    if kernel is None or kernel.ndim != 4 or not is_sincos_table(names.get("pos_embed"), columns_first=False):
        return False
    found = find_source("moco", names)
    return found is not None and kernel.shape[0] in found[1].heads


def read_moco(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read the base encoder of a training run without its projector, or a linear probe with its head.

    Its ViT-S has 12 heads, others have 6. Images are prepared as its authors evaluate a probe.
    """
    tensors, ignored = layout.strip_common_prefixes(contents.tensors, "module."), list[str]()
    if ENCODER_PREFIX + timm.PATCH_KERNEL in tensors:
        ignored = [n for n in tensors if not n.startswith(ENCODER_PREFIX) or n.startswith(f"{ENCODER_PREFIX}head.")]
        tensors = {n.removeprefix(ENCODER_PREFIX): each for n, each in tensors.items() if n not in ignored}
    preprocessing = partial(make_imagenet_preprocessing, interpolation="bilinear")
    translated = read_state_dict("moco", contents, tensors, known, preprocessing, kernel=timm.PATCH_KERNEL)
    return replace(translated, ignored=tuple(ignored))


def write_moco(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write the base encoder, or, with a head, a probe that is recognized by its position table."""
    config, (_, source) = description.config, choose_source("moco", description)
    layout.check_representable("moco", config, source.supported)
    layout.check_representable("moco", config, {"heads": (source.heads.get(config["width"], config["heads"]),)})
    if config["classes"] and not (
        is_sincos_table(tensors.get("pos_embed"), columns_first=False) and config["width"] in source.heads
    ):
        raise CheckpointError(
            f"moco can store {config['classes']} classes only with its own position table; expected 0 classes"
        )
    prefix = "module." if config["classes"] else f"module.{ENCODER_PREFIX}"
    renamed = layout.add_zero_prefix_positions(tensors, config, 1)
    return write_state_dict("moco", renamed, description, path, "state_dict", prefix)


LAYOUTS = (
    layout.Layout(name="moco", matches=matches_moco, read=read_moco, write=write_moco),
    layout.Layout(name="dino", matches=matches_dino, read=read_dino, write=write_dino),
    layout.Layout(name="mae", matches=matches_mae, read=read_mae, write=write_mae, collect_parts=collect_decoder),
)
