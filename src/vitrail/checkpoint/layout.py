"""What a layout is, which layout a file has, and the functions that the sources share to read and write theirs."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.base.errors import CheckpointError, unknown_name_error
from vitrail.base.files import write_atomically
from vitrail.base.text import abbreviate_list
from vitrail.checkpoint.config_from_shapes import find_assumptions, infer_config, parse_image_size
from vitrail.checkpoint.description import TYPE_NAMES, Description
from vitrail.checkpoint.layouts import PARTS_OF_NAMES, SOURCE_FILES, SOURCE_NAMES
from vitrail.checkpoint.name_table import convert_to_our_tensors, convert_to_their_tensors
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.checkpoint.torch_files import WRAPPER_KEYS
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checkpoint_side import NameEntry, SourceNames
from vitrail.models.base.family import Family

T = TypeVar("T")
OWN_LAYOUT = "vitrail"
LAYOUT_NAMES = (OWN_LAYOUT, *SOURCE_NAMES)
LAYOUT_KEY = "layout"  # in the header of a safetensors file, which has no wrapper to recognize a layout by
HALF_MEAN_STD: dict[str, Any] = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET_MEAN_STD: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OWNER_FIXED_FIELDS = ("activation", "norm_eps", "pool", "positions", "trained_size")  # same in all models of an owner
LAYOUT_NAMED_KEY = "layout_named"  # key in `known`: whether the user or the file named the layout


@dataclass(frozen=True, kw_only=True)
class TranslatedCheckpoint:
    """A checkpoint of any layout with our tensor names; the config is that of the file, not of the requested model."""

    description: Description
    tensors: dict[str, Tensor]
    ignored: tuple[str, ...] = ()  # tensors of the file that are not used
    warnings: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields that the file does not specify
    layout: str = ""  # set by the caller of `Layout.read`


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How to recognize, read and write the checkpoints of one library."""

    name: str
    matches: Callable[[RawContents], bool]
    read: Callable[[RawContents, Mapping[str, Any]], TranslatedCheckpoint]  # with fields that the user specified
    write: Callable[[Mapping[str, Tensor], Description, Path], Mapping[str, Any]]  # returns what its readers assume
    # the tensors next to a model that it can hold, such as a decoder, by its names; empty if there are none
    collect_parts: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None


def list_layouts() -> Iterator[Layout]:
    """All layouts, vitrail's own first, each imported when it is asked for. The first that matches a file reads it."""
    return map(get_layout, LAYOUT_NAMES)


def get_layout(name: str) -> Layout:
    if name not in LAYOUT_NAMES:
        raise unknown_name_error("layout", name, LAYOUT_NAMES)
    module = import_module(f"vitrail.checkpoint.layouts.{SOURCE_FILES.get(name, name)}")
    return next(each for each in module.LAYOUTS if each.name == name)


def detect_layout(contents: RawContents, source: str | None) -> Layout:
    """The layout that the user named as `source`, that the file names in its header, or the first that matches."""
    if source is not None:
        return get_layout(source)
    if not contents.tensors:
        raise CheckpointError(f"{contents.path} contains no tensors; expected the weights of a Vision Transformer")
    in_header, names = contents.header.get(LAYOUT_KEY), "\n".join(contents.tensors)
    if in_header in LAYOUT_NAMES:
        return get_layout(in_header)
    for name in LAYOUT_NAMES if in_header is None else ():
        parts = PARTS_OF_NAMES.get(name, ("",))
        if any(part in names for part in parts) and (layout := get_layout(name)).matches(contents):
            return layout
    raise CheckpointError(
        f"{contents.path} has an unknown layout, with {len(contents.tensors)} tensors "
        f"({abbreviate_list(contents.tensors, 3)}); "
        f"expected one of {', '.join(LAYOUT_NAMES)}"
    )


