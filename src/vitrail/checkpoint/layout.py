"""What a layout is: how it is recognised, read and written, and what whoever reads it takes for granted."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.checkpoint.config_from_shapes import ConfigFields, find_assumptions, infer_config, parse_image_size
from vitrail.checkpoint.convnet_tensors import add_batch_counters
from vitrail.checkpoint.description import TYPE_NAMES, Description
from vitrail.checkpoint.files.raw_contents import WRAPPER_KEYS, RawContents
from vitrail.checkpoint.name_table import NameEntry, rename_to_ours, rename_to_theirs
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import write_atomically

T = TypeVar("T")
LAYOUT_KEY = "layout"  # the key of its name in the header of a safetensors file; there is nothing around it to tell by
HALF_MEAN_STD: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET_MEAN_STD: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OWNER_FIXED_FIELDS = (
    "activation",
    "norm_eps",
    "pool",
    "positions",
    "trained_size",
)  # fields with one value in all models of an owner
OWNER_NAMED_KEY = "owner_said"  # key in `known`: whether the user or the file named the layout
TRANSFORMER_FAMILIES = ("vit", "deit", "hybrid")
PATCH_FAMILIES = ("vit", "deit")  # families of layouts without names for a ResNet stem
STEM_POSITION_VALUES: dict[str, tuple[Any, ...]] = {  # all that most layouts can say of positions
    "positions": ("learned", "sincos", "sincos_2d"),
    "positions_at": ("stem",),
}


@dataclass(frozen=True, kw_only=True)
class TranslatedCheckpoint:
    """A checkpoint of any layout in our words; `config` in the description is what its own shapes and files say."""

    description: Description
    tensors: dict[str, Tensor]
    ignored: tuple[str, ...] = ()  # by their names
    warnings: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # values assumed for fields that the file does not specify
    layout: str = ""  # that read it; set by whoever chose it


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A row of the list of sources: all that reading and writing know of whose file it is."""

    name: str  # as --from and --to say it
    matches: Callable[[RawContents], bool]
    read: Callable[
        [RawContents, Mapping[str, Any]], TranslatedCheckpoint
    ]  # with fields that the user knows and the file does not say
    write: Callable[[Mapping[str, Tensor], Description, Path], Mapping[str, Any]]  # gives what its readers assume
    families: tuple[str, ...] = TRANSFORMER_FAMILIES  # that it has a place for


def translate_checkpoint(
    contents: RawContents,
    tensors: Mapping[str, Tensor],
    table: Sequence[NameEntry],
    *,
    layout: str,
    family: str,
    known: Mapping[str, Any],
    policy: ResamplingPolicy,
    preprocessing: Callable[[dict[str, Any]], Preprocessing],
    ignore: str = "",
    labels: tuple[str, ...] | None = None,
    variant: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    fixed: Collection[str] = (),
    default_fields: Mapping[str, Any] | None = None,
    assumed_preprocessing: bool = False,
    infer: Callable[[Mapping[str, Tensor], str, Mapping[str, Any]], tuple[ConfigFields, ConfigFields]] = infer_config,
) -> TranslatedCheckpoint:
    """Their tensors by the table; what it does not name must match `ignore`, else something would be lost.

    `shapes` makes the fields of the config of our tensors, the family and other known fields. `fixed` are fields
    with one value in all models of the owner, if the file is known to be theirs; `usual` values are defaults.
    """
    ours, unnamed = rename_to_ours(tensors, table)
    lost = [name for name in unnamed if not re.fullmatch(ignore, name)]
    if lost:
        names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise CheckpointError(
            f"{contents.path} has {len(lost)} tensors that a {layout} {family} has no place for ({names}); "
            "without them it would be another model: expected a plain ViT, DeiT, CaiT, T2T-ViT, hybrid or convnet, "
            "or another --from"
        )
    ours = add_batch_counters(ours)
    config, doubts = infer(ours, family, {**(default_fields or {}), **known})
    said = parse_image_size(known.get("image_size"))
    if said not in (None, config["image_size"]):
        size = "×".join(map(str, config["image_size"]))
        warnings = [*warnings, f"said to be for images of {said}, but its positions are for {size}: taken as these"]
    others = [name for name in contents.other_keys if name in WRAPPER_KEYS and name not in ("student", "teacher")]
    if contents.wrapper and others:
        warnings = [*warnings, f"taken from {contents.wrapper!r}; the file also has {', '.join(others)}"]
    how = preprocessing(config)
    if config.get("layer_scale") or config.get("registers") or layout == "google":  # often without a class position
        doubts = {name: value for name, value in doubts.items() if name != "prefix_positions"}
    assumed = find_assumptions(family, config, doubts, known, fixed)
    if assumed_preprocessing:
        assumed["preprocessing"] = describe_preprocessing(how)
    source = {"layout": layout, "file": contents.path.name, **(variant or {})}
    description = Description(
        family=family,
        config=config,
        preprocessing=how,
        labels=labels,
        provenance={"source": source},
        resampling=policy,
    )
    return TranslatedCheckpoint(
        description=description, tensors=ours, ignored=unnamed, warnings=tuple(warnings), assumed=assumed
    )


