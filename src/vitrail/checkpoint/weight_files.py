"""Read the tensors of an untrusted file of any kind, under the names they have there. No code in the file is run."""

import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import suggest_sibling
from vitrail.base.json_yaml import parse_json
from vitrail.base.machine import count_cores
from vitrail.base.pickle_reader import ForbiddenGlobalError, PickleError
from vitrail.checkpoint.model_location import image_as_model_error
from vitrail.checkpoint.torch_files import (
    check_zip_directory,
    check_zip_entries,
    fill_memory,
    is_shape,
    read_legacy_torch_file,
    read_npz_arrays,
    read_torch_zip,
)
from vitrail.checkpoint.weight_folders import (
    CONFIG_FILE,
    MAX_JSON_BYTES,
    PREPROCESSOR_FILE,
    WEIGHT_FILES,
    find_weight_files,
    read_json_if_exists,
)
from vitrail.data.images.decoding.image_formats import detect_image_format
from vitrail.models.catalog.pretrained import PretrainedWeights

MAX_TENSORS = 2**14  # in one file
MAX_HEADER_VALUES = 16 * MAX_TENSORS  # of a safetensors file
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
OTHER_FILE_SIGNATURES = {  # first bytes of files that are opened by mistake
    b"\x89HDF": "an HDF5 file, as written by Keras",
    b"version https://git-lfs": "a Git LFS pointer (get the file itself with: git lfs pull)",
    b"\x93NUMPY": "a single NumPy array",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page (perhaps a failed download)",
}
DAMAGE_ERRORS = (
    OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, SyntaxError,
    ArithmeticError, MemoryError, AssertionError, TokenError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RawContents:
    """Tensors under the names they have in the file, with what the file and its folder say about them."""

    path: Path  # as given by the caller
    kind: Literal["safetensors", "pickle", "npz"]
    tensors: dict[str, Tensor]
    wrapper: str = ""  # key of the tensors in a pickle
    other_keys: tuple[str, ...] = ()  # all other keys in that pickle
    header: Mapping[str, str] = field(default_factory=dict[str, str])  # of a safetensors file
    config: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] | None = None
    weights: PretrainedWeights | None = None  # the public weights that it is known to be
    warnings: tuple[str, ...] = ()  # about where it was found


def read_raw_contents(path: Path, parts: tuple[str, ...] = ()) -> RawContents:
    """Read a file, or a folder as on a hub: weights in one or more files, config.json, preprocessor_config.json.

    Of a training run with a teacher, the teacher is read, or all `parts` by PART.NAME, for example student.norm.weight.
    """
    with wrap_damaged_file_errors(path):
        if path.is_file():
            files, folder = [path], path.parent if path.name in WEIGHT_FILES else None
        elif path.is_dir():
            files, folder = find_weight_files(path), path
        elif path.exists():
            raise CheckpointError(f"{path} is neither a file nor a folder; expected a checkpoint")
        else:
            raise CheckpointError(f"{path} does not exist; expected a checkpoint file or folder{suggest_sibling(path)}")
    shards = read_shards(files, parts)
    return replace(
        shards[0],
        path=path,
        tensors={name: tensor for shard in shards for name, tensor in shard.tensors.items()},
        config=None if folder is None else read_json_if_exists(folder / CONFIG_FILE),
        preprocessor=None if folder is None else read_json_if_exists(folder / PREPROCESSOR_FILE),
    )


def read_shards(files: list[Path], parts: tuple[str, ...] = ()) -> list[RawContents]:
    """Read the files of one model. No tensor may be in two of them: links to one file could fill the memory."""
    shards, owners = list[RawContents](), dict[str, Path]()
    for path in files:
        shard = read_weight_file(path, parts)
        duplicate = next((name for name in shard.tensors if name in owners), None)
        if duplicate is not None:
            raise CheckpointError(
                f"{owners[duplicate]} and {path} both contain {duplicate}; expected each tensor in one file"
            )
        owners |= dict.fromkeys(shard.tensors, path)
        shards.append(shard)
    return shards