@dataclass(frozen=True, kw_only=True)
class ModelBeforeRenaming:
    """What a layout knows about the model in a file before its tensors are renamed."""

    layout: str
    family: Family
    source: SourceNames
    tensors: Mapping[str, Tensor]  # under the names of the layout
    known: Mapping[str, Any]  # config fields from the file, its owner or the user
    policy: ResamplingPolicy
    preprocessing: Callable[[dict[str, Any]], Preprocessing]  # of a config
    ignore: str = ""  # pattern of names that may be missing in the table
    labels: tuple[str, ...] | None = None
    variant: Mapping[str, Any] = field(default_factory=dict[str, Any])  # recorded in the provenance
    warnings: Sequence[str] = ()
    fixed_fields: Collection[str] = ()  # with one value in all models of the owner, if the file is known to be theirs
    default_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    assumed_preprocessing: bool = False


def translate_checkpoint(contents: RawContents, model: ModelBeforeRenaming) -> TranslatedCheckpoint:
    """Rename the tensors, infer the config, and collect warnings and assumptions."""
    tensors, unnamed = convert_to_our_tensors(model.tensors, model.source.table)
    lost = [name for name in unnamed if not re.fullmatch(model.ignore, name)]
    if lost:
        raise CheckpointError(
            f"{contents.path} has {len(lost)} tensors that are not part of a {model.family.name} of the layout "
            f"{model.layout} ({abbreviate_list(lost, 3)}); without them it would be another model: "
            "expected a plain ViT, DeiT, CaiT, T2T-ViT, hybrid or convnet, or another `source`"
        )
    tensors = add_batch_counters(tensors)
    guess = infer_config(tensors, model.family, {**model.default_fields, **model.known})
    config, doubts = guess.config, guess.doubts
    warnings, stated = list(model.warnings), parse_image_size(model.known.get("image_size"))
    if stated not in (None, config["image_size"]):
        used = "×".join(map(str, config["image_size"]))
        warnings.append(f"its image size is given as {stated}, but its positions are for {used}: {used} is used")
    others = [name for name in contents.other_keys if name in WRAPPER_KEYS and name not in ("student", "teacher")]
    if contents.wrapper and others:
        warnings.append(f"its weights are read from {contents.wrapper!r}; the file also has {', '.join(others)}")
    if config.get("layer_scale") or config.get("registers") or model.layout == "google":
        doubts = {name: value for name, value in doubts.items() if name != "prefix_positions"}  # often False here
    preprocessing = model.preprocessing(config)
    assumed = find_assumptions(model.family, guess, doubts, model.known, model.fixed_fields)
    if model.assumed_preprocessing:
        assumed["preprocessing"] = format_preprocessing(preprocessing)
    description = Description(
        family=model.family.name,
        config=config,
        preprocessing=preprocessing,
        labels=model.labels,
        provenance={"source": {"layout": model.layout, "file": contents.path.name, **model.variant}},
        resampling=model.policy,
    )
    return TranslatedCheckpoint(
        description=description, tensors=tensors, ignored=unnamed, warnings=tuple(warnings), assumed=assumed
    )


def format_preprocessing(preprocessing: Preprocessing) -> str:
    """Mean, crop and interpolation, in which layouts differ most."""
    names = {HALF_MEAN_STD["mean"]: "mean 0.5", IMAGENET_MEAN_STD["mean"]: "ImageNet's mean"}
    mean = names.get(preprocessing.mean, f"mean {preprocessing.mean}")
    return f"{mean}, crop {preprocessing.crop:.4g}, {preprocessing.interpolation}"


def get_mean_std(*, imagenet: bool) -> dict[str, Any]:
    return IMAGENET_MEAN_STD if imagenet else HALF_MEAN_STD


def find_heads_by_width(tensors: Mapping[str, Tensor], kernel: str, source: SourceNames) -> dict[str, int]:
    """Number of heads of the published model whose width equals that of the patch kernel."""
    width = tensors[kernel].shape[0] if kernel in tensors and tensors[kernel].ndim else 0
    return {"heads": source.heads[width]} if width in source.heads else {}


def add_batch_counters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the counters of batch norms, which files from before torch 0.4.1 lack; without a momentum they are used."""
    suffix = ".running_mean"
    norms = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    return {**{f"{name}.num_batches_tracked": torch.zeros((), dtype=torch.int64) for name in norms}, **tensors}


def merge_agreeing_fields(in_file: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Merge fields of the file and of the user, who may add fields but not contradict the file."""
    for name in in_file.keys() & known.keys():
        if in_file[name] != known[name]:
            raise CheckpointError(f"{name} is {known[name]!r}, but the file says {in_file[name]!r}; expected the same")
    return {**in_file, **known}


