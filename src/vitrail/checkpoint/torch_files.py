"""Read files of torch.save and zip files of np.savez: everything that they describe is checked before it is read.

torch.load(weights_only=True) runs no code, but a file of a few hundred bytes can make it allocate any amount of memory
(bytearray) or hash a nested tuple for hours, and it reads neither protocol 4 nor the arguments of a script. So the
pickle is evaluated with stand-ins for the few names that plain checkpoints need. A tensor becomes a location in a
storage that lies within the file.

torch has a zip reader of its own. The checks of a zip file make sure that any reader sees the same entries: no comment,
no gap before the directory, no two entries with the same name or overlapping bytes.
"""

import os
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.base.pickle_reader import (
    MAX_PICKLE_BYTES,
    AllowedCall,
    BoundedStream,
    OpaqueGlobal,
    OpaqueValue,
    PickleError,
    StepBudget,
    evaluate_pickle,
    replace_unsafe_key,
)

WRAPPER_KEYS = ("teacher", "state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # format of torch.save until 1.6
MAX_DIMENSIONS = 16
MAX_SIZE_RATIO, SIZE_ALLOWANCE = 4, 2**26  # all tensors together: 4 times the file plus 64 MB
ALLOWED_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
STORAGE_DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "QInt8": torch.qint8, "QInt32": torch.qint32,
    "QUInt8": torch.quint8, "QUInt4x2": torch.quint4x2, "QUInt2x4": torch.quint2x4,
}  # fmt: skip
QUANTIZATION_SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
IGNORED_CALLS = (
    *("torch.device", "torch.serialization._get_layout", "builtins.set", "__builtin__.set", "builtins.complex"),
    "__builtin__.complex",
)
UNSUPPORTED_REBUILDS = ("qtensor", "sparse_tensor", "nested_tensor", "meta_tensor_no_storage", "wrapper_subclass")


class StorageTypeStandIn(OpaqueGlobal):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


class TensorRebuild(AllowedCall):
    """A function that makes a tensor."""


class UnsupportedTensor(OpaqueValue):
    """A tensor that is sparse, quantized, nested, without values or of a subclass."""


class OrderedDictStandIn(dict[Any, Any]):
    """Stand-in for an OrderedDict; its attributes, such as the versions of modules, are not needed."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


class NamespaceStandIn(OpaqueValue):
    """Stand-in for the parsed arguments of a script."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


@dataclass(frozen=True, eq=False)
class StorageLocation:
    """`count` values of one dtype, stored in the file under `key`; a view starts at value `start`."""

    key: str
    dtype: torch.dtype
    count: int
    start: int = 0

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TensorLocation:
    """A tensor as the pickle describes it: a shape and strides within a storage."""

    storage: StorageLocation
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


TorchContents = dict[str, Any]  # `tensors` of a file, `wrapper`, the key under which they were, `other_keys`


