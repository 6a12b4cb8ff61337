"""MAE: the encoder, perhaps with a decoder; or fine-tuned, with a norm after the mean of patches."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, is_sincos_table, is_timm_family_unknown_to
from vitrail.checkpoint.layouts import deit, timm
from vitrail.checkpoint.name_table import convert_to_our_tensors
from vitrail.checkpoint.weight_files import RawContents
from vitrail.models.base.checkpoint_side import make_entry
from vitrail.models.names.hf_names import HF_VIT_TABLE

NAME = "mae"
DECODER_PATTERN = r"mask_token|decoder_.*"
HF_DECODER_PREFIX = "decoder."  # in transformers
HF_DECODER_BLOCK = re.compile(r"decoder_(?:layers|encoder\.layer)\.")  # the second since v5


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    tuned = "fc_norm.weight" in names and "norm.weight" not in names
    own = "decoder_embed.weight" in names or (contents.wrapper == "model" and ("head.weight" not in names or tuned))
    others = {"dist_token", "blocks.0.gamma_1", "blocks.0.ls1.gamma", "reg_token", "attn_pool.latent"}
    own = own and "patch_embed.proj.weight" in names and not others & names.keys()
    return own and not is_timm_family_unknown_to(NAME, names)


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    family, source = get_source(NAME, tensors, contents.path)
    owned = (
        bool(known.get(layout.LAYOUT_NAMED_KEY))
        or "norm.weight" not in tensors
        or "decoder_embed.weight" in tensors
        or is_sincos_table(tensors.get("pos_embed"), columns_first=True)
    )
    heads = layout.find_heads_by_width(tensors, "patch_embed.proj.weight", source) if owned else {}
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known={**heads, **known},
        policy="deit",
        preprocessing=deit.make_preprocessing,
        fixed_fields=layout.OWNER_FIXED_FIELDS if owned else (),
        assumed_preprocessing=not owned,
        ignore=DECODER_PATTERN,
    )
    return layout.translate_checkpoint(contents, model)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write the encoder, perhaps with a decoder by its names here, or the fine-tuned model.

    A file without a head does not say how tokens are pooled: an encoder that pools the patches can be written.
    """
    _, source = choose_source(NAME, description)
    heads, config, assumed = description.config["heads"], description.config, source.assumed
    if not config["classes"] and config.get("pool") == "mean":
        config, assumed = {**config, "pool": "class"}, {**assumed, "pool": "class"}
    layout.check_representable(NAME, config, source.supported)
    decoder = [make_entry(name, name) for name in tensors if re.fullmatch(DECODER_PATTERN, name)]
    table = (*decoder, *source.table)
    layout.rename_and_write_tensors(NAME, tensors, table, heads, path, wrapper="model")
    return assumed


def collect_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder in a file of the authors or of transformers, by the authors' names; empty if there is none."""
    names = layout.strip_common_prefixes(tensors, *timm.WRAPPER_PREFIXES)
    found = {name.removeprefix(HF_DECODER_PREFIX): tensor for name, tensor in names.items()}
    found = {name: tensor for name, tensor in found.items() if re.fullmatch(DECODER_PATTERN, name)}
    if "decoder_embed.weight" not in found:
        return {}
    layers = {name: tensor for name, tensor in found.items() if HF_DECODER_BLOCK.match(name)}
    prefix = "layers." if any(".mlp." in name for name in layers) else "encoder.layer."  # in memory, and on disk
    renamed = {HF_DECODER_BLOCK.sub(prefix, name): tensor for name, tensor in layers.items()}
    blocks, _ = convert_to_our_tensors(renamed, HF_VIT_TABLE)
    rest = {name: tensor for name, tensor in found.items() if name not in layers}
    return {**rest, **{f"decoder_{name}": tensor for name, tensor in blocks.items()}}


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write, collect_parts=collect_decoder)
