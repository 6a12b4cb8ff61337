"""The config of a model from the shapes of its tensors, for files that do not say it."""

import re
from collections.abc import Collection, Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from vitrail.checkpoint.convnet_tensors import CONVNET_CONFIGS, infer_convnet_config
from vitrail.errors import CheckpointError
from vitrail.models.catalog import load_families

HEADS_BY_SHAPE = {
    (1152, 27, 4304): 16,
    (1536, 40, 6144): 16,
    (768, 8, 2304): 8,
}  # heads of SigLIP's two, and of an old ViT-S
DEFAULT_LAYER_SCALE = 1e-5  # what a LayerScale starts with; a file holds only what became of it


FIELDS_NOT_IN_SHAPES = ("heads", "activation", "norm_eps", "pool", "positions")  # fields that the tensors may not show

ConfigFields = dict[str, Any]


def infer_config(
    tensors: Mapping[str, Tensor], family: str, known: Mapping[str, Any]
) -> tuple[ConfigFields, ConfigFields]:
    """Fields of the family's config for tensors under our names, and those about positions that are uncertain.

    `known` are fields that the shapes do not show.
    """
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if family in CONVNET_CONFIGS:
        size = parse_image_size(known.get("trained_size")) or parse_image_size(known.get("image_size"))
        return infer_convnet_config(sizes, family, size), {}
    kernel = get_tensor_shape(sizes, "patch_embed.proj.weight", 4)
    width = kernel[0]
    hidden, out = (
        get_tensor_shape(sizes, "blocks.0.mlp.fc1.weight", 2)[0],
        get_tensor_shape(sizes, "blocks.0.mlp.fc2.weight", 2)[1],
    )
    registers = get_tensor_shape(sizes, "reg_token", 3)[1] if "reg_token" in sizes else 0
    prefix = registers + ("cls_token" in sizes) + ("dist_token" in sizes)
    prefix = 0 if family == "cait" else prefix  # its class token joins after the positions
    found: dict[str, Any] = {
        "patch_size": kernel[2:],
        "channels": kernel[1],
        "classes": get_tensor_shape(sizes, "head.weight", 2)[0] if "head.weight" in sizes else 0,
        "width": width,
        "depth": count_numbered_names(sizes, r"blocks\.(\d+)\."),
        "mlp_width": None if out == 4 * width else out,
        "layer_scale": DEFAULT_LAYER_SCALE if "blocks.0.ls1.gamma" in sizes else None,
    }
    if family == "vit":
        found |= {
            "qkv_bias": "blocks.0.attn.qkv.bias" in sizes,
            "class_token": "cls_token" in sizes,
            "registers": registers,
            "pool": infer_pool(sizes),
            "head": "mlp" if "pre_logits.weight" in sizes else "linear",
        }
        if hidden == 2 * out:
            found["activation"] = "swiglu"
    if family == "deit":
        found["distilled"] = "dist_token" in sizes
    if family == "cait":
        found["class_depth"] = count_numbered_names(sizes, r"blocks_token_only\.(\d+)\.")
        found["heads"] = get_tensor_shape(sizes, "blocks.0.attn.proj_l.weight", 2)[0]  # which mixes them
    stride = kernel[2:]
    if family == "hybrid":
        found |= {"stages": infer_hybrid_stages(sizes), "channels": infer_stem_channels(sizes)}
        times = 4 * 2 ** max(len(found["stages"]) - 1, 0)
        stride = (times * stride[0], times * stride[1])
    places, doubts = infer_image_size(sizes, prefix, stride, known)
    found |= places
    allowed = get_config_fields(family)
    check_family_supports(
        found["mlp_width"] is None or "mlp_width" in allowed, f"an MLP of {out}, not 4 times {width}", family
    )
    check_family_supports(found["layer_scale"] is None or "layer_scale" in allowed, "a LayerScale", family)
    check_family_supports(
        found.get("prefix_positions", True) or "prefix_positions" in allowed, "no class position", family
    )
    exact = known.get("activation", "gelu") == "gelu" or family == "hybrid"  # where `constants` say it
    check_family_supports(exact or "activation" in allowed, f"the activation {known.get('activation')}", family)
    check_family_supports(
        known.get("pool", "class") == "class" or "pool" in allowed, f"pool {known.get('pool')}", family
    )
    found = {name: value for name, value in found.items() if name in allowed}
    found |= {name: value for name, value in known.items() if name in allowed and name != "image_size"}
    return (found if "heads" in found else {**found, "heads": infer_heads(found)[0]}), doubts


