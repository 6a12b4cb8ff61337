"""timm, whose names this package uses too: a flat file, a training checkpoint, or a folder as on the hub."""

import json
import re
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.convnet_tensors import CONVNET_NAMES as CONVNETS
from vitrail.checkpoint.convnet_tensors import find_convnet_family
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.files.weight_folders import CONFIG_FILE, WEIGHT_FILES
from vitrail.checkpoint.name_table import TWO_PARTS, NameEntry, make_entry
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import make_folder, write_text
from vitrail.models.catalog import load_built_in_families

STEM_PREFIXES = ("patch_embed.backbone.stem.", "patch_embed.backbone.")
UNIT_PREFIX = "patch_embed.backbone.stages.#.blocks.#."
SHARED_NAMES = (
    *("cls_token", "reg_token", "dist_token", "pos_embed", "patch_embed.proj.*"),
    *(f"blocks.#.{part}" for part in ("norm1.*", "attn.qkv.*", "attn.proj.*", "norm2.*", "mlp.fc1.*", "mlp.fc2.*")),
    *("norm.*", "fc_norm.*", "head.*", "head_dist.*", "attn_pool.latent"),
    *(f"attn_pool.{part}.*" for part in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")),
    *(f"{root}{part}" for root in STEM_PREFIXES for part in ("conv.weight", "norm.*")),
    *(f"{UNIT_PREFIX}{part}{n}.{end}" for n in (1, 2, 3) for part, end in (("conv", "weight"), ("norm", "*"))),
    *(f"{UNIT_PREFIX}downsample.{part}" for part in ("conv.weight", "norm.*")),
)
BASE_TABLE: tuple[NameEntry, ...] = (
    *map(make_entry, SHARED_NAMES, SHARED_NAMES),
    make_entry("pre_logits.fc.*", "pre_logits.*"),
)
LAYER_SCALE_ENTRIES = (
    make_entry("blocks.#.ls1.gamma", "blocks.#.ls1.gamma"),
    make_entry("blocks.#.ls2.gamma", "blocks.#.ls2.gamma"),
)
NAME_TABLE = (*BASE_TABLE, *LAYER_SCALE_ENTRIES)
CAIT_MARKER = "blocks_token_only.0.norm1.weight"  # a tensor that only a CaiT has
CLASS_BLOCK_NAMES = tuple(
    f"blocks_token_only.#.{part}.*" for part in ("norm1", "attn.q", "attn.proj", "norm2", "mlp.fc#")
)
CAIT_SHARED_NAMES = ("blocks.#.attn.proj_l.*", "blocks.#.attn.proj_w.*", *CLASS_BLOCK_NAMES)
CAIT_SCALES = tuple((f"blocks{kind}.#.", n) for kind in ("", "_token_only") for n in (1, 2))
CAIT_TABLE = (
    *BASE_TABLE,
    *map(make_entry, CAIT_SHARED_NAMES, CAIT_SHARED_NAMES),
    *(make_entry(f"{block}gamma_{n}", f"{block}ls{n}.gamma") for block, n in CAIT_SCALES),
    make_entry([f"blocks_token_only.#.attn.{part}.*" for part in "kv"], "blocks_token_only.#.attn.kv.*", TWO_PARTS),
)
ASSUMED_FIELDS = {"activation": "gelu", "constants": "timm", "norm_eps": 1e-6}
SUPPORTED_VALUES = {
    "positions": ("learned", "sincos", "sincos_2d", "none"),
    "positions_at": ("stem",),
    "head": ("linear",),
}
CONVNET_SUPPORTED_VALUES = {"stem": ("imagenet",), "shortcut": ("projection",)}
CONVNET_DEFAULTS = {  # of models without a tag; many tags have another crop or size
    "resnet": {"crop_pct": 0.875, "interpolation": "bilinear"},
    "regnety": {"crop_pct": 0.95, "interpolation": "bicubic"},
}
SEEN_IN_SHAPES = {"in_chans", "num_classes", "layers", "depth", "w0", "wa", "wm", "group_size"}  # in a convnet
TANH_GELU_MODEL = re.compile(  # with the tanh approximation of GELU
    r"vit_(base_patch32_siglip(_gap)?_256|large_patch16_siglip(_gap)?_512|(giantopt|so400m)_patch16_siglip.*)"
)
HALF_TAGS, IMAGENET_TAGS = ("augreg", "augreg2", "orig"), ("dino", "mae", "fb")  # in file names, by their mean
TIMM_POOLS = {"class": "token", "mean": "avg", "mean_norm": "avg", "map": "map"}
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")  # added by wrappers of a model


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *WRAPPER_PREFIXES)
    return "patch_embed.proj.weight" in names or find_convnet_family(names) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = unflatten_patch_kernel(layout.strip_common_prefixes(contents.tensors, *WRAPPER_PREFIXES))
    if (convnet := find_convnet_family(tensors)) is not None:
        return read_convnet(contents, tensors, convnet, known)
    if "patch_embed.proj.weight" not in tensors:
        raise CheckpointError(
            f"{contents.path} has no patch_embed.proj.weight; expected timm's names, or another `source`"
        )
    card = contents.config or {}
    name = layout.get_typed_field(card, "architecture", str, contents.path.name.split(".")[0])
    refuse_incompatible_model(name)
    hybrid = any(each.startswith("patch_embed.backbone.") for each in tensors)
    family = "hybrid" if hybrid else "deit" if "dist_token" in tensors or name.startswith("deit") else "vit"
    pretrained = layout.get_typed_field(card, "pretrained_cfg", dict, card)
    if CAIT_MARKER in tensors:
        family, pretrained = "cait", {"crop_pct": 1.0, **pretrained}
    width = tensors["patch_embed.proj.weight"].shape[0]
    imagenet = family in ("deit", "cait") or "dino" in name or any(each.endswith("ls1.gamma") for each in tensors)
    tag = (contents.path.name.split(".")[1:] or [""])[0].split("_")[0]
    imagenet = imagenet or tag in IMAGENET_TAGS
    named_fields = {} if family == "cait" else fields_from_model_name(name, family, width)
    only_timm = family in ("cait", "hybrid")  # whose names no other library has
    owned = only_timm or "architecture" in card or find_preset_of_width(name, family, width) is not None
    card_fields = layout.merge_agreeing_fields(fields_from_timm_config(card, tensors), known)
    model = layout.UntranslatedModel(
        layout="timm",
        family=family,
        tensors=tensors,
        table=CAIT_TABLE if family == "cait" else NAME_TABLE,
        known={**image_size_from_timm_config(pretrained), **named_fields, **card_fields},
        policy="timm",
        preprocessing=lambda config: preprocessing_from_timm_config(config, pretrained, imagenet),
        labels=labels_from_timm_config(card, pretrained),
        fixed_fields=("heads", *layout.OWNER_FIXED_FIELDS) if owned else (),
        assumed_preprocessing="mean" not in pretrained and not (owned and tag in (*HALF_TAGS, *IMAGENET_TAGS)),
    )
    return layout.translate_checkpoint(contents, model)


