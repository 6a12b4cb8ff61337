"""Infer the config of a model from the shapes of its tensors, for files that do not contain it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.family_recognition import get_field_defaults
from vitrail.models.base.checkpoint_side import InferredConfig, TensorShapes, get_shape
from vitrail.models.base.family import Family
from vitrail.models.catalog.families import list_family_entries, list_published_heads

HEADS_BY_SHAPE = {  # (width, depth, MLP width): two SigLIP models and an old ViT-S
    (1152, 27, 4304): 16,
    (1536, 40, 6144): 16,
    (768, 8, 2304): 8,
}
FIELDS_NOT_IN_SHAPES = ("heads", "activation", "norm_eps", "pool", "positions", "windows", "intervals", "padding")

ConfigFields = dict[str, Any]


@dataclass(frozen=True)
class ConfigGuess:
    """A config inferred from tensors, and its uncertain values."""

    config: ConfigFields
    doubts: ConfigFields
    from_shapes: InferredConfig


def infer_config(tensors: Mapping[str, Tensor], family: Family, known: Mapping[str, Any]) -> ConfigGuess:
    """Infer the config from tensors under our names; `known` has fields that do not follow from shapes."""
    if family.checkpoint.infer_config is None:
        raise CheckpointError(f"the family {family.name!r} has no public layout; expected a file written by vitrail")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    supported = get_field_defaults(family)
    inferred = family.checkpoint.infer_config(shapes)
    check_family_support(family, inferred.fields, known)
    sizes, doubts = infer_image_size(shapes, inferred, known, has_choice="prefix_positions" in supported)
    fields = {name: value for name, value in (inferred.fields | sizes).items() if name in supported}
    decided = inferred.certain | {"image_size"}
    fields |= {name: value for name, value in known.items() if name in supported and name not in decided}
    if "heads" in inferred.fields and not isinstance(known.get("heads"), tuple | list):  # per stage: as published
        fields["heads"] = inferred.fields["heads"]
    elif "heads" in supported and "heads" not in fields:
        fields["heads"] = infer_heads(family, fields)[0]
    return ConfigGuess(fields, doubts, inferred)


def check_family_support(family: Family, fields: ConfigFields, known: Mapping[str, Any]) -> None:
    """Refuse a model with a part that the config of its family has no field for."""
    supported, mlp_width = get_field_defaults(family), fields.get("mlp_width")
    activation, pool = known.get("activation", "gelu"), known.get("pool", "class")
    parts = {  # field: whether the model has the part, and what it is
        "mlp_width": (mlp_width is not None, f"an MLP of width {mlp_width}, not 4 × {fields.get('width')}"),
        "layer_scale": (fields.get("layer_scale") is not None, "a LayerScale"),
        "activation": (activation != "gelu", f"the activation {activation}"),
        "pool": (pool != "class", f"pool {pool}"),
    }
    for name, (present, part) in parts.items():
        if present and name not in supported:
            raise CheckpointError(
                f"it has {part}, which the family {family.name!r} does not support; try another `source`"
            )


def find_assumptions(
    family: Family, guess: ConfigGuess, doubts: Mapping[str, Any], known: Mapping[str, Any], fixed: Collection[str]
) -> dict[str, Any]:
    """Fields that neither the user, the file nor its tensors specify, with the values assumed for them.

    `fixed` fields have one value in all models of an owner; heads count as fixed only if a known model has this shape.
    """
    config, supported = guess.config, get_field_defaults(family)
    in_shapes = {
        "heads": "heads" in guess.from_shapes.fields,
        "activation": config.get("activation") == "swiglu",
        "pool": config.get("pool") != "class",
        "positions": config.get("positions") != "none",
        "windows": config.get("version") == 1,  # a table of offsets
    }
    assumed = dict[str, Any]()
    for name in FIELDS_NOT_IN_SHAPES:
        if name not in supported or name in known or in_shapes.get(name):
            continue
        if name not in fixed or (name == "heads" and not infer_heads(family, config)[1]):
            assumed[name] = config.get(name, supported[name])
    certain = "trained_size" in fixed or config["image_size"] in (
        parse_image_size(known.get(name)) for name in ("trained_size", "image_size", "requested_size")
    )
    if not certain and guess.from_shapes.stride is not None and config.get("positions") != "none":
        assumed["trained_size"] = config["image_size"]
    return {**assumed, **doubts}


def infer_image_size(
    shapes: TensorShapes, inferred: InferredConfig, known: Mapping[str, Any], *, has_choice: bool
) -> tuple[ConfigFields, ConfigFields]:
    """Image size from the number of positions: what the user or the file says, else a square, else the requested size.

    A number may be read in two ways: 49 is 7×7 patches, or 6×8 patches and a class token. `prefix_positions` says
    which, if the config has this field. The second result has the fields for which other values would fit too.
    """
    in_file, requested = parse_image_size(known.get("image_size")), parse_image_size(known.get("requested_size"))
    trained = parse_image_size(known.get("trained_size"))
    stride, prefix = inferred.stride, inferred.prefix
    if stride is None:
        size = trained or in_file or inferred.fields["image_size"]
        if size is None:
            raise CheckpointError(
                "its positions are not those of a square; expected trained_size=(rows, columns), the size of the "
                "training images"
            )
        return {"image_size": size}, {}
    if "pos_embed" not in shapes:
        default = (14 * stride[0], 14 * stride[1])
        return {"positions": "none", "image_size": trained or in_file or requested or default}, {}
    rows = get_shape(shapes, "pos_embed", 3)[1]
    patches = {True: rows - prefix, False: rows}  # by prefix_positions
    prefixed = known.get("prefix_positions") if has_choice else True
    if isinstance(prefixed, bool):
        patches = {prefixed: patches[prefixed]}
    squares = {key: size for key, n in patches.items() if (size := infer_square_image_size(n, stride)) is not None}
    requested_fits = [key for key, n in patches.items() if count_patches(requested, stride) == n]
    unstated = trained is None and in_file is None
    if unstated and requested_fits and list(squares) == [False] and requested != squares[False]:
        raise CheckpointError(
            f"pos_embed has {rows} rows: a square, or {requested} with rows for {prefix} more tokens; "
            "expected prefix_positions=False or True"
        )
    stated = in_file if trained is None else check_given_trained_size(trained, in_file, list(patches.values()), stride)
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


def check_given_trained_size(
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


def infer_heads(family: Family, config: Mapping[str, Any]) -> tuple[int, bool]:
    """Number of heads, and whether a known model has this shape; otherwise 64 channels per head are assumed."""
    if "width" not in config:
        raise CheckpointError(f"the file does not specify the heads for widths {config['widths']}; expected heads=(…)")
    width, depth = config["width"], config["depth"]
    mlp_width = config.get("mlp_width") or family.checkpoint.mlp_ratio * width
    if (width, depth, mlp_width) in HEADS_BY_SHAPE:
        return HEADS_BY_SHAPE[width, depth, mlp_width], True
    shape, others = f"{width} {mlp_width}", (entry.heads for _, entry in list_family_entries())
    published = next((each[shape] for each in (list_published_heads(family), *others) if shape in each), None)
    if published is not None:
        return published, True
    if width % 64:
        raise CheckpointError(f"the file does not specify the number of heads for width {width}; expected heads=…")
    return width // 64, False
