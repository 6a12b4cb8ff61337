"""Infer the config of a model from the shapes of its tensors, for files that do not contain it."""

from collections.abc import Collection, Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from vitrail.checkpoint.convnet_tensors import CONVNET_CONFIGS, infer_convnet_config
from vitrail.checkpoint.tensor_shapes import (
    TensorShapes,
    count_classes,
    count_distinct_numbers_in_names,
    get_tensor_shape,
)
from vitrail.errors import CheckpointError
from vitrail.models.catalog import load_built_in_families

HEADS_BY_SHAPE = {  # (width, depth, MLP width): two SigLIP models and an old ViT-S
    (1152, 27, 4304): 16,
    (1536, 40, 6144): 16,
    (768, 8, 2304): 8,
}
DEFAULT_LAYER_SCALE = 1e-5  # the initial value of a LayerScale, which a trained file no longer has
FIELDS_NOT_IN_SHAPES = ("heads", "activation", "norm_eps", "pool", "positions")

ConfigFields = dict[str, Any]


def infer_config(
    tensors: Mapping[str, Tensor], family: str, known: Mapping[str, Any]
) -> tuple[ConfigFields, ConfigFields]:
    """Config fields of tensors under our names, and the values that are uncertain.

    `known` are fields that the shapes do not tell.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if family in CONVNET_CONFIGS:
        size = parse_image_size(known.get("trained_size")) or parse_image_size(known.get("image_size"))
        return infer_convnet_config(shapes, family, size), {}
    kernel = get_tensor_shape(shapes, "patch_embed.proj.weight", 4)
    width, stride = kernel[0], kernel[2:]
    mlp_inputs = get_tensor_shape(shapes, "blocks.0.mlp.fc1.weight", 2)[0]
    mlp_width = get_tensor_shape(shapes, "blocks.0.mlp.fc2.weight", 2)[1]
    registers = get_tensor_shape(shapes, "reg_token", 3)[1] if "reg_token" in shapes else 0
    prefix = registers + ("cls_token" in shapes) + ("dist_token" in shapes)
    fields: ConfigFields = {
        "patch_size": kernel[2:],
        "channels": kernel[1],
        "classes": count_classes(shapes, "head.weight"),
        "width": width,
        "depth": count_distinct_numbers_in_names(shapes, r"blocks\.(\d+)\."),
        "mlp_width": None if mlp_width == 4 * width else mlp_width,
        "layer_scale": DEFAULT_LAYER_SCALE if "blocks.0.ls1.gamma" in shapes else None,
    }
    if family == "vit":
        fields |= {
            "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
            "class_token": "cls_token" in shapes,
            "registers": registers,
            "pool": infer_pool(shapes),
            "head": "mlp" if "pre_logits.weight" in shapes else "linear",
        }
        if mlp_inputs == 2 * mlp_width:
            fields["activation"] = "swiglu"
    if family == "deit":
        fields["distilled"] = "dist_token" in shapes
    if family == "cait":
        prefix = 0  # its class token is added after the positions
        fields["class_depth"] = count_distinct_numbers_in_names(shapes, r"blocks_token_only\.(\d+)\.")
        fields["heads"] = get_tensor_shape(shapes, "blocks.0.attn.proj_l.weight", 2)[0]  # which mixes heads
    if family == "hybrid":
        fields |= {"stages": infer_hybrid_stage_depths(shapes), "channels": infer_stem_input_channels(shapes)}
        scale = 4 * 2 ** max(len(fields["stages"]) - 1, 0)
        stride = (scale * stride[0], scale * stride[1])
    position_fields, doubts = infer_image_size(shapes, prefix, stride, known)
    fields |= position_fields
    supported = get_config_fields(family)
    check_family_support(family, fields, known)
    fields = {name: value for name, value in fields.items() if name in supported}
    fields |= {name: value for name, value in known.items() if name in supported and name != "image_size"}
    return (fields if "heads" in fields else {**fields, "heads": infer_heads(fields)[0]}), doubts


def get_config_fields(family: str) -> Mapping[str, Any]:
    """Dataclass fields of a family's config by name."""
    return next(each for each in load_built_in_families() if each.name == family).config.__dataclass_fields__


