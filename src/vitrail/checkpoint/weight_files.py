"""Read the tensors of an untrusted file of any kind, under the names they have there. No code in the file is run."""

import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import repeat
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import open_regular_file_descriptor, suggest_sibling
from vitrail.base.machine import count_cores
from vitrail.base.pickle_reader import MAX_PICKLE_BYTES, BoundedStream, ForbiddenGlobalError, PickleError
from vitrail.checkpoint.model_location import image_as_model_error
from vitrail.checkpoint.torch_files import (
    MAX_SIZE_RATIO,
    SIZE_ALLOWANCE,
    StorageLocation,
    StorageReader,
    TensorLocation,
    TorchPickleReader,
    UnsupportedTensor,
)
from vitrail.checkpoint.weight_folders import (
    CONFIG_FILE,
    MAX_JSON_BYTES,
    PREPROCESSOR_FILE,
    WEIGHT_FILES,
    find_weight_files,
    read_json_if_exists,
)
from vitrail.checkpoint.zip_archives import (
    check_zip_directory,
    check_zip_entries,
    fill_memory_at_offset,
    fill_memory_from_file,
    read_npz_arrays,
    read_zip_entry,
)
from vitrail.data.images.decoding.image_formats import detect_image_format
from vitrail.models.catalog.pretrained import PretrainedWeights

