"""Checksums of weights: of their names, shapes, dtypes and values, so that a flipped bit anywhere is found."""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

CHECKSUM = "sha256"  # the key in the header of a safetensors file


def tensor_checksum(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 of the tensors in the order of their names, and of what else is to be protected."""
    found = sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for text in texts:
        found.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return found.hexdigest()