def check_family_support(family: str, fields: ConfigFields, known: Mapping[str, Any]) -> None:
    """Refuse a model with a part that the config of its family has no field for."""
    supported = get_config_fields(family)
    activation, pool = known.get("activation", "gelu"), known.get("pool", "class")
    parts = {  # field: whether the model has the part, and what it is
        "mlp_width": (
            fields["mlp_width"] is not None,
            f"an MLP of width {fields['mlp_width']}, not 4 × {fields['width']}",
        ),
        "layer_scale": (fields["layer_scale"] is not None, "a LayerScale"),
        "prefix_positions": (not fields.get("prefix_positions", True), "no position for its class token"),
        # a hybrid has the activation in its `constants`
        "activation": (activation != "gelu" and family != "hybrid", f"the activation {activation}"),
        "pool": (pool != "class", f"pool {pool}"),
    }
    for name, (present, part) in parts.items():
        if present and name not in supported:
            raise CheckpointError(f"it has {part}, which the family {family!r} does not support; try another `source`")


def find_assumptions(
    family: str, config: Mapping[str, Any], doubts: Mapping[str, Any], known: Mapping[str, Any], fixed: Collection[str]
) -> dict[str, Any]:
    """Fields that neither the user, the file nor its tensors specify, with the values assumed for them.

    `fixed` fields have one value in all models of an owner; heads count as fixed only if a known model has this shape.
    """
    supported = get_config_fields(family)
    in_shapes = {
        "heads": "class_depth" in config,  # a CaiT has tensors that mix heads
        "activation": config.get("activation") == "swiglu",
        "pool": config.get("pool") != "class",
        "positions": config.get("positions") != "none",
    }
    assumed = dict[str, Any]()
    for name in FIELDS_NOT_IN_SHAPES:
        if name not in supported or name in known or in_shapes.get(name):
            continue
        if name not in fixed or (name == "heads" and not infer_heads(config)[1]):
            assumed[name] = config.get(name, supported[name].default)
    certain = "trained_size" in fixed or config["image_size"] in (
        parse_image_size(known.get(name)) for name in ("trained_size", "image_size", "requested_size")
    )
    if not certain and "patch_size" in config and config.get("positions") != "none":
        assumed["trained_size"] = config["image_size"]
    return {**assumed, **doubts}


def infer_pool(shapes: TensorShapes) -> str:
    if "attn_pool.latent" in shapes:
        return "map"
    if "fc_norm.weight" in shapes and "norm.weight" not in shapes:
        return "mean_norm"
    return "class" if "cls_token" in shapes else "mean"


def infer_hybrid_stage_depths(shapes: TensorShapes) -> tuple[int, ...]:
    stages = r"patch_embed\.backbone\.stages\."
    count = count_distinct_numbers_in_names(shapes, rf"{stages}(\d+)\.")
    return tuple(
        count_distinct_numbers_in_names(shapes, rf"{stages}{stage}\.blocks\.(\d+)\.") for stage in range(count)
    )


def infer_stem_input_channels(shapes: TensorShapes) -> int:
    names = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
    return get_tensor_shape(shapes, next((name for name in names if name in shapes), names[0]), 4)[1]


