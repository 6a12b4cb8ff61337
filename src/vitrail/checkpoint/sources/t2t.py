"""yitu's T2T-ViT: {"state_dict_ema": …} or {"state_dict": …}, with its own names for the stages, and k before q.

Its code has two scales for the attention of the backbone. By default, as for the released weights, it divides by the
square root of the head width. We and mmpretrain do the same, and mmpretrain reports the published accuracy of the
released T2T-ViT_t-14. Built with `pretrained=True`, which downloads nothing, it divides by the square root of the model
width: a file of such a run is read as `t2t_by_width`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.config_from_shapes import ConfigFields, infer_heads, infer_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import NameEntry, TensorTransform, make_entry
from vitrail.checkpoint.sources import timm
from vitrail.checkpoint.tensor_shapes import count_classes, count_distinct_numbers_in_names, get_tensor_shape
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.catalog import load_built_in_families

STAGE_PREFIX = "tokens_to_token.attention#"
FIRST_STAGE = "tokens_to_token.attention1"
STRIDE = (16, 16)  # pixels per token
SCALE_WARNING = (
    "the file does not specify how attention is scaled: by the head width, as in yitu's evaluation; "
    "if it was trained with the scale of the model width, set `source` to t2t_by_width"
)


def swap_keys_and_queries(tensor: Tensor) -> Tensor:
    """k, q, v ↔ q, k, v."""
    first, second, v = tensor.chunk(3)
    return torch.cat((second, first, v))


KQV_TRANSFORM = TensorTransform(
    lambda parts: swap_keys_and_queries(parts[0]), lambda tensor, _: [swap_keys_and_queries(tensor)]
)
SHARED_NAMES = (
    *("cls_token", "pos_embed", "tokens_to_token.project.*", f"{STAGE_PREFIX}.norm1.*", f"{STAGE_PREFIX}.norm2.*"),
    *(
        f"blocks.#.{part}"
        for part in ("norm1.*", "attn.qkv.weight", "attn.proj.*", "norm2.*", "mlp.fc1.*", "mlp.fc2.*")
    ),
    *("norm.*", "head.*"),
)
BASE_TABLE: tuple[NameEntry, ...] = tuple(map(make_entry, SHARED_NAMES, SHARED_NAMES))
NAME_TABLES = {
    "performer": (
        *BASE_TABLE,
        make_entry(f"{STAGE_PREFIX}.w", f"{STAGE_PREFIX}.w"),
        make_entry(f"{STAGE_PREFIX}.kqv.*", f"{STAGE_PREFIX}.qkv.*", KQV_TRANSFORM),
        make_entry(f"{STAGE_PREFIX}.proj.*", f"{STAGE_PREFIX}.proj.*"),
        make_entry(f"{STAGE_PREFIX}.mlp.0.*", f"{STAGE_PREFIX}.mlp.fc1.*"),
        make_entry(f"{STAGE_PREFIX}.mlp.2.*", f"{STAGE_PREFIX}.mlp.fc2.*"),
    ),
    "transformer": (
        *BASE_TABLE,
        make_entry(f"{STAGE_PREFIX}.attn.qkv.weight", f"{STAGE_PREFIX}.qkv.weight"),
        make_entry(f"{STAGE_PREFIX}.attn.proj.*", f"{STAGE_PREFIX}.proj.*"),
        make_entry(f"{STAGE_PREFIX}.mlp.fc1.*", f"{STAGE_PREFIX}.mlp.fc1.*"),
        make_entry(f"{STAGE_PREFIX}.mlp.fc2.*", f"{STAGE_PREFIX}.mlp.fc2.*"),
    ),
}


def matches(contents: RawContents) -> bool:
    return "tokens_to_token.project.weight" in layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)


def read(contents: RawContents, known: Mapping[str, Any], layout_name: str = "t2t") -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    stage = "performer" if f"{FIRST_STAGE}.w" in tensors else "transformer"
    model = layout.UntranslatedModel(
        layout=layout_name,
        family="t2t",
        tensors=tensors,
        table=NAME_TABLES[stage],
        known={**find_published_heads(tensors), **known},
        policy="deit",
        preprocessing=make_preprocessing,
        infer_config=infer_t2t_config,
        warnings=[SCALE_WARNING] if layout_name == "t2t" else [],
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def find_published_heads(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of heads, if a published model has this shape."""
    hidden = tuple(tensors["blocks.0.mlp.fc1.weight"].shape) if "blocks.0.mlp.fc1.weight" in tensors else ()
    presets = next(each.presets for each in load_built_in_families() if each.name == "t2t").values()
    return next(({"heads": each.heads} for each in presets if (get_mlp_width(each), each.width) == hidden), {})


def get_mlp_width(config: Any) -> int:
    return config.mlp_width or 3 * config.width


def infer_t2t_config(
    tensors: Mapping[str, Tensor], _: str, known: Mapping[str, Any]
) -> tuple[ConfigFields, ConfigFields]:
    """Fields of the config from the shapes, and those of them that are uncertain."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    hidden, width = get_tensor_shape(shapes, "blocks.0.mlp.fc1.weight", 2)
    position_fields, doubts = infer_image_size(shapes, 1, STRIDE, {**known, "prefix_positions": True})
    fields: dict[str, Any] = {
        "image_size": position_fields["image_size"],
        "channels": get_tensor_shape(shapes, f"{FIRST_STAGE}.qkv.weight", 2)[1] // 49,
        "classes": count_classes(shapes, "head.weight"),
        "stage": "performer" if f"{FIRST_STAGE}.w" in shapes else "transformer",
        "stage_width": get_tensor_shape(shapes, f"{FIRST_STAGE}.proj.weight", 2)[0],
        "width": width,
        "depth": count_distinct_numbers_in_names(shapes, r"blocks\.(\d+)\."),
        "mlp_width": hidden,
    }
    fields |= {name: known[name] for name in ("heads", "norm_eps") if name in known}
    heads = fields.get("heads") or infer_heads(fields)[0]
    return {**fields, "heads": heads, "mlp_width": None if hidden == 3 * width else hidden}, doubts


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    return Preprocessing(image_size=config["image_size"], crop=0.9, **layout.IMAGENET_MEAN_STD)


def write(
    tensors: Mapping[str, Tensor], description: Description, path: Path, layout_name: str = "t2t"
) -> Mapping[str, Any]:
    config = description.config
    layout.rename_and_write_tensors(
        layout_name, tensors, NAME_TABLES[config["stage"]], config["heads"], path, wrapper="state_dict_ema"
    )
    return {"norm_eps": 1e-5}


LAYOUT = layout.Layout(name="t2t", matches=matches, read=read, write=write, families=("t2t",))