def fields_from_arguments(arguments: Mapping[str, Any], source: SourceNames) -> dict[str, Any]:
    """Our fields of the arguments that the `argument_fields` of a source name; zeros stand for none."""
    fields = dict[str, Any]()
    for argument, name in source.details.get("argument_fields", {}).items():
        value = arguments.get(argument)
        if value is not None and (not isinstance(value, list) or any(value)):
            fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


def strip_common_prefixes(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """Remove the prefixes that all names have, in this order: wrappers put them before the names of a model."""
    names = dict(zip(tensors, tensors, strict=True))
    for prefix in prefixes:
        if names and all(name.startswith(prefix) for name in names.values()):
            names = {key: name.removeprefix(prefix) for key, name in names.items()}
    return {name: tensors[key] for key, name in names.items()}


def check_representable(layout: str, config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a config with a value that the layout cannot represent."""
    if "stages" in config:
        config = {**config, "number of stages": len(config["stages"])}
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            expected = " or ".join(repr(value) for value in values)
            raise CheckpointError(f"{name} is {config[name]!r}, which {layout} cannot represent; expected {expected}")


def add_zero_prefix_positions(tensors: Mapping[str, Tensor], config: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Add zero rows for prefix tokens without positions, for layouts that add positions to all tokens."""
    if config.get("prefix_positions", True) or "pos_embed" not in tensors:
        return dict(tensors)
    table = tensors["pos_embed"]
    return {**tensors, "pos_embed": torch.cat((table.new_zeros(1, rows, table.shape[2]), table), dim=1)}


def insert_zero_register_positions(table: Tensor, registers: Tensor) -> Tensor:
    """Insert zero rows for the registers, which have no positions in DINOv2, after the row of the class token."""
    if table.ndim != 3 or registers.ndim != 3:  # refused when the config is inferred
        return table
    rows = registers.shape[1]
    return torch.cat((table[:, :1], table.new_zeros(table.shape[0], rows, *table.shape[2:]), table[:, 1:]), dim=1)


def remove_zero_register_positions(
    layout: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Remove the rows of the registers, which must be zero because the layout has no place for them."""
    registers = config.get("registers", 0)
    if not registers or "pos_embed" not in tensors:
        return dict(tensors)
    first, rows, patches = tensors["pos_embed"].tensor_split([1, 1 + registers], dim=1)
    check_representable(layout, {"positions of registers": bool(rows.any())}, {"positions of registers": (False,)})
    return {**tensors, "pos_embed": torch.cat((first, patches), dim=1)}


def rename_and_write_tensors(
    layout: str,
    tensors: Mapping[str, Tensor],
    table: Sequence[NameEntry],
    heads: int,
    path: Path,
    wrapper: str = "",
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a .safetensors file with the layout in its header, or a file of torch.save with tensors under `wrapper`.

    `buffers` are added under their names.
    """
    renamed = convert_to_their_tensors(tensors, table, heads)
    renamed |= {name: tensor.clone() for name, tensor in (buffers or {}).items()}  # which may share their storage
    if path.suffix == ".safetensors":
        write_atomically(path, lambda temporary: save_file(renamed, temporary, {"format": "pt", LAYOUT_KEY: layout}))
    elif path.suffix in (".pth", ".pt", ".bin", ".th"):
        cloned = {name: tensor.clone() for name, tensor in renamed.items()}  # torch.save would write shared storages
        write_atomically(path, lambda temporary: torch.save({wrapper: cloned} if wrapper else cloned, temporary))
    else:
        suffix = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise CheckpointError(f"{path} has {suffix}; expected a file .pth, .bin or .safetensors")


def get_typed_field(data: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """A field of a JSON object, which must have the right type; an integer is a valid float."""
    given = data.get(name)
    if given is None:
        return default
    if isinstance(given, bool) is not (kind is bool) or not isinstance(given, (int, float) if kind is float else kind):
        raise CheckpointError(f"{name} is {repr(given)[:40]}; expected {TYPE_NAMES[kind]}")
    return given  # pyright: ignore[reportReturnType]