def describe_preprocessing(how: Preprocessing) -> str:
    """The mean, crop and interpolation, in which layouts differ most."""
    usual = {HALF_MEAN_STD["mean"]: "mean 0.5", IMAGENET_MEAN_STD["mean"]: "ImageNet's mean"}
    return f"{usual.get(how.mean, f'mean {how.mean}')}, crop {how.crop:.4g}, {how.interpolation}"


def find_heads_by_width(tensors: Mapping[str, Tensor], kernel: str, heads: Mapping[int, int]) -> dict[str, int]:
    """The number of heads of the owner's published model with the width of the patch kernel."""
    width = tensors[kernel].shape[0] if kernel in tensors and tensors[kernel].ndim else 0
    return {"heads": heads[width]} if width in heads else {}


def merge_agreeing_fields(said: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says and what the user says, who may add to it but not say otherwise."""
    for name in said.keys() & known.keys():
        if said[name] != known[name]:
            raise CheckpointError(f"{name} is {known[name]!r}, but the file says {said[name]!r}; expected the same")
    return {**said, **known}


def strip_prefixes(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """Without the prefixes, in this order, that every name has: what wrappers put before a model's own names."""
    names = dict(zip(tensors, tensors, strict=True))
    for prefix in prefixes:
        if names and all(name.startswith(prefix) for name in names.values()):
            names = {key: name.removeprefix(prefix) for key, name in names.items()}
    return {name: tensors[key] for key, name in names.items()}


def check_representable(layout: str, config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses a config with a field that the layout has no place for."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            expected = " or ".join(repr(value) for value in values)
            raise CheckpointError(f"{name} is {config[name]!r}, which {layout} cannot hold; expected {expected}")


def add_prefix_rows(tensors: Mapping[str, Tensor], config: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """The table with rows for prefix tokens, zero where it had none: adding nothing, for layouts that must add."""
    if config.get("prefix_positions", True) or "pos_embed" not in tensors:
        return dict(tensors)
    table = tensors["pos_embed"]
    return {**tensors, "pos_embed": torch.cat((table.new_zeros(1, rows, table.shape[2]), table), dim=1)}


def add_register_rows(table: Tensor, registers: Tensor) -> Tensor:
    """Zero rows for the registers, which have no positions in DINOv2, behind that of the class token."""
    rows = registers.shape[1] if registers.ndim == 3 else 0
    return torch.cat((table[:, :1], table.new_zeros(table.shape[0], rows, *table.shape[2:]), table[:, 1:]), dim=1)


def remove_register_rows(layout: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The table without rows for the registers; they must be zero, or they would be lost."""
    registers = config.get("registers", 0)
    if not registers or "pos_embed" not in tensors:
        return dict(tensors)
    first, rows, patches = tensors["pos_embed"].tensor_split([1, 1 + registers], dim=1)
    check_representable(layout, {"positions of registers": bool(rows.any())}, {"positions of registers": (False,)})
    return {**tensors, "pos_embed": torch.cat((first, patches), dim=1)}


def write_renamed_tensors(
    layout: str, tensors: Mapping[str, Tensor], table: Sequence[NameEntry], heads: int, path: Path, wrapper: str = ""
) -> None:
    """A .safetensors file, which says its layout, or what torch.save writes, under `wrapper` if there is one."""
    renamed = rename_to_theirs(tensors, table, heads)
    if path.suffix == ".safetensors":
        write_atomically(path, lambda place: save_file(renamed, place, {"format": "pt", LAYOUT_KEY: layout}))
    elif path.suffix in (".pth", ".pt", ".bin", ".th"):
        apart = {name: tensor.clone() for name, tensor in renamed.items()}  # torch.save would keep whole storages
        write_atomically(path, lambda place: torch.save({wrapper: apart} if wrapper else apart, place))
    else:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise CheckpointError(f"{path} {ending}; expected a file .pth, .bin or .safetensors")


def get_typed_field(data: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of somebody's JSON, of the kind it should be; a number may be whole."""
    given = data.get(name)
    if given is None:
        return default
    if isinstance(given, bool) is not (kind is bool) or not isinstance(given, (int, float) if kind is float else kind):
        raise CheckpointError(f"{name} is {repr(given)[:40]}; expected {TYPE_NAMES[kind]}")
    return given  # pyright: ignore[reportReturnType]
