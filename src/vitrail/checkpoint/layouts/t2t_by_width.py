"""T2T-ViT with attention scaled by the model width, as in yitu's code with `pretrained=True`.

q·k/√D is (q/√H)·k/√K, so the rows of q are divided by √H when reading and multiplied when writing. Nothing in a file
distinguishes it from `t2t`, so it is used only if the user names it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import Layout, TranslatedCheckpoint
from vitrail.checkpoint.layouts import t2t
from vitrail.checkpoint.weight_files import RawContents

LAYOUT_NAME = "t2t_by_width"


def scale_queries(tensors: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """Multiply the rows of q in all blocks."""
    scaled = dict(tensors)
    for name, tensor in tensors.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", name):
            q, k, v = tensor.chunk(3)
            scaled[name] = torch.cat((q * by, k, v))
    return scaled


def read(contents: RawContents, known: Mapping[str, Any]) -> TranslatedCheckpoint:
    translated = t2t.read(contents, known, LAYOUT_NAME)
    heads = translated.description.config["heads"]
    return replace(translated, tensors=scale_queries(translated.tensors, 1 / sqrt(heads)))


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    return t2t.write(scale_queries(tensors, sqrt(description.config["heads"])), description, path, LAYOUT_NAME)


LAYOUT = Layout(name=LAYOUT_NAME, matches=lambda _: False, read=read, write=write)
