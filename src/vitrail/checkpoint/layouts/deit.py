"""facebook's DeiT, DeiT-III, CaiT and Parallel ViT: {"model": …} with timm's names, but gamma_1 for LayerScale."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, is_timm_family_unknown_to, recognize_source
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.name_table import add_name_prefix
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing

NAME = "deit"
# `details` of a source: `prefix` before all names; `cropped`, whether images are cropped, which by default they are;
# `named_as_in_timm`, whether only the wrapper distinguishes a file from timm's; `own_names`, whether no other layout
# has its names; `fields`, the config fields of all its models


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    found, wrapped = recognize_source(NAME, names), contents.wrapper in ("model", "model_ema")
    if found is None or is_timm_family_unknown_to(NAME, names):
        return False
    if found[1].details.get("named_as_in_timm"):
        return wrapped
    if found[1].details.get("own_names"):
        return True
    others = {"fc_norm.weight", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = bool({"head.weight", "dist_token"} & names.keys()) and not others & names.keys()
    return (wrapped and own) or "blocks.0.gamma_1" in names


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    family, source = get_source(NAME, tensors, contents.path)
    timm.refuse_incompatible_model(contents.path.name, family, source)
    # facebook's files have no other keys; others used its code for other models, such as MoCo v3 with 12 heads
    published = not contents.other_keys
    heads = layout.find_heads_by_width(tensors, "patch_embed.proj.weight", source) if published else {}
    cropped = source.details.get("cropped", True)
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**source.details.get("fields", {}), **heads, **known},
        policy="deit",
        preprocessing=lambda config: make_preprocessing(config, cropped=cropped),
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(config: Mapping[str, Any], *, cropped: bool = True) -> Preprocessing:
    size = config["image_size"]
    crop = 0.875 if cropped and max(size) <= 224 else 1.0
    return Preprocessing(image_size=size, crop=crop, **layout.IMAGENET_MEAN_STD)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    _, source = choose_source(NAME, description)
    layout.check_representable(NAME, description.config, source.supported)
    table = add_name_prefix(source.table, source.details.get("prefix", ""))
    layout.rename_and_write_tensors(NAME, tensors, table, description.config["heads"], path, wrapper="model")
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
