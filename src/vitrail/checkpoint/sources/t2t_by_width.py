"""A T2T-ViT whose attention was scaled by its whole width, as yitu's code does with `pretrained=True`.

q·k/√D is (q/√H)·k/√K, so the rows of q are divided by √H on the way in, and multiplied on the way out. Nothing in a
file tells it from `t2t`: it is read so only where that is asked for, and written so only for that code.
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
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.layout import Layout, TranslatedCheckpoint
from vitrail.checkpoint.sources import t2t

LAYOUT_NAME = "t2t_by_width"


def scale_queries(tensors: Mapping[str, Tensor], by: float) -> dict[str, Tensor]:
    """With the rows of q in the blocks multiplied."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", name):
            q, k, v = tensor.chunk(3)
            changed[name] = torch.cat((q * by, k, v))
    return changed


def read(contents: RawContents, known: Mapping[str, Any]) -> TranslatedCheckpoint:
    found = t2t.read(contents, known, LAYOUT_NAME)
    return replace(found, tensors=scale_queries(found.tensors, 1 / sqrt(found.description.config["heads"])))


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    return t2t.write(scale_queries(tensors, sqrt(description.config["heads"])), description, path, LAYOUT_NAME)


LAYOUT = Layout(name=LAYOUT_NAME, matches=lambda _: False, read=read, write=write, families=("t2t",))
