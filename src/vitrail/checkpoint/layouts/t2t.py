"""yitu's T2T-ViT: {"state_dict_ema": …} or {"state_dict": …}, with its own names for the stages, and k before q.

Its code has two scales for the attention of the backbone. By default, as for the released weights, it divides by the
square root of the head width. We and mmpretrain do the same, and mmpretrain reports the published accuracy of the
released T2T-ViT_t-14. Built with `pretrained=True`, which downloads nothing, it divides by the square root of the model
width: a file of such a run is read as `t2t_by_width`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.layouts import timm
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.family import Family
from vitrail.models.catalog.family_index import list_published_heads

NAME = "t2t"
SCALE_WARNING = (
    "the file does not specify how attention is scaled: by the head width, as in yitu's evaluation; "
    "if it was trained with the scale of the model width, set `source` to t2t_by_width"
)


def matches(contents: RawContents) -> bool:
    return recognize_source(NAME, layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)) is not None


def read(contents: RawContents, known: Mapping[str, Any], layout_name: str = NAME) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, *timm.WRAPPER_PREFIXES)
    family, source = get_source(layout_name, tensors, contents.path)
    model = layout.UntranslatedModel(
        layout=layout_name,
        family=family,
        source=source,
        tensors=tensors,
        known={**find_heads_by_mlp(tensors, family), **known},
        policy="deit",
        preprocessing=make_preprocessing,
        warnings=[SCALE_WARNING] if layout_name == NAME else [],
        fixed_fields=layout.OWNER_FIXED_FIELDS,
    )
    return layout.translate_checkpoint(contents, model)


def find_heads_by_mlp(tensors: Mapping[str, Tensor], family: Family) -> dict[str, int]:
    """Number of heads, if a published model has an MLP of this shape."""
    hidden = tensors.get("blocks.0.mlp.fc1.weight")
    if hidden is None or hidden.ndim != 2:
        return {}
    heads = list_published_heads(family).get(f"{hidden.shape[1]} {hidden.shape[0]}")
    return {} if heads is None else {"heads": heads}


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    return Preprocessing(image_size=config["image_size"], crop=0.9, **layout.IMAGENET_MEAN_STD)


def write(
    tensors: Mapping[str, Tensor], description: Description, path: Path, layout_name: str = NAME
) -> Mapping[str, Any]:
    config, (_, source) = description.config, choose_source(layout_name, description)
    layout.rename_and_write_tensors(layout_name, tensors, source.table, config["heads"], path, wrapper="state_dict_ema")
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
