"""Checksums of weights: names, shapes, dtypes and values, so that a flipped bit anywhere in a file is detected."""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.base.files import file_checksum
from vitrail.base.machine import count_cores

LIBRARIES = ("vitrail", "torch")  # whose code is known by the version
CHECKSUM_KEY = "sha256"  # in the header of a safetensors file


def checksum_tensors(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 of the checksums of all tensors, in the order of their names, and of the `texts`."""
    checksum, names = sha256(), sorted(tensors)
    with ThreadPoolExecutor(min(8, count_cores())) as pool:  # one core hashes 1.2 GB per second
        parts = list(pool.map(checksum_values, (tensors[name] for name in names)))
    for name, part in zip(names, parts, strict=True):
        described = f"{name}{tuple(tensors[name].shape)}{tensors[name].dtype}"
        checksum.update(described.encode("utf-8", "surrogatepass") + part)
    for text in texts:
        checksum.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    return checksum.hexdigest()


def checksum_values(tensor: Tensor) -> bytes:
    return sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).digest()


def checksum_own_code(model: nn.Module) -> list[str]:
    """SHA-256 of the files outside vitrail and torch that define its parts, since equal weights may run other code."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [vars(sys.modules[name]) for name in names if name.partition(".")[0] not in LIBRARIES]
    return sorted(file_checksum(Path(each["__file__"])) for each in modules if each.get("__file__"))


def add_checksum_to_header(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, str]:
    """Add a checksum of the tensors and of all other entries to the header of a safetensors file."""
    return {**header, CHECKSUM_KEY: checksum_tensors(tensors, *list_header_entries(header))}


def matches_header_checksum(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bool | None:
    """Whether the checksum in the header matches; None without a checksum, as in public and older files."""
    if CHECKSUM_KEY not in header:
        return None
    return header[CHECKSUM_KEY] == checksum_tensors(tensors, *list_header_entries(header))


def list_header_entries(header: Mapping[str, str]) -> list[str]:
    return [f"{name}={header[name]}" for name in sorted(header) if name != CHECKSUM_KEY]