def read_torch_zip(
    path: Path, file: IO[bytes], size: int, archive: zipfile.ZipFile, parts: tuple[str, ...]
) -> TorchContents:
    """Read a zip file of torch.save, whose entries are checked already."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    folder = next(iter(entries), "").split("/")[0]  # torch does the same
    pickled = entries.get(f"{folder}/data.pkl")
    if pickled is None:
        raise CheckpointError(
            f"{path} is a zip file without tensors; expected a file written by torch.save or np.savez"
        )
    if pickled.file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path} has a pickle of {pickled.file_size} bytes; expected at most {MAX_PICKLE_BYTES}")

    def find_entry(key: str) -> zipfile.ZipInfo:
        if f"{folder}/data/{key}" not in entries:
            raise PickleError(f"has no values for storage {key}")
        return entries[f"{folder}/data/{key}"]

    reader = TorchPickleReader(size, lambda key: find_entry(key).file_size)
    data = reader.evaluate(BytesIO(archive.read(pickled)))
    order = archive.read(f"{folder}/byteorder").decode() if f"{folder}/byteorder" in entries else "little"
    if order not in ("little", "big"):
        raise PickleError(f"has an unknown byte order {order!r}")
    return reader.read_tensors(
        path, data, parts, lambda key, memory: read_zip_entry(file, archive, find_entry(key), memory), order
    )


def read_legacy_torch_file(path: Path, file: IO[bytes], size: int, parts: tuple[str, ...]) -> TorchContents:
    """Read the format of torch.save until 1.6: five pickles, the first a magic number, then the values."""
    file.seek(0)
    reader, stream = TorchPickleReader(size, lambda _: size), BoundedStream(file)
    magic = reader.evaluate(stream)
    if type(magic) is not int or magic != LEGACY_MAGIC:
        raise CheckpointError(f"{path} is a plain pickle; refused: expected a file written by torch.save")
    version, _machine, data, keys = (reader.evaluate(stream) for _ in range(4))
    if type(version) is not int or version != LEGACY_VERSION or not isinstance(keys, list):
        raise PickleError("has an unknown version of the format of torch.save")
    offsets = dict[str, int]()  # storages follow each other, each preceded by its count
    for key in keys:
        if type(key) is not str or key not in reader.storages or key in offsets:
            raise PickleError("has values of a storage that it does not describe")
        storage, count = reader.storages[key], int.from_bytes(file.read(8), "little")
        offsets[key] = file.tell()
        if count != storage.count or offsets[key] + storage.size > size:
            raise PickleError("describes more values than it holds")
        file.seek(storage.size, 1)
    if len(offsets) < len(reader.storages):
        raise PickleError("describes more values than it holds")
    return reader.read_tensors(
        path, data, parts, lambda key, memory: fill_memory(file.fileno(), offsets[key], memory), "little"
    )


class TorchPickleReader:
    """Collects the storages and tensors that the pickles in a file of `size` bytes describe, then reads those needed.

    `stored_bytes(key)` is the number of bytes that the file has for a storage.
    """

    def __init__(self, size: int, stored_bytes: Callable[[str], int]) -> None:
        self.stored_bytes = stored_bytes
        self.budget = StepBudget(size)
        self.storages = dict[str, StorageLocation]()
        self.max_bytes = self.bytes_left = MAX_SIZE_RATIO * size + SIZE_ALLOWANCE

    def evaluate(self, stream: Any) -> Any:
        return evaluate_pickle(
            stream, self.allowed_names(), self.budget, load_persistent=self.locate_storage, encoding="utf-8"
        )

    def allowed_names(self) -> Mapping[str, object]:
        """Stand-ins for the names that plain checkpoints need; any other name is refused."""
        rebuilds: dict[str, Callable[..., Any]] = {
            "_utils._rebuild_tensor": self.locate_tensor,
            "_utils._rebuild_tensor_v2": lambda *given: self.locate_tensor(*given[:4]),
            "_utils._rebuild_tensor_v3": self.locate_tensor_v3,
            "_utils._rebuild_parameter": unwrap_parameter,
            "_utils._rebuild_parameter_with_state": unwrap_parameter,
            "nn.parameter.Parameter": unwrap_parameter,
            **{f"_utils._rebuild_{name}": lambda *_: UnsupportedTensor() for name in UNSUPPORTED_REBUILDS},
        }
        calls: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": self.make_ordered_dict,
            "collections.Counter": lambda *_: OrderedDictStandIn(),
            "argparse.Namespace": NamespaceStandIn,
            "torch.Size": make_torch_size,
            "torch._tensor._rebuild_from_type_v2": self.locate_typed_tensor,
            **{name: lambda *_: OpaqueValue() for name in IGNORED_CALLS},
        }
        storages = {
            **{f"torch.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
            **{f"torch.cuda.{kind}Storage": dtype for kind, dtype in STORAGE_DTYPES.items()},
            "torch.storage.UntypedStorage": torch.uint8,
        }
        return {
            **{f"torch.{name}": TensorRebuild(function) for name, function in rebuilds.items()},
            **{name: AllowedCall(function) for name, function in calls.items()},
            # older versions of torch lack some dtypes
            **{f"torch.{name}": getattr(torch, name) for name in ALLOWED_DTYPES if hasattr(torch, name)},
            **{f"torch.{name}": OpaqueValue() for name in QUANTIZATION_SCHEMES},
            **{name: StorageTypeStandIn(name, dtype) for name, dtype in storages.items()},
            "torch.Tensor": OpaqueGlobal("torch.Tensor"),
        }

    def make_ordered_dict(self, pairs: Any = ()) -> OrderedDictStandIn:
        """Make a dict; Python 2 wrote the entries of an OrderedDict as a list of pairs."""
        if not isinstance(pairs, list | tuple):
            raise PickleError(f"makes an OrderedDict of a {type(pairs).__name__}")
        self.budget.spend(len(pairs))
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise PickleError("makes an OrderedDict of something other than pairs")
        return OrderedDictStandIn({replace_unsafe_key(key): value for key, value in pairs})

    def locate_storage(self, identifier: Any) -> StorageLocation:
        """Locate the storage ("storage", type, key, device, number of values); old files append a view."""
        if not isinstance(identifier, tuple) or len(identifier) not in (5, 6):
            raise PickleError("refers to something that is not a storage")
        tag, kind, key, _, count, *rest = identifier
        if type(tag) is not str or tag != "storage" or type(key) is not str or not isinstance(kind, StorageTypeStandIn):
            raise PickleError("refers to something that is not a storage")
        if not is_count(count) or count * kind.dtype.itemsize > self.stored_bytes(key):
            raise PickleError("describes more values than it holds")
        stored = self.storages.setdefault(key, StorageLocation(key, kind.dtype, count))
        if (stored.dtype, stored.count) != (kind.dtype, count):
            raise PickleError(f"describes storage {key} in two different ways")
        view = rest[0] if rest else None
        if view is None:
            return stored
        if not isinstance(view, tuple) or len(view) != 3 or not is_count(view[1]) or not is_count(view[2]):
            raise PickleError("refers to an invalid view of a storage")
        if view[1] + view[2] > count:
            raise PickleError("describes more values than it holds")
        return StorageLocation(key, kind.dtype, view[2], view[1])

    def locate_tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None
    ) -> Any:
        if not isinstance(storage, StorageLocation):
            raise PickleError("describes a tensor without a storage")
        if str(storage.dtype).removeprefix("torch.") not in ALLOWED_DTYPES:
            return UnsupportedTensor()
        if not is_count(offset) or not is_shape(shape) or not is_shape(stride) or len(shape) != len(stride):
            raise PickleError("describes a tensor without a shape")
        location = TensorLocation(storage, dtype or storage.dtype, offset, shape, stride)
        last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if prod(shape) else -1
        if (offset + last + 1) * location.dtype.itemsize > storage.size:
            raise PickleError("describes more values than it holds")
        self.bytes_left -= location.size
        if self.bytes_left < 0:
            raise PickleError(f"describes more values than it holds: tensors of more than {self.max_bytes} bytes")
        return location

    def locate_tensor_v3(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _gradient: Any, _hooks: Any, dtype: Any, *_: Any
    ) -> Any:
        if not isinstance(dtype, torch.dtype):
            raise PickleError("describes a tensor without a dtype")
        return self.locate_tensor(storage, offset, shape, stride, dtype)

    def locate_typed_tensor(self, rebuild: Any, kind: Any, arguments: Any, _state: Any) -> Any:
        """Locate a tensor with attributes; a subclass of Tensor is unsupported."""
        if not isinstance(rebuild, TensorRebuild) or type(arguments) is not tuple:
            raise PickleError("describes a tensor without a function that rebuilds it")
        self.budget.spend(len(arguments))
        location = rebuild.function(*arguments)
        return location if isinstance(kind, OpaqueGlobal | AllowedCall) else UnsupportedTensor()

    def read_tensors(
        self,
        path: Path,
        data: Any,
        parts: tuple[str, ...],
        read_bytes: Callable[[str, memoryview], None],
        byte_order: str,
    ) -> TorchContents:
        """Read the weights that a pickle describes, but not its other tensors, such as the optimizer state.

        `read_bytes(key, memory)` fills memory with the storage `key`.
        """
        if not isinstance(data, dict):
            kind = "Tensor" if isinstance(data, TensorLocation | UnsupportedTensor) else type(data).__name__
            raise CheckpointError(f"{path} contains a {kind}; expected a dict that maps names to tensors")
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
            raise CheckpointError(
                f"{path}: {unsupported[0]} is sparse, quantized or has no values; expected plain tensors"
            )
        if sum(each.size for each in locations.values()) > self.max_bytes:  # one tensor under many names
            raise CheckpointError(f"{path} describes more values than it holds; expected weights")
        loaded = dict[str, Any]()
        for key in dict.fromkeys(each.storage.key for each in locations.values()):
            memory = torch.empty(self.storages[key].size, dtype=torch.uint8)
            read_bytes(key, memory.numpy().data)
            loaded[key] = memory.untyped_storage()
            if byte_order != sys.byteorder:
                loaded[key].byteswap(self.storages[key].dtype)
        tensors = unshare_storages({name: make_tensor(each, loaded) for name, each in locations.items()})
        others = tuple(str(key) for key in data if key != wrapper) if wrapper else ()
        return {"tensors": tensors, "wrapper": wrapper, "other_keys": others}


def find_state_dict_key(data: Mapping[Any, Any]) -> str:
    """Key of the tensors. Averaged weights are preferred; "teacher" counts only together with "student"."""
    kinds = TensorLocation | UnsupportedTensor
    keys = [key for key in WRAPPER_KEYS if isinstance(data.get(key), dict) and (key != "teacher" or "student" in data)]
    return next((key for key in keys if any(isinstance(each, kinds) for each in data[key].values())), "")


def make_tensor(location: TensorLocation, loaded: Mapping[str, Any]) -> Tensor:
    start = location.storage.start * location.storage.dtype.itemsize // location.dtype.itemsize
    tensor = torch.empty(0, dtype=location.dtype)
    return tensor.set_(loaded[location.storage.key], start + location.offset, location.shape, location.stride)


def unshare_storages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give each tensor its own memory: two that share it would be trained as one."""
    seen, unshared = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if address in seen or not tensor.is_contiguous() else tensor
        seen.add(address)
    return unshared


def make_torch_size(lengths: Any = ()) -> Any:
    if not is_shape(lengths):
        raise PickleError("makes a torch.Size of something that is not a shape")
    return lengths


def unwrap_parameter(data: Any, *_: Any) -> Any:
    return data if isinstance(data, TensorLocation) else UnsupportedTensor()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(is_count(each) for each in value)


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
                    "convert quantized weights with the library that wrote them"
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