WRAPPER_KEYS = ("teacher", "state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")
MAX_TENSORS = 2**14  # in one file
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # format of torch.save until 1.6
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
OTHER_FILE_SIGNATURES = {  # first bytes of files that are opened by mistake
    b"\x89HDF": "an HDF5 file, as written by Keras",
    b"version https://git-lfs": "a Git LFS pointer (get the file itself with: git lfs pull)",
    b"\x93NUMPY": "a single NumPy array",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page (perhaps a failed download)",
}
DAMAGE_ERRORS = (
    SafetensorError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, SyntaxError,
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
        if path.is_dir():
            files, folder = find_weight_files(path), path
        elif path.is_file():
            files, folder = [path], path.parent if path.name in WEIGHT_FILES else None
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
    with wrap_damaged_file_errors(path):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing or is not a file; expected weights")
        with os.fdopen(open_regular_file_descriptor(path), "rb") as file:
            start, size = file.read(32), os.fstat(file.fileno()).st_size
            if start[:2] == b"PK":
                return read_torch_or_npz_zip(path, file, size, parts)
            if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
                return read_safetensors(path, file, size)
            if start[:1] == b"\x80":
                return read_legacy_torch_file(path, file, size, parts)
    if detect_image_format(start) is not None:
        raise image_as_model_error(path)
    kinds = (kind for signature, kind in OTHER_FILE_SIGNATURES.items() if start.startswith(signature))
    kind = next(kinds, "of an unknown kind") if size else "empty"
    raise CheckpointError(f"{path} is {kind}; expected .safetensors, .npz, or .pth or .bin written by torch.save")


def read_safetensors(path: Path, file: IO[bytes], size: int) -> RawContents:
    """Copy all tensors into memory. Nothing is mapped, so later changes to the file do not affect them."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, MAX_JSON_BYTES))
    if length > MAX_JSON_BYTES or text.count(b"{") > MAX_TENSORS or text.count(b",") > 16 * MAX_TENSORS:
        raise CheckpointError(
            f"{path} has a header of {length} bytes; expected at most {MAX_JSON_BYTES} bytes and {MAX_TENSORS} tensors"
        )
    with safe_open(path, "pt"):  # refuses a malformed header
        header: dict[str, Any] = json.loads(text)
    metadata, tensors = header.pop("__metadata__", None) or {}, dict[str, Tensor]()
    offsets = list[int]()
    for name, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        dtype, (start, end) = SAFETENSORS_DTYPES.get(entry["dtype"]), entry["data_offsets"]
        if dtype is None:
            raise CheckpointError(
                f"{path}: {name} has dtype {entry['dtype']}; expected {', '.join(SAFETENSORS_DTYPES)}"
            )
        if not 0 <= start <= end <= size - 8 - length or prod(entry["shape"]) * dtype.itemsize != end - start:
            raise CheckpointError(
                f"{path}: {name} lies outside the file, or its size does not match its shape; it may be damaged"
            )
        tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        offsets.append(8 + length + start)
    memories = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors.values()]
    with ThreadPoolExecutor(min(4, count_cores())) as pool:  # half of the time is spent on fresh memory pages
        list(pool.map(fill_memory_at_offset, repeat(file.fileno()), offsets, memories))
    return RawContents(path=path, kind="safetensors", tensors=dict(sorted(tensors.items())), header=metadata)


def read_torch_or_npz_zip(path: Path, file: IO[bytes], size: int, parts: tuple[str, ...]) -> RawContents:
    check_zip_directory(path, file, size)
    with zipfile.ZipFile(file) as archive:
        check_zip_entries(path, file, size, archive)
        entries = {entry.filename: entry for entry in archive.infolist()}
        if any(name.endswith(".npy") for name in entries):
            return RawContents(path=path, kind="npz", tensors=read_npz_arrays(path, file, archive))
        folder = next(iter(entries), "").split("/")[0]  # torch does the same
        pickled = entries.get(f"{folder}/data.pkl")
        if pickled is None:
            raise CheckpointError(
                f"{path} is a zip file without tensors; expected a file written by torch.save or np.savez"
            )
        if pickled.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{path} has a pickle of {pickled.file_size} bytes; expected at most {MAX_PICKLE_BYTES}"
            )

        def find_entry(key: str) -> zipfile.ZipInfo:
            if f"{folder}/data/{key}" not in entries:
                raise PickleError(f"has no values for storage {key}")
            return entries[f"{folder}/data/{key}"]

        def read(key: str, memory: memoryview) -> None:
            read_zip_entry(file, archive, find_entry(key), memory)

        pickles = TorchPickleReader(size, lambda key: find_entry(key).file_size)
        data = pickles.evaluate(BytesIO(archive.read(pickled)))
        order = archive.read(f"{folder}/byteorder").decode() if f"{folder}/byteorder" in entries else "little"
        if order not in ("little", "big"):
            raise PickleError(f"has an unknown byte order {order!r}")
        return read_pickled_tensors(path, data, size, StorageReader(pickles.storages, read, order), parts)


def read_legacy_torch_file(path: Path, file: IO[bytes], size: int, parts: tuple[str, ...]) -> RawContents:
    """Read the format of torch.save until 1.6: five pickles, the first a magic number, then the values."""
    file.seek(0)
    pickles = TorchPickleReader(size, lambda _: size)
    stream = BoundedStream(file)
    magic = pickles.evaluate(stream)
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise CheckpointError(f"{path} is a plain pickle; refused: expected a file written by torch.save")
    version, _machine, data, keys = (pickles.evaluate(stream) for _ in range(4))
    if type(version) is not int or version != LEGACY_VERSION or not isinstance(keys, list):
        raise PickleError("has an unknown version of the format of torch.save")
    offsets = find_legacy_offsets(file, pickles.storages, keys, size)

    def read(key: str, memory: memoryview) -> None:
        fill_memory_from_file(file, offsets[key], memory)

    return read_pickled_tensors(path, data, size, StorageReader(pickles.storages, read, "little"), parts)


def find_legacy_offsets(
    file: IO[bytes], storages: Mapping[str, StorageLocation], keys: list[Any], size: int
) -> dict[str, int]:
    """Offset of the values of each storage. Storages follow each other, each preceded by its count."""
    offsets = dict[str, int]()
    for key in keys:
        if type(key) is not str or key not in storages or key in offsets:
            raise PickleError("has values of a storage that it does not describe")
        count, offset = int.from_bytes(file.read(8), "little"), file.tell()
        if count != storages[key].count or offset + storages[key].size > size:
            raise PickleError("describes more values than it holds")
        offsets[key] = offset
        file.seek(offset + storages[key].size)
    if len(offsets) < len(storages):
        raise PickleError("describes more values than it holds")
    return offsets


def read_pickled_tensors(
    path: Path, data: Any, size: int, reader: StorageReader, parts: tuple[str, ...]
) -> RawContents:
    """Read the weights that a pickle describes, but not its other tensors, such as the optimizer state."""
    if not isinstance(data, dict):
        kind = "Tensor" if isinstance(data, TensorLocation | UnsupportedTensor) else type(data).__name__
        raise CheckpointError(f"{path} contains a {kind}; expected a dict of names and tensors")
    wrapper = find_state_dict_key(data)
    values = data[wrapper] if wrapper else data
    if wrapper == "teacher" and parts:
        named = {part: data[part] for part in parts if isinstance(data.get(part), dict)}
        values = {f"{part}.{name}": each for part, held in named.items() for name, each in held.items()}
    unsupported = [name for name, each in values.items() if isinstance(each, UnsupportedTensor)]
    locations = {name: each for name, each in values.items() if isinstance(each, TensorLocation)}
    if not all(isinstance(name, str) for name in (*unsupported, *locations)):
        raise CheckpointError(f"{path} has tensors under keys that are not strings; expected names")
    if unsupported:
        raise CheckpointError(f"{path}: {unsupported[0]} is sparse, quantised or has no values; expected plain tensors")
    total = sum(each.size for each in locations.values())  # a pickle can repeat one tensor under many names
    if total > MAX_SIZE_RATIO * size + SIZE_ALLOWANCE:
        raise CheckpointError(f"{path} describes more values than it holds; expected weights")
    other_keys = tuple(str(key) for key in data if key != wrapper) if wrapper else ()
    tensors = unshare_storages({name: reader.read_tensor(each) for name, each in locations.items()})
    return RawContents(path=path, kind="pickle", tensors=tensors, wrapper=wrapper, other_keys=other_keys)


def find_state_dict_key(data: Mapping[Any, Any]) -> str:
    """Key of the tensors. Averaged weights are preferred; "teacher" counts only together with "student"."""
    candidates = [key for key in WRAPPER_KEYS if isinstance(data.get(key), dict) and contains_tensor(data[key])]
    return next((key for key in candidates if key != "teacher" or "student" in data), "")


def contains_tensor(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(each, TensorLocation | UnsupportedTensor) for each in values.values())


def unshare_storages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor its own memory: two that share it would be trained as one."""
    seen, unshared = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if address in seen or not tensor.is_contiguous() else tensor
        seen.add(address)
    return unshared


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
