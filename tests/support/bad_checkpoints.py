"""Hostile and invalid checkpoint files, built byte by byte."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitrail.base.errors import CheckpointError
from vitrail.checkpoint.weight_files import read_raw_contents

TENSORS = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
BOMB_BYTES = 6 * 10**7
LEGACY_HEADER = b"".join(pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
OS_SYSTEM: Any = getattr(os, "system")  # noqa: B009  # hostile files call it


def assert_refused(path: Path, match: str = ".") -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_raw_contents(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert path.name in message
    return message


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def zip_pickle(pickled: bytes, values: bytes = b"", compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in {
            "data.pkl": pickled,
            "byteorder": b"little",
            "data/0": values,
            "version": b"3\n",
        }.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def torch_save_bytes(data: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(data, file, **options)
    return file.getvalue()


def legacy_torch_bytes(pickled: bytes) -> bytes:
    return LEGACY_HEADER + pickled + pickle.dumps([], 2)


def npz_bytes(name: str = "a.npy", content: bytes = b"", compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def npy_bytes(header: str, values: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values


def safetensors_bytes(header: object, values: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


class PickledCall:
    """An object that is pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def make_arrays() -> Any:
    return {name: tensor.numpy() for name, tensor in TENSORS.items()}


CONTAINERS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "zip": zip_pickle, "legacy": legacy_torch_bytes}
VALID_FILES: dict[str, Callable[[Path], object]] = {
    "a.safetensors": lambda path: save_file(TENSORS, path),
    "zip.pth": lambda path: torch.save(TENSORS, path),
    "legacy.pth": lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
    "a.npz": lambda path: np.savez(path, **make_arrays()),
    "deflated.npz": lambda path: np.savez_compressed(path, **make_arrays()),
}


def repeat_step(step: bytes, count: int = 10**6) -> bytes:
    return b"\x80\x02](" + step * count + b"e."


def tensor_pickle(count: int, container: str) -> bytes:
    """A pickle of one tensor that claims to have `count` values."""
    number = b"\x8a\x08" + struct.pack("<q", count)
    place = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + number
    place += (b"N" if container == "legacy" else b"") + b"tQ"
    shape = number + b"\x85"
    call = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + place
        + b"K\0"
        + shape
        + b"K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    return b"\x80\x02}X\x01\0\0\0a" + call + b"s."


@cache
def zip_bomb(compression: int) -> bytes:
    header = npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (15000000,), }")
    return npz_bytes(content=header + b"\0" * BOMB_BYTES, compression=compression)


def change_zip_directory(content: bytes, change: Callable[[bytearray], None]) -> bytes:
    """Change the directory of a zip file, which stays at its offset."""
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    directory = bytearray(content[start:end])
    change(directory)
    last = bytearray(content[end:])
    last[12:16] = struct.pack("<L", len(directory))
    return content[:start] + directory + last


def make_model_folder(folder: Path, **files: Any) -> Path:
    folder.mkdir()
    for name, data in {"model.safetensors": TENSORS, **files}.items():
        if isinstance(data, bytes):
            (folder / name).write_bytes(data)
        elif data is not None:
            save_file(data, folder / name)
    return folder