def read_convnet(
    contents: RawContents, tensors: Mapping[str, Tensor], family: str, known: Mapping[str, Any]
) -> layout.TranslatedCheckpoint:
    card = contents.config or {}
    name = layout.get_typed_field(card, "architecture", str, contents.path.name.split(".")[0])
    pretrained = layout.get_typed_field(card, "pretrained_cfg", dict, card)
    unsupported = {"architecture": name} if name.startswith(("resnetblur", "resnetaa")) else {}  # fixed filters
    arguments = layout.get_typed_field(card, "model_args", dict, {})
    unsupported |= {key: value for key, value in arguments.items() if key not in SEEN_IN_SHAPES}
    if card.get("global_pool", "avg") != "avg":
        unsupported["global_pool"] = card["global_pool"]
    for key, value in unsupported.items():
        raise CheckpointError(f"{key} is {repr(value)[:40]}, which is not supported; expected a plain {family}")
    defaults = {**CONVNET_DEFAULTS[family], **pretrained}
    model = layout.UntranslatedModel(
        layout="timm",
        family=family,
        tensors=tensors,
        table=tuple(map(make_entry, CONVNETS[family], CONVNETS[family])),
        known={**image_size_from_timm_config(pretrained), **known},
        policy="timm",
        preprocessing=lambda config: preprocessing_from_timm_config(config, defaults, imagenet=True),
        labels=labels_from_timm_config(card, pretrained),
        assumed_preprocessing="mean" not in pretrained,
    )
    return layout.translate_checkpoint(contents, model)


def refuse_incompatible_model(name: str) -> None:
    """Refuse models with the tensor names and shapes of a ViT that compute something else."""
    if re.search(r"(^|_)(rope|rpn)(_|$)", name.split(".")[0]):
        raise CheckpointError(f"{name} has rotary positions or post-norm blocks; expected a plain ViT or DeiT")