def infer_image_size(
    shapes: TensorShapes, prefix: int, stride: tuple[int, ...], known: Mapping[str, Any]
) -> tuple[ConfigFields, ConfigFields]:
    """Image size from the number of positions: what the user or the file says, else a square, else the requested size.

    A number may be read in two ways: 49 is 7×7 patches, or 6×8 patches and a class token. `prefix_positions` says
    which. The second result has the fields for which other values would fit too.
    """
    in_file, requested = parse_image_size(known.get("image_size")), parse_image_size(known.get("requested_size"))
    trained = parse_image_size(known.get("trained_size"))
    if "pos_embed" not in shapes:
        default = (14 * stride[0], 14 * stride[1])
        return {"positions": "none", "image_size": trained or in_file or requested or default}, {}
    rows = get_tensor_shape(shapes, "pos_embed", 3)[1]
    patches = {True: rows - prefix, False: rows}  # by prefix_positions
    if isinstance(known.get("prefix_positions"), bool):
        patches = {known["prefix_positions"]: patches[known["prefix_positions"]]}
    squares = {key: size for key, n in patches.items() if (size := infer_square_image_size(n, stride)) is not None}
    requested_fits = [key for key, n in patches.items() if count_patches(requested, stride) == n]
    unstated = trained is None and in_file is None
    if unstated and requested_fits and list(squares) == [False] and requested != squares[False]:
        raise CheckpointError(
            f"pos_embed has {rows} rows: a square, or {requested} with rows for {prefix} more tokens; "
            "expected prefix_positions=False or True"
        )
    stated = in_file if trained is None else resolve_trained_size(trained, in_file, list(patches.values()), stride)
    for key, n in patches.items():
        if count_patches(stated, stride) == n:
            return {"image_size": stated, "prefix_positions": key}, {}
    if not squares and not requested_fits:
        raise CheckpointError(
            f"pos_embed has {rows} rows, {prefix} of them for prefix tokens, and the others are not a square; "
            "expected trained_size=(rows, columns), the size of the training images"
        )
    key, size = next(iter(squares.items())) if squares else (requested_fits[0], requested)
    doubts = ConfigFields()
    if requested_fits and (not squares or size != requested):
        doubts["trained_size"] = size
    if prefix and len(patches) > 1 and (len(set(squares.values())) > 1 or not key):
        doubts["prefix_positions"] = key
    return {"image_size": size, "prefix_positions": key}, doubts


def resolve_trained_size(
    trained: tuple[int, int], in_file: tuple[int, int] | None, counts: Collection[int], stride: tuple[int, ...]
) -> tuple[int, int]:
    """Return the trained_size given by the user if it fits the position table and does not contradict the file."""
    if in_file not in (None, trained) and count_patches(in_file, stride) in counts:
        raise CheckpointError(
            f"trained_size is {format_size(trained)}, but the file says {format_size(in_file)}; expected the same size"
        )
    if count_patches(trained, stride) not in counts:
        positions = " or ".join(map(str, sorted(set(counts), reverse=True)))
        raise CheckpointError(
            f"trained_size is {format_size(trained)}, which is {count_patches(trained, stride)} patches, "
            f"but the file has positions for {positions}; expected the size of the training images"
        )
    return trained


def format_size(size: tuple[int, int] | None) -> str:
    """Format a size as the command line accepts it: 32x128."""
    return "x".join(map(str, size or ()))


def count_patches(size: tuple[int, int] | None, stride: tuple[int, ...]) -> int | None:
    return None if size is None else (size[0] // stride[0]) * (size[1] // stride[1])


def infer_square_image_size(patches: int, stride: tuple[int, ...]) -> tuple[int, int] | None:
    side = isqrt(max(patches, 0))
    return (side * stride[0], side * stride[1]) if side and side * side == patches else None


def parse_image_size(value: Any) -> tuple[int, int] | None:
    """A size as (rows, columns) if the value is one: a positive integer, or two of them."""
    sides: tuple[Any, ...] = tuple(value) if isinstance(value, tuple | list) else (value, value)
    valid = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
    return (sides[0], sides[1]) if valid and len(sides) == 2 else None


def infer_heads(config: Mapping[str, Any]) -> tuple[int, bool]:
    """Number of heads, and whether a known model has this shape; otherwise 64 channels per head are assumed."""
    width, depth = config["width"], config["depth"]
    mlp_width = config.get("mlp_width") or 4 * width
    if (width, depth, mlp_width) in HEADS_BY_SHAPE:
        return HEADS_BY_SHAPE[width, depth, mlp_width], True
    for preset in (preset for family in load_built_in_families() for preset in family.presets.values()):
        if not hasattr(preset, "patch_size") or hasattr(preset, "class_depth"):
            continue  # convnets and T2T-ViTs have other fields; the shapes of a CaiT tell its heads
        if (preset.width, getattr(preset, "mlp_width", None) or 4 * preset.width) == (width, mlp_width):
            return preset.heads, True
    if width % 64:
        raise CheckpointError(f"the file does not specify the number of heads for width {width}; expected heads=…")
    return width // 64, False
