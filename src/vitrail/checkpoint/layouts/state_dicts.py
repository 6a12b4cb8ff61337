"""Files with one state dict, flat or under a wrapper: of facebook, torchvision, yitu, akamaster and other authors.

`authors`: of architectures that no library has. `deit`: facebook's DeiT, DeiT-III, CaiT and Parallel ViT, with timm's
names, but gamma_1 for LayerScale. `torchvision`: its ViTs, also from before their MLP was renamed, ResNets, RegNetYs
and others; a ResNet has the same names in timm, so a file is read as timm's unless the user names torchvision.
`akamaster`: the paper's ResNets for CIFAR-10, of pytorch_resnet_cifar10. `t2t`: yitu's T2T-ViT, with its own names for
the stages, and k before q.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, is_timm_family_unknown_to, recognize_source
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.name_table import add_name_prefix
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames
from vitrail.models.catalog.families import list_published_heads

# `details` of a source: `fields`, the config fields of all its models; `ignored`, a pattern of tensors that are not
# used; `prefix` before all names; `wrapper`, the key of the tensors in a file; `buffers`, which makes tensors that
# follow from a config; `preprocessing`, fields where they are not the default ones; `kernel`, a tensor with as many
# rows as the model is wide, if heads follow from the width. Of deit: `cropped`, whether images are cropped, which by
# default they are; `named_as_in_timm`, whether only the wrapper distinguishes a file from timm's; `own_names`,
# whether no other layout has its names. Of torchvision: `crop`, which returns the share that its transforms crop, and
# their `interpolation`
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SCALE_WARNING = (
    "the file does not specify how attention is scaled: by the head width, as in yitu's evaluation; "
    "if it was trained with the scale of the model width, set `source` to t2t_by_width"
)
MakePreprocessing = Callable[[SourceNames, Mapping[str, Any]], Preprocessing]


def read_state_dict(
    name: str,
    contents: RawContents,
    tensors: Mapping[str, Tensor],
    known: Mapping[str, Any],
    make_preprocessing: MakePreprocessing,
    *,
    kernel: str = "",
    owned: bool = True,
    ignore: str = "",
    **facts: Any,
) -> layout.TranslatedCheckpoint:
    """Translate tensors under the names of a layout.

    The first axis of `kernel` is the model's width, by which heads are found. `owned` is whether the file is known to
    be the owner's. `facts` are further fields of an ModelBeforeRenaming.
    """
    family, source = get_source(name, tensors, contents.path)
    timm.refuse_incompatible_model(contents.path.name, family, source)
    kernel = source.details.get("kernel", kernel)
    heads = layout.find_heads_by_width(tensors, kernel, source) if owned else {}
    given: dict[str, Any] = {"policy": "deit", "fixed_fields": layout.OWNER_FIXED_FIELDS if owned else (), **facts}
    model = layout.ModelBeforeRenaming(
        layout=name,
        family=family,
        source=source,
        tensors=tensors,
        known={**source.details.get("fields", {}), **heads, **known},
        preprocessing=partial(make_preprocessing, source),
        assumed_preprocessing=not owned,
        ignore=ignore or source.details.get("ignored", ""),
        **given,
    )
    return layout.translate_checkpoint(contents, model)


def write_state_dict(
    name: str, tensors: Mapping[str, Tensor], description: Description, path: Path, wrapper: str = "", prefix: str = ""
) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source(name, description)
    layout.check_representable(name, config, source.supported)
    table = add_name_prefix(source.table, source.details.get("prefix", prefix))
    wrapper = source.details.get("wrapper", wrapper)
    buffers = source.details["buffers"](config) if "buffers" in source.details else {}
    layout.rename_and_write_tensors(name, tensors, table, config.get("heads", 1), path, wrapper, buffers)
    return source.assumed


def matches_names(name: str, *prefixes: str) -> Callable[[RawContents], bool]:
    """A test for files with the names of a layout after these prefixes."""
    return lambda contents: (
        recognize_source(name, layout.strip_common_prefixes(contents.tensors, *prefixes)) is not None
    )


def make_imagenet_preprocessing(source: SourceNames, config: Mapping[str, Any], **fields: Any) -> Preprocessing:
    """ImageNet's mean and a crop of 0.875, unless the fields or the source declare others."""
    given: dict[str, Any] = {
        "crop": 0.875,
        **layout.IMAGENET_MEAN_STD,
        **fields,
        **source.details.get("preprocessing", {}),
    }
    return Preprocessing(image_size=config["image_size"], **given)


