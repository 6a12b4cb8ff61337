"""Checksums of weights: of names, shapes, dtypes and values, so that a flipped bit anywhere in a file is found."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import torch
from torch import Tensor

from vitrail.machine import cores

CHECKSUM = "sha256"  # the key in the header of a safetensors file


def tensor_checksum(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 of the checksum of each tensor, in the order of their names, and of the `texts`."""
    found, names = sha256(), sorted(tensors)
    with ThreadPoolExecutor(min(8, cores())) as pool:  # a core hashes 1.2 GB per second
        parts = list(pool.map(value_checksum, (tensors[name] for name in names)))
    for name, part in zip(names, parts, strict=True):
        found.update(f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}".encode("utf-8", "surrogatepass") + part)
    for text in texts:
        found.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def value_checksum(tensor: Tensor) -> bytes:
    return sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).digest()


def sign_header(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """The header of a safetensors file with a checksum of the tensors and of all its other entries."""
    return {**header, CHECKSUM: tensor_checksum(tensors, *header_texts(header))}


def is_intact(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bool | None:
    """Whether the checksum in the header matches; None if there is none, as in public and older files."""
    if CHECKSUM not in header:
        return None
    return header[CHECKSUM] == tensor_checksum(tensors, *header_texts(header))


def header_texts(header: Mapping[str, str]) -> list[str]:
    return [f"{name}={header[name]}" for name in sorted(header) if name != CHECKSUM]
