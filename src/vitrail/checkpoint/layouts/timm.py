"""timm, whose names this package uses too: a flat file, a training checkpoint, or a folder as on the hub."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.files import make_folder, write_text
from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, find_source, recognize_source
from vitrail.checkpoint.weight_files import RawContents
from vitrail.checkpoint.weight_folders import CONFIG_FILE, WEIGHT_FILES
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import SourceNames
from vitrail.models.base.family import Family

NAME, PATCH_KERNEL = "timm", "patch_embed.proj.weight"
# `details` of a source: `refused_names`, a pattern of models that have its tensors but compute something else, and
# `refused_because`; `tanh_gelu_names`, a pattern of models with this approximation of GELU; `model_args`, the only
# arguments that a folder may have, which follow from shapes; `pretrained_cfg` and `imagenet_mean`, for preprocessing
# that a file does not specify; `only_in_timm`, whether no other library has these names; `argument_fields`, our fields
# of arguments that do not follow from shapes; `preset_fields`, those that the preset of the model's name has;
# `ignored`, a pattern of tensors that follow from the config
HALF_TAGS, IMAGENET_TAGS = ("augreg", "augreg2", "orig"), ("dino", "mae", "fb")  # in file names, by their mean
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")  # added by wrappers of a model


def matches(contents: RawContents) -> bool:
    return recognize_source(NAME, layout.strip_common_prefixes(contents.tensors, *WRAPPER_PREFIXES)) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = unflatten_patch_kernel(layout.strip_common_prefixes(contents.tensors, *WRAPPER_PREFIXES))
    card = contents.config or {}
    name = layout.get_typed_field(card, "architecture", str, contents.path.name.split(".")[0])
    found = find_source(NAME, tensors, name)
    if found is None:
        raise CheckpointError(f"{contents.path} has no {PATCH_KERNEL}; expected timm's names, or another `source`")
    family, source = found
    refuse_incompatible_model(name, family, source)
    pretrained = layout.get_typed_field(card, "pretrained_cfg", dict, card)
    preset = find_preset_of_width(name, family, tensors.get(PATCH_KERNEL))
    tag = (contents.path.name.split(".")[1:] or [""])[0].split("_")[0]
    imagenet = "imagenet_mean" in source.details or "dino" in name or tag in IMAGENET_TAGS
    imagenet = imagenet or any(each.endswith("ls1.gamma") for each in tensors)
    owned = "only_in_timm" in source.details or "architecture" in card or preset is not None
    named_fields: dict[str, Any] = {} if preset is None else {"heads": preset["heads"]}
    if name in family.presets:
        fields = asdict(family.presets[name])
        named_fields |= {each: fields[each] for each in source.details.get("preset_fields", ())}
    if re.fullmatch(source.details.get("tanh_gelu_names", ""), name):
        named_fields["activation"] = "gelu_tanh"
    card_fields = layout.merge_agreeing_fields(fields_from_timm_config(card, tensors, family, source), known)
    defaults = {**source.details.get("pretrained_cfg", {}), **pretrained}
    model = layout.ModelBeforeRenaming(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**image_size_from_timm_config(pretrained), **named_fields, **card_fields},
        policy="timm",
        ignore=source.details.get("ignored", ""),
        preprocessing=lambda config: preprocessing_from_timm_config(config, defaults, imagenet),
        labels=labels_from_timm_config(card, pretrained),
        fixed_fields=("heads", *layout.OWNER_FIXED_FIELDS) if owned else (),
        assumed_preprocessing="mean" not in pretrained and not (owned and tag in (*HALF_TAGS, *IMAGENET_TAGS)),
    )
    return layout.translate_checkpoint(contents, model)


def refuse_incompatible_model(name: str, family: Family, source: SourceNames) -> None:
    """Refuse models with the tensor names and shapes of a family that compute something else."""
    pattern = source.details.get("refused_names")
    if pattern and re.search(pattern, name.split(".")[0]):
        unknown = f"architecture is {name!r}, which is not supported; expected a plain {family.name}"
        reason = source.details.get("refused_because")
        raise CheckpointError(f"{name} {reason}" if reason else unknown)


def find_preset_of_width(name: str, family: Family, kernel: Tensor | None) -> dict[str, Any] | None:
    """The fields of the preset of this name if it is an encoder of the width of the patch kernel, else None."""
    preset = asdict(family.presets[name]) if name in family.presets else {}
    same = kernel is not None and kernel.shape[:1] == (preset.get("width"),)
    return preset if same and "heads" in preset else None


def image_size_from_timm_config(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    if "input_size" not in pretrained:
        return {}
    return {"image_size": tuple(layout.get_typed_field(pretrained, "input_size", list, [])[1:])}


def fields_from_timm_config(
    card: Mapping[str, Any], tensors: Mapping[str, Tensor], family: Family, source: SourceNames
) -> dict[str, Any]:
    """Fields of the folder's config.json that the shapes do not tell."""
    arguments = layout.get_typed_field(card, "model_args", dict, {})
    fields = layout.fields_from_arguments(arguments, source)
    if "model_args" in source.details:
        unsupported = {key: value for key, value in arguments.items() if key not in source.details["model_args"]}
        unsupported |= {"global_pool": card["global_pool"]} if card.get("global_pool", "avg") != "avg" else {}
        for key, value in unsupported.items():
            raise CheckpointError(
                f"{key} is {repr(value)[:40]}, which is not supported; expected a plain {family.name}"
            )
        return fields
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
    if not isinstance(pool, str) or pool not in pools or (pool == "token" and fc_norm):
        suffix = " with fc_norm" if fc_norm else ""
        raise CheckpointError(f"global_pool is {pool!r}{suffix}; expected token, avg or map")
    return {**fields, "pool": pools[pool]}


def unflatten_patch_kernel(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reshape the patch kernel of very old files, where it is a matrix."""
    kernel = tensors.get(PATCH_KERNEL)
    if kernel is not None and kernel.ndim == 2:
        side = isqrt(kernel.shape[1] // 3)
        if 3 * side * side == kernel.shape[1]:
            return {**tensors, PATCH_KERNEL: kernel.reshape(-1, 3, side, side)}
    return tensors


def preprocessing_from_timm_config(
    config: Mapping[str, Any], pretrained: Mapping[str, Any], imagenet: bool
) -> Preprocessing:
    size = config["image_size"]
    constants = layout.get_mean_std(imagenet=imagenet)
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
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    heads = config.get("heads", 1)
    if path.suffix:
        layout.rename_and_write_tensors(NAME, tensors, source.table, heads, path)
        mean_pool = config.get("class_token") and config["pool"] == "mean"
        return {**source.assumed, **({"pool": "class"} if mean_pool else {})}
    if source.card is None:
        raise CheckpointError(
            f"timm cannot open a folder of a custom {description.family}; expected OUT.safetensors or OUT.pth"
        )
    card = add_preprocessing_and_labels(source.card(config), description)
    text = json.dumps(card, indent=2, ensure_ascii=False)
    make_folder(path)
    layout.rename_and_write_tensors(NAME, tensors, source.table, heads, path / WEIGHT_FILES[0])
    write_text(path / CONFIG_FILE, text)
    return {name: value for name, value in source.assumed.items() if name == "norm_eps"}


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


LAYOUTS = (layout.Layout(name=NAME, matches=matches, read=read, write=write),)