def read_weight_file(path: Path, parts: tuple[str, ...] = ()) -> RawContents:
    """Read one file; its kind is detected from its first bytes, not from its name."""
    with wrap_damaged_file_errors(path), path.open("rb") as file:
        start, size = file.read(32), os.fstat(file.fileno()).st_size
        if start[:2] == b"PK":
            return read_torch_or_npz_zip(path, file, size, parts)
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
            return read_safetensors(path, file, size)
        if start[:1] == b"\x80":
            return RawContents(path=path, kind="pickle", **read_legacy_torch_file(path, file, size, parts))
    if detect_image_format(start) is not None:
        raise image_as_model_error(path)
    kinds = (kind for signature, kind in OTHER_FILE_SIGNATURES.items() if start.startswith(signature))
    kind = next(kinds, "of an unknown kind") if size else "empty"
    raise CheckpointError(f"{path} is {kind}; expected .safetensors, .npz, or .pth or .bin written by torch.save")


def read_safetensors(path: Path, file: IO[bytes], size: int) -> RawContents:
    """Copy all tensors into memory. Nothing is mapped, so later changes to the file do not affect them."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has a header of {length} bytes; expected at most {MAX_JSON_BYTES}")
    header: Any = parse_json(file.read(length).decode(), MAX_HEADER_VALUES)
    metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
    if not all(isinstance(each, str) for each in metadata.values()) or len(header) > MAX_TENSORS:
        raise CheckpointError(f"{path} has {len(header)} tensors; expected at most {MAX_TENSORS}, and metadata of text")
    tensors, offsets, position = dict[str, Tensor](), list[int](), 0
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, (start, end) = SAFETENSORS_DTYPES.get(entry["dtype"]), entry["data_offsets"]
        shape = tuple(entry["shape"])
        if dtype is None:
            raise CheckpointError(
                f"{path}: {name} has dtype {entry['dtype']}; expected {', '.join(SAFETENSORS_DTYPES)}"
            )
        fits = is_shape(shape) and prod(shape) * dtype.itemsize == end - start  # of few numbers
        if start != position or not fits or end > size - 8 - length:
            raise CheckpointError(
                f"{path}: {name} lies outside the file, or its size does not match its shape; it may be damaged"
            )
        tensors[name], position = torch.empty(shape, dtype=dtype), end
        offsets.append(8 + length + start)
    if position != size - 8 - length:
        raise CheckpointError(f"{path} has {size - 8 - length - position} bytes after its tensors; it may be damaged")
    memories = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors.values()]
    with ThreadPoolExecutor(min(4, count_cores())) as pool:  # half of the time is spent on fresh memory pages
        list(pool.map(fill_memory, repeat(file.fileno()), offsets, memories))
    return RawContents(path=path, kind="safetensors", tensors=dict(sorted(tensors.items())), header=metadata)


def read_torch_or_npz_zip(path: Path, file: IO[bytes], size: int, parts: tuple[str, ...]) -> RawContents:
    check_zip_directory(path, file, size)
    with zipfile.ZipFile(file) as archive:
        check_zip_entries(path, file, size, archive)
        if any(name.endswith(".npy") for name in archive.namelist()):
            return RawContents(path=path, kind="npz", tensors=read_npz_arrays(path, archive))
        return RawContents(path=path, kind="pickle", **read_torch_zip(path, file, size, archive, parts))


@contextmanager
def wrap_damaged_file_errors(path: Path) -> Generator[None]:
    """Turn whatever a damaged file makes the libraries raise into a one-line CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd escapes and old protocols; what matters is raised too
            yield
    except CheckpointError:
        raise
    except ForbiddenGlobalError as error:
        raise CheckpointError(
            f"{path} {error}; refused: expected tensors only, as written by torch.save(model.state_dict(), path)"
        ) from None
    except PickleError as error:
        raise CheckpointError(f"{path} {error}; expected weights") from None
    except DAMAGE_ERRORS as error:
        raise CheckpointError(
            f"{path} cannot be read: {describe_error(error)}; it may be truncated or damaged"
        ) from None