def fields_from_model_name(name: str, family: str, width: int) -> dict[str, Any]:
    """Fields that the name of a model tells and the shapes do not."""
    preset = find_preset_of_width(name, family, width)
    fields: dict[str, Any] = {} if preset is None else {"heads": preset.heads}
    if TANH_GELU_MODEL.fullmatch(name):
        fields["activation"] = "gelu_tanh"
    return fields


def find_preset_of_width(name: str, family: str, width: int) -> Any:
    """The preset of this name if it has this width, else None."""
    preset = next(each.presets.get(name) for each in load_built_in_families() if each.name == family)
    return preset if preset is not None and preset.width == width else None


def image_size_from_timm_config(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    if "input_size" not in pretrained:
        return {}
    return {"image_size": tuple(layout.get_typed_field(pretrained, "input_size", list, [])[1:])}


def fields_from_timm_config(card: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of the folder's config.json that the shapes do not tell."""
    fields, arguments = dict[str, Any](), layout.get_typed_field(card, "model_args", dict, {})
    if "num_heads" in arguments:
        fields["heads"] = layout.get_typed_field(arguments, "num_heads", int, 0)
    activation = arguments.get("act_layer")
    if activation in ("gelu", "gelu_tanh"):
        fields["activation"] = activation
    elif activation not in (None, "silu"):  # part of SwiGLU, which the shapes tell
        raise CheckpointError(f"act_layer is {activation!r}; expected gelu or gelu_tanh")
    if arguments.get("pos_embed") == "none":
        fields["positions"] = "none"
    pool = arguments.get("global_pool", card.get("global_pool"))
    if pool is None or "dist_token" in tensors:
        return fields
    fc_norm = "fc_norm.weight" in tensors and "norm.weight" not in tensors
    pools = {"token": "class", "avg": "mean_norm" if fc_norm else "mean", "map": "map"}
    if pool not in pools or (pool == "token" and fc_norm):
        suffix = " with fc_norm" if fc_norm else ""
        raise CheckpointError(f"global_pool is {pool!r}{suffix}; expected token, avg or map")
    return {**fields, "pool": pools[pool]}


def unflatten_patch_kernel(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reshape the patch kernel of very old files, where it is a matrix."""
    kernel = tensors.get("patch_embed.proj.weight")
    if kernel is not None and kernel.ndim == 2:
        side = isqrt(kernel.shape[1] // 3)
        if 3 * side * side == kernel.shape[1]:
            return {**tensors, "patch_embed.proj.weight": kernel.reshape(-1, 3, side, side)}
    return tensors


def preprocessing_from_timm_config(
    config: Mapping[str, Any], pretrained: Mapping[str, Any], imagenet: bool
) -> Preprocessing:
    size = config["image_size"]
    constants = layout.IMAGENET_MEAN_STD if imagenet else layout.HALF_MEAN_STD
    return Preprocessing(
        image_size=size,
        crop=layout.get_typed_field(pretrained, "crop_pct", float, 0.9 if max(size) < 384 else 1.0),
        fit="squash" if pretrained.get("crop_mode") == "squash" else "short_side",
        interpolation="bilinear" if pretrained.get("interpolation") == "bilinear" else "bicubic",
        mean=tuple(layout.get_typed_field(pretrained, "mean", list, list(constants["mean"]))),
        std=tuple(layout.get_typed_field(pretrained, "std", list, list(constants["std"]))),
    )


def labels_from_timm_config(card: Mapping[str, Any], pretrained: Mapping[str, Any]) -> tuple[str, ...] | None:
    names = card.get("label_names", pretrained.get("label_names"))
    descriptions = card.get("label_descriptions", pretrained.get("label_descriptions"))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(str(descriptions.get(name, name)) if isinstance(descriptions, dict) else name for name in names)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write a file, or without a suffix a folder for timm.create_model("local-dir:FOLDER", pretrained=True)."""
    config = description.config
    if description.family in CONVNETS:
        return write_convnet(tensors, description, path)
    layout.check_representable("timm", config, SUPPORTED_VALUES)
    table = CAIT_TABLE if description.family == "cait" else NAME_TABLE
    if path.suffix:
        layout.rename_and_write_tensors("timm", tensors, table, config["heads"], path)
        mean_pool = config.get("class_token") and config["pool"] == "mean"
        return ASSUMED_FIELDS | ({"pool": "class"} if mean_pool else {})
    if config.get("distilled") and not config["prefix_positions"]:
        raise CheckpointError("distilled models of timm have positions for both tokens; expected prefix_positions=True")
    if description.family == "hybrid":
        raise CheckpointError("timm cannot open a folder of a custom hybrid; expected OUT.safetensors or OUT.pth")
    write_timm_folder(tensors, table, config["heads"], make_timm_config(description), path)
    return {"norm_eps": ASSUMED_FIELDS["norm_eps"]}


def write_convnet(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config, family = description.config, description.family
    layout.check_representable("timm", config, CONVNET_SUPPORTED_VALUES)
    table = tuple(map(make_entry, CONVNETS[family], CONVNETS[family]))
    if path.suffix:
        layout.rename_and_write_tensors("timm", tensors, table, 1, path)
        return {}
    presets = next(each.presets for each in load_built_in_families() if each.name == family)
    shape = config.keys() - {"image_size", "channels", "classes"}
    name = next((n for n, preset in presets.items() if all(getattr(preset, key) == config[key] for key in shape)), None)
    if name is None:
        raise CheckpointError(
            f"timm cannot open a folder of a custom {family}; expected OUT.safetensors or OUT.pth, "
            f"or a preset: {', '.join(presets)}"
        )
    card = {"architecture": name, "num_classes": config["classes"], "model_args": {"in_chans": config["channels"]}}
    write_timm_folder(tensors, table, 1, add_preprocessing_and_labels(card, description), path)
    return {}


def write_timm_folder(
    tensors: Mapping[str, Tensor], table: Sequence[NameEntry], heads: int, card: Mapping[str, Any], path: Path
) -> None:
    text = json.dumps(card, indent=2, ensure_ascii=False)
    make_folder(path)
    layout.rename_and_write_tensors("timm", tensors, table, heads, path / WEIGHT_FILES[0])
    write_text(path / CONFIG_FILE, text)


def make_timm_config(description: Description) -> dict[str, Any]:
    config = description.config
    distilled, activation = config.get("distilled", False), config.get("activation", "gelu")
    hidden = (config.get("mlp_width") or 4 * config["width"]) * (2 if activation == "swiglu" else 1)
    arguments = {
        "img_size": config["image_size"],
        "patch_size": config["patch_size"],
        "in_chans": config["channels"],
        "embed_dim": config["width"],
        "depth": config["depth"],
        "num_heads": config["heads"],
        "mlp_ratio": hidden / config["width"] if hidden % config["width"] == 0 else (hidden + 0.5) / config["width"],
        "init_values": config.get("layer_scale"),
        "qkv_bias": config.get("qkv_bias", True),
    }
    if cait := description.family == "cait":
        arguments |= {"depth_token_only": config["class_depth"], "mlp_ratio_token_only": arguments["mlp_ratio"]}
    else:
        arguments["no_embed_class"] = not config.get("prefix_positions", True)
    if not (cait or distilled):
        arguments |= {
            "class_token": config.get("class_token", True),
            "reg_tokens": config.get("registers", 0),
            "global_pool": TIMM_POOLS[config.get("pool", "class")],
            "fc_norm": config.get("pool") == "mean_norm",
        }
    if config.get("positions") == "none":
        arguments["pos_embed"] = "none"
    if activation == "gelu_tanh":
        arguments["act_layer"] = "gelu_tanh"
    name = "vit_giant_patch14_dinov2" if activation == "swiglu" else f"{description.family}_tiny_patch16_224"
    name = "cait_xxs24_224" if cait else name
    card: dict[str, Any] = {
        "architecture": "deit_tiny_distilled_patch16_224"
        if distilled
        else name,  # any model of this kind; model_args below override it
        "num_classes": config["classes"],
        "num_features": config["width"],
        "model_args": arguments,
    }
    return add_preprocessing_and_labels(card, description)


def add_preprocessing_and_labels(card: dict[str, Any], description: Description) -> dict[str, Any]:
    """Add preprocessing and class names to the config.json of a folder."""
    config, preprocessing = description.config, description.preprocessing
    size = [config["channels"], *config["image_size"]]
    card = {**card, "pretrained_cfg": {"num_classes": config["classes"], "input_size": size}}
    if preprocessing is not None:
        card["pretrained_cfg"] |= {
            "crop_pct": preprocessing.crop,
            "crop_mode": "squash" if preprocessing.fit == "squash" else "center",
            "interpolation": preprocessing.interpolation,
            "mean": preprocessing.mean,
            "std": preprocessing.std,
        }
    if description.labels is not None:
        card["label_names"] = description.labels
    return card


LAYOUT = layout.Layout(
    name="timm", matches=matches, read=read, write=write, families=(*layout.TRANSFORMER_FAMILIES, "cait", *CONVNETS)
)
