"""MoCo v3: {"state_dict": …} of a training run, of which the base encoder is read, or of a linear probe.

Its ViT-S has 12 heads, others have 6. A probe, or the output of its authors' convert_to_deit.py, has the names of any
ViT and is recognised by its fixed position table.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, find_source, get_source, is_sincos_table
from vitrail.checkpoint.name_table import add_name_prefix
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing

NAME = "moco"
ENCODER_PREFIX = "base_encoder."  # next to momentum_encoder. and predictor.
PATCH_KERNEL = "patch_embed.proj.weight"


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, "module.")
    if ENCODER_PREFIX + PATCH_KERNEL in names:
        return True
    kernel = names.get(PATCH_KERNEL)
    if kernel is None or kernel.ndim != 4 or not is_sincos_table(names.get("pos_embed"), columns_first=False):
        return False
    found = find_source(NAME, names)
    return found is not None and kernel.shape[0] in found[1].heads


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    """Read the encoder without its projector, or the probe with its head."""
    tensors, ignored = layout.strip_common_prefixes(contents.tensors, "module."), list[str]()
    if ENCODER_PREFIX + PATCH_KERNEL in tensors:
        ignored = [n for n in tensors if not n.startswith(ENCODER_PREFIX) or n.startswith(f"{ENCODER_PREFIX}head.")]
        tensors = {n.removeprefix(ENCODER_PREFIX): each for n, each in tensors.items() if n not in ignored}
    family, source = get_source(NAME, tensors, contents.path)
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**layout.find_heads_by_width(tensors, PATCH_KERNEL, source), **known},
        policy="deit",
        preprocessing=make_preprocessing,
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return replace(layout.translate_checkpoint(contents, model), ignored=tuple(ignored))


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As its authors evaluate a probe."""
    return Preprocessing(
        image_size=config["image_size"], crop=0.875, interpolation="bilinear", **layout.IMAGENET_MEAN_STD
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write the base encoder, or, with a head, a probe that is recognised by its position table."""
    config, (_, source) = description.config, choose_source(NAME, description)
    layout.check_representable(NAME, config, source.supported)
    layout.check_representable(NAME, config, {"heads": (source.heads.get(config["width"], config["heads"]),)})
    if config["classes"] and not (
        is_sincos_table(tensors.get("pos_embed"), columns_first=False) and config["width"] in source.heads
    ):
        raise CheckpointError(
            f"moco can store {config['classes']} classes only with its own position table; expected 0 classes"
        )
    prefix = "module." if config["classes"] else f"module.{ENCODER_PREFIX}"
    renamed = layout.add_zero_prefix_positions(tensors, config, 1)
    table = add_name_prefix(source.table, prefix)
    layout.rename_and_write_tensors(NAME, renamed, table, config["heads"], path, wrapper="state_dict")
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
