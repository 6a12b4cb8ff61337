"""Google's .npz files: of the ViT authors, with optimizer state, of big_vision, its image towers and scanned models."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_sources import choose_source, get_source
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import convert_to_their_tensors
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import write_atomically
from vitrail.models.parts.flax_names import BIG_VISION_POSITIONS, NEW_PART_NAMES, OLD_PART_NAMES, POSITIONS

NAME = "google"
# `details` of a source: `fields`, the config fields of all its models
PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")


@dataclass(frozen=True)
class GoogleVariant:
    """Names of the tensors in one kind of Google's files."""

    prefix: str
    part_names: tuple[str, ...]  # of the parts of a block
    scanned: bool  # one stacked tensor for all blocks
    positions: str

    def rename(self, name: str) -> str:
        """The name of a tensor in this kind of files, given the first of its names in a table."""
        if name == POSITIONS:
            return self.positions
        match = re.fullmatch(r"(Transformer/encoderblock_\d+/)(\w+)(/.*)", name)
        return name if match is None else match[1] + self.part_names[OLD_PART_NAMES.index(match[2])] + match[3]


def find_tensor_name_prefix(contents: RawContents) -> str | None:
    return next((p for p in PREFIXES if f"{p}embedding/kernel" in contents.tensors), None)


def matches(contents: RawContents) -> bool:
    return find_tensor_name_prefix(contents) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    prefix = find_tensor_name_prefix(contents)
    if prefix is None:
        raise CheckpointError(f"{contents.path} has no embedding/kernel; expected a ViT of Google")
    tensors = {n.removeprefix(prefix): tensor for n, tensor in contents.tensors.items() if n.startswith(prefix)}
    scanned = "Transformer/encoderblock/LayerNorm_0/scale" in tensors
    old = any(name.endswith(f"{OLD_PART_NAMES[1]}/query/kernel") for name in tensors)
    positions = BIG_VISION_POSITIONS if BIG_VISION_POSITIONS in tensors else POSITIONS
    variant = GoogleVariant(prefix, OLD_PART_NAMES if old else NEW_PART_NAMES, scanned, positions)
    if scanned:
        tensors = unstack_layers(tensors)
    query = tensors.get(f"Transformer/encoderblock_0/{variant.part_names[1]}/query/kernel")
    if query is None or query.ndim != 3:
        raise CheckpointError(f"{contents.path} has no query kernel of 3 dimensions; expected a ViT of Google")
    if positions not in tensors:
        raise CheckpointError(
            f"{contents.path} has no {positions}; expected learned positions, not the fixed ones of big_vision"
        )
    family, source = get_source(NAME, tensors, contents.path)
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**source.details["fields"], **layout.merge_agreeing_fields({"heads": query.shape[1]}, known)},
        policy="google",
        preprocessing=make_preprocessing,
        ignore="t|b|step|extra/.*",
        fixed_fields=layout.OWNER_FIXED_FIELDS,
        variant={"prefix": prefix, "numbered through": old, "scanned": scanned, "positions": positions},
    )
    translated = layout.translate_checkpoint(contents, model)
    others = tuple(name for name in contents.tensors if not name.startswith(prefix))
    return replace(translated, ignored=(*translated.ignored, *others))


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split tensors that are stacked over all layers into one per layer."""
    unstacked = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch("Transformer/encoderblock/(.*)", name)
        if match is None:
            unstacked[name] = tensor
        else:
            layers = tensor.unbind() if tensor.ndim else ()
            unstacked |= {f"Transformer/encoderblock_{layer}/{match[1]}": each for layer, each in enumerate(layers)}
    return unstacked


def stack_layers(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    stacked = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name)
        if match is None:
            stacked[name] = tensor
        elif match[1] == "0":
            layers = [tensors[f"Transformer/encoderblock_{layer}/{match[2]}"] for layer in range(depth)]
            stacked[f"Transformer/encoderblock/{match[2]}"] = torch.stack(layers)
    return stacked


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As its authors evaluate: the image is squashed to the size, without a crop."""
    return Preprocessing(
        image_size=config["image_size"], crop=1.0, fit="squash", interpolation="bilinear", **layout.HALF_MEAN_STD
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write an .npz of the kind that the model was read from; else of the ViT authors, or of big_vision if needed."""
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    if config.get("pool", "class") != "class":
        layout.check_representable(NAME, config, {"class_token": (False,)})
    if path.suffix != ".npz":
        raise CheckpointError(f"{path} has the suffix {path.suffix!r}; expected a file .npz")
    variant = choose_variant_for_writing(description)
    renamed = convert_to_their_tensors(tensors, source.table, config["heads"])
    renamed = {variant.rename(name): tensor for name, tensor in renamed.items()}
    if variant.scanned:
        renamed = stack_layers(renamed, config["depth"])
    arrays = {variant.prefix + name: array_from_tensor(tensor) for name, tensor in renamed.items()}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, save)
    return source.assumed


def choose_variant_for_writing(description: Description) -> GoogleVariant:
    """The variant that the model was read from, if it still fits; else a default one.

    Only big_vision has class tokens without a position, and the pool "map".
    """
    config = description.config
    default = GoogleVariant("", OLD_PART_NAMES, False, POSITIONS)
    unpositioned = config.get("class_token", True) and not config.get("prefix_positions", True)
    if unpositioned or config.get("pool") == "map":
        default = GoogleVariant("params/", NEW_PART_NAMES, False, BIG_VISION_POSITIONS)
    source = description.provenance.get("source")
    if not isinstance(source, Mapping) or source.get("layout") != "google" or source.get("prefix") not in PREFIXES:
        return default
    original = GoogleVariant(
        source["prefix"],
        OLD_PART_NAMES if source.get("numbered through") else NEW_PART_NAMES,
        bool(source.get("scanned")),
        BIG_VISION_POSITIONS if source.get("positions") == BIG_VISION_POSITIONS else POSITIONS,
    )
    return original if original.positions == default.positions or not config.get("class_token", True) else default


def array_from_tensor(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
