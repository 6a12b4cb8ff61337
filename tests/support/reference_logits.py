"""Logits that the authors' own code computes for weights given by a formula of their names."""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    config: dict[str, Any]  # in the authors' words
    tensors: dict[str, Tensor]  # under the authors' names
    images: Tensor
    logits: Tensor


def read_reference(shared: Callable[[str], Path], name: str) -> Reference:
    """A file of the folder `reference`, whose README has the formulas."""
    data = json.loads(shared(f"reference/{name}.json").read_text())
    shared_name = ".proj_cls.", ".proj."  # the same tensor in RegionViT
    tensors = {each: make_tensor(each.replace(*shared_name), tuple(shape)) for each, shape in data["tensors"].items()}
    b, c, h, w = data["images"]
    repeat = data.get("repeat", 1)
    pixels = np.random.RandomState(7).standard_normal((b, c, h // repeat, w // repeat))
    images = torch.from_numpy(pixels.repeat(repeat, 2).repeat(repeat, 3)).float()
    return Reference(data["config"], tensors, images, torch.tensor(data["logits"]))


def make_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The weights of a tensor by the first rule that its name fits."""
    z = np.random.RandomState(zlib.crc32(name.encode()) & 0x7FFFFFFF).standard_normal(shape)
    if name.endswith(("running_var", "moving_variance")):
        z = 0.5 + np.abs(z)
    elif name.endswith("/depthwise_kernel"):  # TensorFlow
        z = z / sqrt(prod(shape[:2]))
    elif name.endswith("/kernel"):  # Flax, TensorFlow
        z = z / sqrt(shape[0] if name.split("/")[-2] in ("query", "key", "value") else prod(shape[:-1]))
    elif name.endswith("weight") and len(shape) > 1 and shape[0] > 1:
        z = z / sqrt(prod(shape[1:]))
    else:
        z = 1 + 0.2 * z if name.endswith(("weight", "/scale", "/gamma")) else 0.2 * z
    return torch.from_numpy(np.asarray(z)).float()
