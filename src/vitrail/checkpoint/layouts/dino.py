"""DINO: backbones, and training runs, of which the teacher is read. DINOv2: also with registers and SwiGLU."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, is_timm_family_unknown_to
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing

NAME = "dino"
PROJECTION_PATTERN = r"mask_token|head\..*|dino_head\..*|ibot_head\..*"  # needed only for training
PUBLISHED_FILE_NAME = re.compile(r"dino(v2)?_(deit|vit).*_pretrain")


def get_backbone_tensors(contents: RawContents) -> dict[str, Tensor]:
    """Tensors with the names of the backbone; blocks that training grouped into chunks are numbered consecutively."""
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    if "backbone.patch_embed.proj.weight" in tensors:
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name): tensor for name, tensor in tensors.items()}


def find_dinov2_tensor_names(names: Mapping[str, object]) -> set[str]:
    """Names of tensors that only DINOv2 has."""
    return {"mask_token", "register_tokens"} & names.keys()


def matches(contents: RawContents) -> bool:
    names = get_backbone_tensors(contents)
    other = {"decoder_embed.weight", "head.weight"} & names.keys()
    own = contents.wrapper == "teacher" or (find_dinov2_tensor_names(names) and not other)
    others = ("head", "dist_token", "reg_token", "fc_norm", "attn_pool", "patch_embed.backbone", "blocks_token_only")
    flat = contents.kind == "pickle" and not contents.wrapper and not any(name.startswith(others) for name in names)
    return "patch_embed.proj.weight" in names and bool(own or flat) and not is_timm_family_unknown_to(NAME, names)


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    backbone = get_backbone_tensors(contents)
    tensors = {name: tensor for name, tensor in backbone.items() if not re.fullmatch(PROJECTION_PATTERN, name)}
    family, source = get_source(NAME, tensors, contents.path)
    head = "head.weight" in backbone
    owned = (  # any other backbone may not be DINO's
        bool(known.get(layout.LAYOUT_NAMED_KEY) or find_dinov2_tensor_names(backbone))
        or contents.wrapper == "teacher"
        or PUBLISHED_FILE_NAME.match(contents.path.name) is not None
    )
    if "register_tokens" in tensors and "pos_embed" in tensors:
        tensors["pos_embed"] = layout.insert_zero_register_positions(tensors["pos_embed"], tensors["register_tokens"])
    ignored = [name for name in contents.tensors if re.search(rf"(^|\.)({PROJECTION_PATTERN})$", name)]
    heads = layout.find_heads_by_width(tensors, "patch_embed.proj.weight", source) if owned else {}
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**heads, **known},
        policy="timm" if "register_tokens" in tensors else "dino",  # with registers, DINOv2 antialiases too
        preprocessing=make_preprocessing,
        warnings=["its classification head is ignored: DINO's files have none"] if head else [],
        fixed_fields=layout.OWNER_FIXED_FIELDS if owned else (),
        assumed_preprocessing=not owned,
    )
    return replace(layout.translate_checkpoint(contents, model), ignored=tuple(ignored))


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    size = config["image_size"]
    return Preprocessing(image_size=size, crop=0.875 if max(size) <= 256 else 1.0, **layout.IMAGENET_MEAN_STD)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    renamed = layout.add_zero_prefix_positions(tensors, config, 1 + config.get("registers", 0))
    renamed = layout.remove_zero_register_positions(NAME, renamed, config)
    layout.rename_and_write_tensors(NAME, renamed, source.table, config["heads"], path)
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
