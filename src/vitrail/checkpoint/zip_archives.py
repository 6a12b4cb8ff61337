"""Check zip files of torch.save and np.savez before anything is unpacked, then read their entries.

torch has a zip reader of its own. The checks make sure that any reader sees the same entries: no comment, no gap
before the directory, no two entries with the same name or overlapping bytes.
"""

import os
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError

MAX_UNPACK_RATIO = 2  # unpacked size relative to the size of the file
MAX_DIRECTORY_BYTES = 2**20  # plus one per FILE_BYTES_PER_DIRECTORY_BYTE; an entry of 100 bytes takes 1000 in memory
FILE_BYTES_PER_DIRECTORY_BYTE = 64
MAX_READ_BYTES = 2**30  # read at once; some systems refuse more than 2 GB
END_SIGNATURE = b"PK\x05\x06"  # starts the last 22 bytes
LOCATOR_SIGNATURE, END64_SIGNATURE = b"PK\x06\x07", b"PK\x06\x06"  # zip64 only: 20 and 56 bytes before these


def check_zip_directory(path: Path, file: IO[bytes], size: int) -> None:
    """Check that the directory of entries ends where the end record starts, and is small enough to be read."""
    file.seek(max(size - 98, 0))
    tail = file.read().rjust(98, b"\0")
    if tail[-22:-18] != END_SIGNATURE or tail[-2:] != b"\0\0":
        raise CheckpointError(f"{path} is a zip file without its end record; it may be truncated")
    length, start = struct.unpack("<2L", tail[-10:-2])
    end = size - 22
    if tail[-42:-38] == LOCATOR_SIGNATURE:
        end = size - 98
        length, start = struct.unpack("<2Q", tail[40:56])
        if tail[:4] != END64_SIGNATURE or struct.unpack("<Q", tail[-34:-26]) != (end,):
            raise CheckpointError(f"{path} is a zip file with an inconsistent end record; it may be damaged")
    if start + length != end:
        raise CheckpointError(
            f"{path} is a zip file whose directory is not where the end record says; it may be damaged"
        )
    if length > MAX_DIRECTORY_BYTES + size // FILE_BYTES_PER_DIRECTORY_BYTE:
        raise CheckpointError(f"{path} is a zip file with a directory of {length} bytes; expected weights")


def check_zip_entries(path: Path, file: IO[bytes], size: int, archive: zipfile.ZipFile) -> None:
    """Check that entries are not encrypted, do not overlap, and unpack to hardly more than the size of the file."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    if len({entry.filename.lower() for entry in entries}) < len(entries):  # torch ignores case
        raise CheckpointError(
            f"{path} has two entries of the same name; expected a file written by torch.save or np.savez"
        )
    limits = [*(entry.header_offset for entry in entries[1:]), archive.start_dir]
    for entry, limit in zip(entries, limits, strict=False):
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            raise CheckpointError(f"{path}: {entry.filename} has a compression that neither torch nor NumPy uses")
        if find_entry_offset(file, entry) + entry.compress_size > limit:
            raise CheckpointError(f"{path}: {entry.filename} overlaps the next entry; it may be damaged")
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise CheckpointError(f"{path}: {entry.filename} has two different sizes; it may be damaged")
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MAX_UNPACK_RATIO * size + 4096:
        raise CheckpointError(
            f"{path} has {size} bytes and would unpack to {unpacked}; expected weights, which hardly compress"
        )


def find_entry_offset(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Offset of the bytes of an entry, after its header, name and extra fields."""
    file.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<2H", file.read(4))
    return entry.header_offset + 30 + name + extra


def read_zip_entry(file: IO[bytes], archive: zipfile.ZipFile, entry: zipfile.ZipInfo, memory: memoryview) -> None:
    """Fill `memory` with the first bytes of an entry; an uncompressed entry is read without a copy."""
    if entry.compress_type == zipfile.ZIP_STORED:
        fill_memory(file.fileno(), find_entry_offset(file, entry), memory)
    else:
        memory[:] = archive.read(entry)[: len(memory)]


def fill_memory(descriptor: int, start: int, memory: memoryview) -> None:
    """Fill `memory` with the bytes of a file from offset `start`; its position stays, so several threads can read."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done : done + MAX_READ_BYTES]], start + done)
        if not count:
            raise EOFError(f"{len(memory) - done} bytes are missing at the end")
        done += count


def read_npz_arrays(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """Read the numeric arrays; each header is checked against the size of its entry before memory is allocated."""
    tensors = dict[str, Tensor]()
    for info in archive.infolist():
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = readers[version](stream)
            if dtype.hasobject:
                raise CheckpointError(
                    f"{path} contains pickled objects ({info.filename}), which could run code; refused"
                )
            if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != info.file_size - stream.tell():
                raise CheckpointError(
                    f"{path}: {info.filename} has {info.file_size} bytes, too few or too many for shape {shape}; "
                    "it may be truncated"
                )
            if is_numeric(dtype):
                stream.seek(0)
                array = np.lib.format.read_array(stream, allow_pickle=False)
                tensors[info.filename.removesuffix(".npy")] = tensor_from_array(array)
            elif dtype.kind not in "US":  # without it, the rest might be another model
                raise CheckpointError(
                    f"{path}: {info.filename} has dtype {dtype.name}; expected float32, float16, bfloat16 or float64: "
                    "convert quantised weights with the library that wrote them"
                )
    return tensors


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether torch has this dtype; text in a file is ignored."""
    return (dtype.kind in "fiub" and dtype.itemsize <= 8) or is_bfloat16(dtype)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None  # NumPy has no dtype for it


def tensor_from_array(array: Any) -> Tensor:
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
