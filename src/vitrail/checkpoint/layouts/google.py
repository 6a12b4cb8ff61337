"""Google's .npz files: of the ViT authors, with optimizer state, of big_vision, its image towers and scanned models.

Files of a BiT or a Mixer have one form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.files import write_atomically
from vitrail.checkpoint import layout
from vitrail.checkpoint.config_from_shapes import parse_image_size
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.name_table import convert_to_their_tensors
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.names.encoder_names import BIG_VISION_POSITIONS, NEW_PART_NAMES, OLD_PART_NAMES, POSITIONS
from vitrail.models.parts.encoder import FIXED_TABLES

NAME, FIXED_POSITIONS = "google", "sincos_simple"
# `details` of a source: `fields`, the config fields of all its models; of a BiT or a Mixer also `preprocessing`, and
# `numbered`, a pattern that is left out of names
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


def strip_other_prefixes(contents: RawContents) -> dict[str, Tensor]:
    """The tensors of a BiT or a Mixer under their shortest names."""
    return layout.strip_common_prefixes(contents.tensors, *PREFIXES[1:3])


def matches(contents: RawContents) -> bool:
    if find_tensor_name_prefix(contents) is not None:
        return True
    return recognize_source(NAME, strip_other_prefixes(contents)) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    prefix = find_tensor_name_prefix(contents)
    return read_model_of_one_form(contents, known) if prefix is None else read_vit(contents, known, prefix)


def read_model_of_one_form(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read a BiT or a Mixer."""
    tensors = strip_other_prefixes(contents)
    family, source = get_source(NAME, tensors, contents.path)
    if pattern := source.details.get("numbered"):
        tensors = {re.sub(pattern, "", name): tensor for name, tensor in tensors.items()}
    how = {**layout.HALF_MEAN_STD, **source.details["preprocessing"]}
    model = layout.ModelBeforeRenaming(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**source.details["fields"], **known},
        policy="google",
        preprocessing=lambda config: Preprocessing(image_size=config["image_size"], **how),
        ignore="t|b|step|extra/.*",
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def read_vit(contents: RawContents, known: Mapping[str, Any], prefix: str) -> layout.TranslatedCheckpoint:
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
    fixed_fields = dict[str, Any]()
    if positions not in tensors:
        if old:
            raise CheckpointError(f"{contents.path} has no {positions}; only big_vision has models without it")
        tensors[positions], size = make_fixed_positions(tensors["embedding/kernel"], known)
        fixed_fields = {"positions": FIXED_POSITIONS, "trained_size": size}
    family, source = get_source(NAME, tensors, contents.path)
    model = layout.ModelBeforeRenaming(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={
            **source.details["fields"],
            **fixed_fields,
            **layout.merge_agreeing_fields({"heads": query.shape[1]}, known),
        },
        policy="google",
        preprocessing=make_preprocessing,
        ignore="t|b|step|extra/.*",
        fixed_fields=layout.OWNER_FIXED_FIELDS,
        variant={"prefix": prefix, "numbered through": old, "scanned": scanned, "positions": positions},
    )
    translated = layout.translate_checkpoint(contents, model)
    others = tuple(name for name in contents.tensors if not name.startswith(prefix))
    return replace(translated, ignored=(*translated.ignored, *others))


def make_fixed_positions(kernel: Tensor, known: Mapping[str, Any]) -> tuple[Tensor, tuple[int, int]]:
    """SimpleViT's table, (1, h·w, D), which big_vision computes, and its image size: the user's, or 224 pixels."""
    if kernel.ndim != 4 or 0 in kernel.shape:
        raise CheckpointError(f"embedding/kernel has shape {tuple(kernel.shape)}; expected 4 dimensions")
    p, q, _, width = kernel.shape
    h, w = parse_image_size(known.get("trained_size")) or parse_image_size(known.get("requested_size")) or (224, 224)
    grid = (max(h // p, 1), max(w // q, 1))
    return FIXED_TABLES[FIXED_POSITIONS](grid, width)[None], (grid[0] * p, grid[1] * q)


def remove_fixed_positions(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors without SimpleViT's table, which readers compute; an error if it was resampled from another size."""
    (h, w), (p, q) = config["image_size"], config["patch_size"]
    grid = (h // p, w // q)
    table = FIXED_TABLES[FIXED_POSITIONS](grid, config["width"])
    stored = tensors["pos_embed"][0].float()
    expected = F.pad(table, (0, 0, len(stored) - len(table), 0))  # zeros for a class token
    if not torch.allclose(stored, expected, atol=2e-3):  # it may be stored in half precision
        raise CheckpointError(
            f"its positions were resampled to {grid[0]}×{grid[1]} patches, which {NAME} computes for each size; "
            "expected a model at the size that it was built for"
        )
    return {name: tensor for name, tensor in tensors.items() if name != "pos_embed"}


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
    if "preprocessing" in source.details:
        save_arrays(convert_to_their_tensors(tensors, source.table, heads=1), path)
        return source.assumed
    if config.get("positions") == FIXED_POSITIONS:
        tensors = remove_fixed_positions(tensors, config)
    variant = choose_variant_for_writing(description)
    renamed = convert_to_their_tensors(tensors, source.table, config["heads"])
    renamed = {variant.rename(name): tensor for name, tensor in renamed.items()}
    if variant.scanned:
        renamed = stack_layers(renamed, config["depth"])
    save_arrays({variant.prefix + name: tensor for name, tensor in renamed.items()}, path)
    return source.assumed


def save_arrays(tensors: Mapping[str, Tensor], path: Path) -> None:
    arrays = {name: array_from_tensor(tensor) for name, tensor in tensors.items()}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, save)


def choose_variant_for_writing(description: Description) -> GoogleVariant:
    """The variant that the model was read from, if it still fits; else a default one.

    Only big_vision has class tokens without a position, the pool "map", and positions that it computes.
    """
    config = description.config
    default = GoogleVariant("", OLD_PART_NAMES, False, POSITIONS)
    unpositioned = config.get("class_token", True) and not config.get("prefix_positions", True)
    if unpositioned or config.get("pool") == "map" or config.get("positions") == FIXED_POSITIONS:
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


LAYOUTS = (layout.Layout(name=NAME, matches=matches, read=read, write=write),)