def get_config_fields(family: str) -> Mapping[str, Any]:
    """The fields of a family's config by name."""
    return next(each for each in load_families() if each.name == family).config.__dataclass_fields__


def find_assumptions(
    family: str, config: Mapping[str, Any], doubts: Mapping[str, Any], known: Mapping[str, Any], fixed: Collection[str]
) -> dict[str, Any]:
    """Fields that neither the user, the file nor its tensors specify, with the values assumed for them.

    `fixed` fields have one value in all models of an owner; heads count as fixed only if a known model has this shape.
    """
    fields = get_config_fields(family)
    shown = {
        "heads": "class_depth" in config,  # a CaiT has tensors that mix its heads
        "activation": config.get("activation") == "swiglu",
        "pool": config.get("pool") != "class",
        "positions": config.get("positions") != "none",
    }
    assumed = dict[str, Any]()
    for name in FIELDS_NOT_IN_SHAPES:
        if name not in fields or name in known or shown.get(name):
            continue
        if name not in fixed or (name == "heads" and not infer_heads(config)[1]):
            assumed[name] = config.get(name, fields[name].default)
    sure = "trained_size" in fixed or config["image_size"] in (
        parse_image_size(known.get(name)) for name in ("trained_size", "image_size", "asked_size")
    )
    if not sure and "patch_size" in config and config.get("positions") != "none":
        assumed["trained_size"] = config["image_size"]
    return {**assumed, **doubts}


def get_tensor_shape(sizes: Mapping[str, tuple[int, ...]], name: str, dimensions: int) -> tuple[int, ...]:
    if name not in sizes:
        raise CheckpointError(f"{name} is not there; expected the tensors of a Vision Transformer")
    if len(sizes[name]) != dimensions or 0 in sizes[name]:
        raise CheckpointError(f"{name} is of shape {sizes[name]}; expected {dimensions} dimensions")
    return sizes[name]


def count_numbered_names(sizes: Mapping[str, object], numbered: str) -> int:
    """How many different numbers a name is found with."""
    return len({match[1] for name in sizes if (match := re.match(numbered, name))})


def infer_pool(sizes: Mapping[str, object]) -> str:
    if "attn_pool.latent" in sizes:
        return "map"
    if "fc_norm.weight" in sizes and "norm.weight" not in sizes:
        return "mean_norm"
    return "class" if "cls_token" in sizes else "mean"


def infer_hybrid_stages(sizes: Mapping[str, object]) -> tuple[int, ...]:
    number = count_numbered_names(sizes, r"patch_embed\.backbone\.stages\.(\d+)\.")
    return tuple(
        count_numbered_names(sizes, rf"patch_embed\.backbone\.stages\.{stage}\.blocks\.(\d+)\.")
        for stage in range(number)
    )


def infer_stem_channels(sizes: Mapping[str, tuple[int, ...]]) -> int:
    names = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
    return get_tensor_shape(sizes, next((name for name in names if name in sizes), names[0]), 4)[1]