def read_authors(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    return read_state_dict("authors", contents, tensors, known, make_imagenet_preprocessing)


def matches_akamaster(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    return "linear.weight" in names and recognize_source("akamaster", names) is not None


def read_akamaster(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Its code supports no data set but CIFAR-10, and normalizes it with the mean and std of ImageNet."""
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    head = tensors.get("linear.weight")
    labels = CIFAR10_CLASSES if head is not None and head.shape[:1] == (len(CIFAR10_CLASSES),) else None
    preprocessing = partial(make_imagenet_preprocessing, crop=1.0)
    return read_state_dict(
        "akamaster", contents, tensors, known, preprocessing, policy="timm", labels=labels, fixed_fields=()
    )


def matches_deit(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    found, wrapped = recognize_source("deit", names), contents.wrapper in ("model", "model_ema")
    if found is None or is_timm_family_unknown_to("deit", names):
        return False
    if found[1].details.get("named_as_in_timm"):
        return wrapped
    if found[1].details.get("own_names"):
        return True
    others = {"fc_norm.weight", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = bool({"head.weight", "dist_token"} & names.keys()) and not others & names.keys()
    return (wrapped and own) or "blocks.0.gamma_1" in names


def read_deit(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    # facebook's files have no other keys; others used its code for other models, such as MoCo v3 with 12 heads
    kernel = "" if contents.other_keys else timm.PATCH_KERNEL
    return read_state_dict("deit", contents, tensors, known, make_deit_preprocessing, kernel=kernel)


def make_deit_preprocessing(source: SourceNames, config: Mapping[str, Any]) -> Preprocessing:
    cropped = source.details.get("cropped", True) and max(config["image_size"]) <= 224
    return make_imagenet_preprocessing(source, config, crop=0.875 if cropped else 1.0)


def matches_torchvision(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    return recognize_source("torchvision", names) is not None and recognize_source("timm", names) is None


def read_torchvision(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, "module.")
    kernel, preprocessing = "conv_proj.weight", make_torchvision_preprocessing
    return read_state_dict("torchvision", contents, tensors, known, preprocessing, kernel=kernel, policy="torchvision")


def make_torchvision_preprocessing(source: SourceNames, config: Mapping[str, Any]) -> Preprocessing:
    """As in its transforms: weights above 224 pixels are from SWAG, and vit_l_16 is cropped from 242 pixels."""
    if "crop" in source.details:
        crop, interpolation = source.details["crop"](config), source.details.get("interpolation", "bicubic")
    elif max(config["image_size"]) > 224:
        crop, interpolation = 1.0, "bicubic"
    else:
        large = config.get("width") == 1024 and config.get("patch_size") == (16, 16)
        crop, interpolation = 224 / 242 if large else 0.875, "bilinear"
    return make_imagenet_preprocessing(source, config, crop=crop, interpolation=interpolation)


def write_torchvision(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    renamed = layout.add_zero_prefix_positions(tensors, description.config, 1)
    return write_state_dict("torchvision", renamed, description, path)


def read_t2t(contents: RawContents, known: Mapping[str, Any], name: str = "t2t") -> layout.TranslatedCheckpoint:
    """Read a T2T-ViT, whose number of heads is that of the published model with an MLP of this shape.

    yitu's code has two scales for the attention of the backbone. By default, as for the released weights, it divides by
    the square root of the head width. We and mmpretrain do the same, and mmpretrain reports the published accuracy of
    the released T2T-ViT_t-14. Built with `pretrained=True`, which downloads nothing, it divides by the square root of
    the model width: a file of such a run is read as `t2t_by_width`.
    """
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    family, _ = get_source(name, tensors, contents.path)
    shape = tuple(tensors["blocks.0.mlp.fc1.weight"].shape) if "blocks.0.mlp.fc1.weight" in tensors else ()
    heads = list_published_heads(family).get(f"{shape[1]} {shape[0]}") if len(shape) == 2 else None
    known, warnings = {**({"heads": heads} if heads else {}), **known}, [SCALE_WARNING] if name == "t2t" else []
    preprocessing = partial(make_imagenet_preprocessing, crop=0.9)
    return read_state_dict(name, contents, tensors, known, preprocessing, warnings=warnings)


def read_t2t_by_width(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """q·k/√D is (q/√H)·k/√K, so the rows of q are divided by √H when reading and multiplied when writing."""
    translated = read_t2t(contents, known, "t2t_by_width")
    heads = translated.description.config["heads"]
    return replace(translated, tensors=scale_queries(translated.tensors, 1 / sqrt(heads)))


def write_t2t_by_width(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    scaled = scale_queries(tensors, sqrt(description.config["heads"]))
    return write_state_dict("t2t_by_width", scaled, description, path, "state_dict_ema")


def scale_queries(tensors: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """Multiply the rows of q in all blocks."""
    scaled = dict(tensors)
    for name, tensor in tensors.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", name):
            q, k, v = tensor.chunk(3)
            scaled[name] = torch.cat((q * by, k, v))
    return scaled


LAYOUTS = (
    layout.Layout(
        name="authors",
        matches=matches_names("authors", *timm.WRAPPER_PREFIXES),
        read=read_authors,
        write=partial(write_state_dict, "authors", wrapper="state_dict"),
    ),
    layout.Layout(
        name="akamaster",
        matches=matches_akamaster,
        read=read_akamaster,
        write=partial(write_state_dict, "akamaster", wrapper="state_dict", prefix="module."),  # as of a DataParallel
    ),
    layout.Layout(
        name="deit", matches=matches_deit, read=read_deit, write=partial(write_state_dict, "deit", wrapper="model")
    ),
    layout.Layout(name="torchvision", matches=matches_torchvision, read=read_torchvision, write=write_torchvision),
    layout.Layout(
        name="t2t",
        matches=matches_names("t2t", *timm.WRAPPER_PREFIXES),
        read=read_t2t,
        write=partial(write_state_dict, "t2t", wrapper="state_dict_ema"),
    ),
    # nothing in a file distinguishes it from t2t, so it is used only if the user names it
    layout.Layout(name="t2t_by_width", matches=lambda _: False, read=read_t2t_by_width, write=write_t2t_by_width),
)
