"""Zip files, as torch.save and np.savez write them: checked for what they would unpack to before anything is unpacked.

torch reads them with a reader of its own. What is checked here is checked so that both readers see the same: no
comment, no gap before the directory, no two entries of one name or in one place.
"""

import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import CheckpointError

MAX_UNPACK_RATIO = 2  # no file unpacks to more than so many times its size
MAX_DIRECTORY_BYTES = 2**20  # bytes, and one for so many of the file; a hundred for an entry, which becomes a thousand
FILE_BYTES_PER_DIRECTORY_BYTE = 64
MAX_READ_BYTES = 2**30  # bytes read at once; some systems refuse more than 2 GB
END_SIGNATURE, LOCATOR_SIGNATURE, END64_SIGNATURE = (
    b"PK\x05\x06",
    b"PK\x06\x07",
    b"PK\x06\x06",
)  # the last 22 bytes; 20 and 56 before them, or not


def check_zip_directory(path: Path, file: IO[bytes], size: int) -> None:
    """The directory of entries lies right before the end, and is not so long that reading it would take memory."""
    file.seek(max(size - 98, 0))
    tail = file.read().rjust(98, b"\0")
    if tail[-22:-18] != END_SIGNATURE or tail[-2:] != b"\0\0":
        raise CheckpointError(f"{path} is a zip file without its end; it may be truncated")
    length, start = struct.unpack("<2L", tail[-10:-2])
    end = size - 22
    if tail[-42:-38] == LOCATOR_SIGNATURE:
        end = size - 98
        length, start = struct.unpack("<2Q", tail[40:56])
        if tail[:4] != END64_SIGNATURE or struct.unpack("<Q", tail[-34:-26]) != (end,):
            raise CheckpointError(f"{path} is a zip file whose end does not fit together; it may be damaged")
    if start + length != end:
        raise CheckpointError(f"{path} is a zip file whose directory is not where it says; it may be damaged")
    if length > MAX_DIRECTORY_BYTES + size // FILE_BYTES_PER_DIRECTORY_BYTE:
        raise CheckpointError(f"{path} is a zip file with a directory of {length} bytes; expected weights")


def check_zip_entries(path: Path, file: IO[bytes], size: int, archive: zipfile.ZipFile) -> None:
    """Entries that are plain, apart, and together hardly larger than the file."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    if len({entry.filename.lower() for entry in entries}) < len(entries):  # torch does not tell a from A
        raise CheckpointError(f"{path} has two parts of one name; expected what torch.save or np.savez wrote")
    limits = [*(entry.header_offset for entry in entries[1:]), archive.start_dir]
    for entry, limit in zip(entries, limits, strict=False):
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
            raise CheckpointError(f"{path}: {entry.filename} is packed in a way that neither torch nor NumPy uses")
        if find_entry_offset(file, entry) + entry.compress_size > limit:
            raise CheckpointError(f"{path}: {entry.filename} reaches into the next part; it may be damaged")
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise CheckpointError(f"{path}: {entry.filename} says two sizes; it may be damaged")
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MAX_UNPACK_RATIO * size + 4096:
        raise CheckpointError(
            f"{path} of {size} bytes would unpack to {unpacked}; expected weights, which hardly shrink"
        )


def find_entry_offset(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Offset of an entry's bytes: after its header, name and extra fields."""
    file.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<2H", file.read(4))
    return entry.header_offset + 30 + name + extra


def read_zip_entry(file: IO[bytes], archive: zipfile.ZipFile, entry: zipfile.ZipInfo, memory: memoryview) -> None:
    """Fills memory with the first bytes of an entry; an uncompressed entry is read without a copy."""
    if entry.compress_type == zipfile.ZIP_STORED:
        read_into_memory(file, find_entry_offset(file, entry), memory)
    else:
        with archive.open(entry) as stream:
            read_into_memory(stream, 0, memory)


def read_into_memory(file: IO[bytes], start: int, memory: memoryview) -> None:
    """Fills memory with the bytes of a file, starting at `start`."""
    file.seek(start)
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done : done + MAX_READ_BYTES])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise EOFError(f"{len(memory) - done} bytes are missing at the end")
        done += count


def read_into_memory_at(descriptor: int, start: int, memory: memoryview) -> None:
    """As `read_into`, without moving the position in the file: several threads may read at the same time."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done : done + MAX_READ_BYTES]], start + done)
        if not count:
            raise EOFError(f"{len(memory) - done} bytes are missing at the end")
        done += count


def read_npz_arrays(path: Path, file: IO[bytes], archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """The arrays of numbers; each header is checked against the bytes that are there before anything is made for it."""
    kinds: dict[str, np.dtype[Any]] = {}
    for info in archive.infolist():
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](stream)
            if dtype.hasobject:
                raise CheckpointError(f"{path} holds pickled objects ({info.filename}), which could run code; refused")
            count = 1
            for length in shape:
                count *= length
            if min(shape, default=0) < 0 or count * dtype.itemsize != info.file_size - stream.tell():
                raise CheckpointError(
                    f"{path}: {info.filename} says {shape}, which is not its size; it may be truncated"
                )
        kinds[info.filename.removesuffix(".npy")] = dtype
    numbers = [name for name, kind in kinds.items() if kind.kind in "fiub" or is_bfloat16(kind)]
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {name: tensor_from_array(arrays[name]) for name in numbers}


def is_bfloat16(kind: np.dtype[Any]) -> bool:
    return kind.kind == "V" and kind.itemsize == 2 and kind.names is None  # NumPy has no name for it


def tensor_from_array(array: Any) -> Tensor:
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