def infer_image_size(
    sizes: Mapping[str, tuple[int, ...]], prefix: int, stride: tuple[int, ...], known: Mapping[str, Any]
) -> tuple[ConfigFields, ConfigFields]:
    """The image's size from the number of positions: what the user or the file says, else a square, else image_size.

    A number may be read in two ways, 49 as 7×7 or as 6×8 and a class token; `prefix_positions` says which. The
    second result holds the fields for which several values would fit.
    """
    said, asked = parse_image_size(known.get("image_size")), parse_image_size(known.get("asked_size"))
    trained = parse_image_size(known.get("trained_size"))
    if "pos_embed" not in sizes:
        return {"positions": "none", "image_size": trained or said or asked or (14 * stride[0], 14 * stride[1])}, {}
    rows = get_tensor_shape(sizes, "pos_embed", 3)[1]
    ways = {with_prefix: rows - prefix * with_prefix for with_prefix in (True, False)}
    if isinstance(known.get("prefix_positions"), bool):
        ways = {with_prefix: n for with_prefix, n in ways.items() if with_prefix == known["prefix_positions"]}
    squares = {with_prefix: square_image_size(n, stride) for with_prefix, n in ways.items()}
    fits = {with_prefix: n for with_prefix, n in ways.items() if patch_count_for_size(asked, stride) == n}
    bare = squares.get(False) is not None and squares.get(True) is None
    if trained is None and said is None and fits and bare and asked != squares[False]:
        raise CheckpointError(
            f"pos_embed has {rows} rows: a square, or {asked} with rows for {prefix} more tokens; "
            "expected prefix_positions=False or True"
        )
    if trained is not None:
        said = resolve_trained_size(trained, said, list(ways.values()), stride)
    both = len({size for size in squares.values() if size is not None}) > 1
    for given, sizes_of in (
        (True, dict.fromkeys(ways, said)),
        (False, squares),
        (False, dict.fromkeys(ways, asked)),
    ):
        for with_prefix, n in ways.items():
            size = sizes_of[with_prefix]
            if size is None or patch_count_for_size(size, stride) != n:
                continue
            doubts = dict[str, Any]()
            if not given and asked is not None and (size != squares[with_prefix] or (fits and size != asked)):
                doubts["trained_size"] = size
            if not given and prefix and len(ways) > 1 and (both or not with_prefix):
                doubts["prefix_positions"] = with_prefix
            return {"image_size": size, "prefix_positions": with_prefix}, doubts
    raise CheckpointError(
        f"pos_embed has {rows} rows, {prefix} of them before the patches, which are not a square; "
        "expected trained_size=(rows, columns) of the images that it was trained on"
    )


def resolve_trained_size(
    trained: tuple[int, int], said: tuple[int, int] | None, counts: Collection[int], stride: tuple[int, ...]
) -> tuple[int, int]:
    """The trained_size given by the user, once it fits the position table and does not contradict the file."""
    if said not in (None, trained) and patch_count_for_size(said, stride) in counts:
        raise CheckpointError(
            f"trained_size is {format_size(trained)}, but the file says {format_size(said)}; expected the same"
        )
    if patch_count_for_size(trained, stride) not in counts:
        there = " or ".join(map(str, sorted(set(counts), reverse=True)))
        raise CheckpointError(
            f"trained_size is {format_size(trained)}, which is {patch_count_for_size(trained, stride)} patches, "
            f"and the file has {there}; expected the size of the images that it was trained on"
        )
    return trained


def format_size(size: tuple[int, int] | None) -> str:
    """A size as the command line accepts it: 32x128."""
    return "x".join(map(str, size or ()))


def patch_count_for_size(size: tuple[int, int] | None, stride: tuple[int, ...]) -> int | None:
    return None if size is None else (size[0] // stride[0]) * (size[1] // stride[1])


def square_image_size(patches: int, stride: tuple[int, ...]) -> tuple[int, int] | None:
    side = isqrt(max(patches, 0))
    return (side * stride[0], side * stride[1]) if side and side * side == patches else None


def parse_image_size(given: Any) -> tuple[int, int] | None:
    """A size that somebody gave, if it is one."""
    sides: tuple[Any, ...] = tuple(given) if isinstance(given, tuple | list) else (given, given)
    whole = all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides)
    return (sides[0], sides[1]) if whole and len(sides) == 2 else None


def infer_heads(found: Mapping[str, Any]) -> tuple[int, bool]:
    """No shape tells the heads: those of a known model of this shape, else as many as give each 64 numbers."""
    width, depth = found["width"], found["depth"]
    mlp_width = found.get("mlp_width") or 4 * width
    if (width, depth, mlp_width) in HEADS_BY_SHAPE:
        return HEADS_BY_SHAPE[width, depth, mlp_width], True
    for preset in (preset for family in load_families() for preset in family.presets.values()):
        if not hasattr(preset, "patch_size") or hasattr(preset, "class_depth"):
            continue  # convnets and T2T-ViTs have other fields; the shapes of a CaiT tell its heads
        if (preset.width, getattr(preset, "mlp_width", None) or 4 * preset.width) == (width, mlp_width):
            return preset.heads, True
    if width % 64:
        raise CheckpointError(f"the file does not say how many heads share its width of {width}; expected heads=…")
    return width // 64, False


def check_family_supports(fits: bool, what: str, family: str) -> None:
    if not fits:
        raise CheckpointError(f"it has {what}, which the family {family!r} has not; expected another --from")
