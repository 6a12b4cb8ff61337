"""The tensors in a file that somebody else wrote, whatever its kind; nothing in it is run, and little of it copied."""

import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import repeat
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoint.files.torch_pickles import (
    MAX_SIZE_RATIO,
    SIZE_ALLOWANCE,
    StorageLocation,
    StorageReader,
    TensorLocation,
    TorchPickleReader,
    UnsupportedTensor,
)
from vitrail.checkpoint.files.zip_archives import (
    check_zip_directory,
    check_zip_entries,
    read_into_memory,
    read_into_memory_at,
    read_npz_arrays,
    read_zip_entry,
)
from vitrail.errors import CheckpointError, describe_error
from vitrail.files import WEIGHTS_FILE_SUFFIXES, open_regular_file, read_text
from vitrail.json_yaml import parse_json
from vitrail.machine import count_cores
from vitrail.pickle_reader import MAX_PICKLE_BYTES, BoundedStream, ForbiddenGlobalError, PickleError

CONFIG_FILE, PREPROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # as hubs name them
WEIGHT_SUFFIXES = (*WEIGHTS_FILE_SUFFIXES, ".th")
WRAPPER_KEYS = ("teacher", "state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")
MAX_JSON_BYTES = 2**22  # bytes; also of the header of a safetensors file
MAX_TENSORS = 2**14  # in one file
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save's format until 1.6
SAFETENSORS_DTYPES = {  # as safetensors calls them
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
OTHER_FILE_SIGNATURES = {  # first bytes of what people also try
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"version https://git-lfs": "the pointer of a Git LFS file (get the file itself: git lfs pull)",
    b"\x93NUMPY": "a single NumPy array",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page (was it a failed download?)",
}
DAMAGE_ERRORS = (
    SafetensorError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, SyntaxError,
    ArithmeticError, MemoryError, AssertionError, TokenError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RawContents:
    """The tensors by the names they have in the file, and what stands beside them."""

    path: Path  # as it was given
    kind: Literal["safetensors", "pickle", "npz"]
    tensors: dict[str, Tensor]
    wrapper: str = ""  # the key that a pickle keeps them under
    other_keys: tuple[str, ...] = ()  # what else a pickle holds
    header: Mapping[str, str] = field(default_factory=dict[str, str])  # of a safetensors file
    config: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] | None = None


def read_raw_contents(path: Path) -> RawContents:
    """A file, or a folder as hubs keep it: weights in one file or several, config.json, preprocessor_config.json."""
    with report_damaged_file(path):
        if path.is_dir():
            files, folder = find_weight_files(path), path
        elif path.is_file():
            files, folder = [path], path.parent if path.name in WEIGHT_FILES else None
        elif path.exists():
            raise CheckpointError(f"{path} is neither a file nor a folder; expected a checkpoint")
        else:
            raise CheckpointError(f"{path} does not exist; expected a checkpoint file or folder")
    parts = read_shards(files)
    beside = (
        {} if folder is None else {name: read_json_object(folder / name) for name in (CONFIG_FILE, PREPROCESSOR_FILE)}
    )
    return RawContents(
        path=path,
        kind=parts[0].kind,
        tensors={name: tensor for part in parts for name, tensor in part.tensors.items()},
        wrapper=parts[0].wrapper,
        other_keys=parts[0].other_keys,
        header=parts[0].header,
        config=beside.get(CONFIG_FILE),
        preprocessor=beside.get(PREPROCESSOR_FILE),
    )


def read_shards(files: list[Path]) -> list[RawContents]:
    """The files of one model. A tensor in two of them is ambiguous, and links to one file would fill the memory."""
    parts, owners = list[RawContents](), dict[str, Path]()
    for path in files:
        part = read_weight_file(path)
        twice = next((name for name in part.tensors if name in owners), None)
        if twice is not None:
            raise CheckpointError(f"{owners[twice]} and {path} both hold {twice}; expected each tensor in one file")
        owners |= dict.fromkeys(part.tensors, path)
        parts.append(part)
    return parts


def find_weight_files(folder: Path) -> list[Path]:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = read_json_object(folder / f"{name}.index.json")
        if index is not None:
            shards = index.get("weight_map")
            if not isinstance(shards, dict) or not shards or not all(isinstance(each, str) for each in shards.values()):
                raise CheckpointError(f"{folder / name}.index.json has no weight_map; expected names and their files")
            if any(Path(each).name != each for each in shards.values()):
                raise CheckpointError(f"{folder / name}.index.json names files outside its folder")
            return [folder / each for each in sorted(set(shards.values()))]
    found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if len(found) == 1:
        return found
    names = ", ".join(path.name for path in found[:5]) or "none"
    raise CheckpointError(f"{folder} has {len(found)} files of weights ({names}); expected model.safetensors, or one")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a small file; None if the file does not exist."""
    try:
        data = parse_json(read_text(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a broken link; expected a JSON object") from None
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {describe_error(error)}; expected a JSON object") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object")
    return data


def read_weight_file(path: Path) -> RawContents:
    """One file, known by its first bytes and not by its name."""
    with report_damaged_file(path):
        if not path.is_file():  # opening a pipe would wait for somebody to write to it
            raise CheckpointError(f"{path} is missing, or no file; expected weights")
        with os.fdopen(open_regular_file(path), "rb") as file:
            start, size = file.read(32), os.fstat(file.fileno()).st_size
            if start[:2] == b"PK":
                return read_zip_file(path, file, size)
            if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
                return read_safetensors(path, file, size)
            if start[:1] == b"\x80":
                return read_legacy_torch_file(path, file, size)
    found = next((what for first, what in OTHER_FILE_SIGNATURES.items() if start.startswith(first)), "of no known kind")
    if size == 0:
        found = "empty"
    raise CheckpointError(f"{path} is {found}; expected .safetensors, a .pth or .bin by torch.save, or .npz")


def read_safetensors(path: Path, file: IO[bytes], size: int) -> RawContents:
    """Copies each tensor into memory, never mapped: later changes to the file do not affect them."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, MAX_JSON_BYTES))
    if length > MAX_JSON_BYTES or text.count(b"{") > MAX_TENSORS or text.count(b",") > 16 * MAX_TENSORS:
        raise CheckpointError(f"{path} has a header of {length} bytes, with too many tensors; expected weights")
    with safe_open(path, "pt"):  # refuses a malformed header
        header: dict[str, Any] = json.loads(text)
    metadata, tensors = header.pop("__metadata__", None) or {}, dict[str, Tensor]()
    places = list[int]()
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
        places.append(8 + length + start)
    memories = [tensor.flatten().view(torch.uint8).numpy().data for tensor in tensors.values()]
    with ThreadPoolExecutor(min(4, count_cores())) as pool:  # half of the time goes into fresh pages of memory
        list(pool.map(read_into_memory_at, repeat(file.fileno()), places, memories))
    return RawContents(path=path, kind="safetensors", tensors=dict(sorted(tensors.items())), header=metadata)


def read_zip_file(path: Path, file: IO[bytes], size: int) -> RawContents:
    check_zip_directory(path, file, size)
    with zipfile.ZipFile(file) as archive:
        check_zip_entries(path, file, size, archive)
        entries = {entry.filename: entry for entry in archive.infolist()}
        if any(name.endswith(".npy") for name in entries):
            return RawContents(path=path, kind="npz", tensors=read_npz_arrays(path, file, archive))
        folder = next(iter(entries), "").split("/")[0]  # as torch does
        pickled = entries.get(f"{folder}/data.pkl")
        if pickled is None:
            raise CheckpointError(f"{path} is a zip file without tensors; expected what torch.save or np.savez wrote")
        if pickled.file_size > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{path} has a pickle of {pickled.file_size} bytes next to its tensors")

        def entry_of(key: str) -> zipfile.ZipInfo:
            if f"{folder}/data/{key}" not in entries:
                raise PickleError(f"lacks the values of storage {key}")
            return entries[f"{folder}/data/{key}"]

        def read(key: str, memory: memoryview) -> None:
            read_zip_entry(file, archive, entry_of(key), memory)

        described = TorchPickleReader(size, lambda key: entry_of(key).file_size)
        data = described.evaluate(BytesIO(archive.read(pickled)))
        order = archive.read(f"{folder}/byteorder").decode() if f"{folder}/byteorder" in entries else "little"
        if order not in ("little", "big"):
            raise PickleError(f"has an unknown byte order {order!r}")
        return read_pickled_tensors(path, data, size, StorageReader(described.storages, read, order))


def read_legacy_torch_file(path: Path, file: IO[bytes], size: int) -> RawContents:
    """What torch.save wrote until 1.6: five pickles, the first of them a magic number, and then the numbers."""
    file.seek(0)
    described = TorchPickleReader(size, lambda _: size)
    stream = BoundedStream(file)
    magic = described.evaluate(stream)
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise CheckpointError(f"{path} is a plain pickle; refused: expected what torch.save wrote")
    version, _machine, data, keys = (described.evaluate(stream) for _ in range(4))
    if type(version) is not int or version != LEGACY_VERSION or not isinstance(keys, list):
        raise PickleError("has an unknown version of torch.save's format")
    places = find_legacy_offsets(file, described.storages, keys, size)

    def read(key: str, memory: memoryview) -> None:
        read_into_memory(file, places[key], memory)

    return read_pickled_tensors(path, data, size, StorageReader(described.storages, read, "little"))


def find_legacy_offsets(
    file: IO[bytes], storages: Mapping[str, StorageLocation], keys: list[Any], size: int
) -> dict[str, int]:
    """Offset of the values of each storage: one after the other, each preceded by its count."""
    places = dict[str, int]()
    for key in keys:
        if type(key) is not str or key not in storages or key in places:
            raise PickleError("has values of a storage that it does not describe")
        count, place = int.from_bytes(file.read(8), "little"), file.tell()
        if count != storages[key].count or place + storages[key].size > size:
            raise PickleError("describes more values than it holds")
        places[key] = place
        file.seek(place + storages[key].size)
    if len(places) < len(storages):
        raise PickleError("describes more values than it holds")
    return places


def read_pickled_tensors(path: Path, data: Any, size: int, reader: StorageReader) -> RawContents:
    """The weights that a pickle describes; other tensors next to them, such as the optimizer state, are not read."""
    if not isinstance(data, dict):
        kind = "Tensor" if isinstance(data, TensorLocation | UnsupportedTensor) else type(data).__name__
        raise CheckpointError(f"{path} holds a {kind}; expected a dict of names and tensors")
    wrapper = find_wrapper_key(data)
    inside = data[wrapper] if wrapper else data
    odd = [name for name, each in inside.items() if isinstance(each, UnsupportedTensor)]
    places = {name: each for name, each in inside.items() if isinstance(each, TensorLocation)}
    if not all(isinstance(name, str) for name in (*odd, *places)):
        raise CheckpointError(f"{path} has tensors under keys that are not strings; expected names")
    if odd:
        raise CheckpointError(f"{path}: {odd[0]} is sparse, quantised or without values; expected plain tensors")
    if (
        sum(each.size for each in places.values()) > MAX_SIZE_RATIO * size + SIZE_ALLOWANCE
    ):  # one tensor under many names
        raise CheckpointError(f"{path} describes more values than it holds; expected weights")
    others = tuple(str(key) for key in data if key != wrapper) if wrapper else ()
    tensors = unshare_storages({name: reader.read_tensor(each) for name, each in places.items()})
    return RawContents(path=path, kind="pickle", tensors=tensors, wrapper=wrapper, other_keys=others)


def find_wrapper_key(data: Mapping[Any, Any]) -> str:
    """The key that the tensors lie under: of two the average over training; a teacher only beside its student."""
    holding = [key for key in WRAPPER_KEYS if isinstance(data.get(key), dict) and contains_tensor(data[key])]
    return next((key for key in holding if key != "teacher" or "student" in data), "")


def contains_tensor(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(each, TensorLocation | UnsupportedTensor) for each in values.values())


def unshare_storages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: two that share it would be trained as one."""
    seen, own = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen or not tensor.is_contiguous() else tensor
        seen.add(place)
    return own


@contextmanager
def report_damaged_file(path: Path) -> Generator[None]:
    """Whatever a damaged file makes the libraries raise is one line; one that wants to run code is refused by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes, old protocols: what matters of them is raised too
            yield
    except CheckpointError:
        raise
    except ForbiddenGlobalError as error:
        raise CheckpointError(
            f"{path} {error}; refused: expected tensors only, such as torch.save(model.state_dict(), path) writes"
        ) from None
    except PickleError as error:
        raise CheckpointError(f"{path} {error}; expected weights") from None
    except DAMAGE_ERRORS as error:
        raise CheckpointError(
            f"{path} cannot be read: {describe_error(error)}; it may be truncated or damaged"
        ) from None
