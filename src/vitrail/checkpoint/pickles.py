"""The pickle in a file that torch.save wrote: the tensors it describes, checked before any of their values is read.

torch.load(weights_only=True) runs no code, but some functions that it allows allocate any amount of memory. So it is
not used: the pickle is evaluated with stand-ins for the few names that plain checkpoints need. A tensor is then a
place in a storage that lies within the file.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from vitrail.pickles import Budget, Call, Named, Opaque, PickleError, evaluate, safe_key

MOST_DIMENSIONS = 16
TIMES_THE_FILE, AND_BYTES = 4, 2**26  # limit on the bytes of all tensors of a file together

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt8": torch.quint8,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}
SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
UNSUPPORTED = ("qtensor", "sparse_tensor", "nested_tensor", "meta_tensor_no_storage", "wrapper_subclass")


class StorageType(Named):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


@dataclass(frozen=True, eq=False)
class Storage:
    """Values of one dtype in the file, found by `key`; a view starts at value `start`."""

    key: str
    dtype: torch.dtype
    count: int
    start: int = 0

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor as the pickle describes it: a shape and strides within a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class UnsupportedTensor(Opaque):
    """A tensor that is sparse, quantised, nested, without values or of a subclass."""


class Entries(dict[Any, Any]):
    """Stands in for an OrderedDict; its attributes, such as the versions of modules, are not needed."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


class Arguments(Opaque):
    """Stands in for the arguments of a script."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


class Descriptions:
    """The storages and tensors that the pickle of a file of `size` bytes describes.

    `stored` returns how many bytes the file has for a key.
    """

    def __init__(self, size: int, stored: Callable[[str], int]) -> None:
        self.stored = stored
        self.budget = Budget(size)
        self.storages = dict[str, Storage]()
        self.most = self.left = TIMES_THE_FILE * size + AND_BYTES

    def evaluate(self, stream: Any) -> Any:
        return evaluate(stream, self.names(), self.budget, persistent=self.storage, strings="utf-8")

    def names(self) -> Mapping[str, object]:
        """All names that a plain checkpoint needs; any other name is refused."""
        calls: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": self.entries,
            "collections.Counter": counter,
            "argparse.Namespace": Arguments,
            "torch.Size": shape_of,
            "torch.device": opaque,
            "torch.serialization._get_layout": opaque,
            "builtins.set": opaque,
            "__builtin__.set": opaque,
            "builtins.complex": opaque,
            "__builtin__.complex": opaque,
            "torch._utils._rebuild_tensor": self.tensor,
            "torch._utils._rebuild_tensor_v2": self.tensor_v2,
            "torch._utils._rebuild_tensor_v3": self.tensor_v3,
            "torch._utils._rebuild_parameter": parameter,
            "torch._utils._rebuild_parameter_with_state": parameter,
            "torch.nn.parameter.Parameter": parameter,
            "torch._tensor._rebuild_from_type_v2": self.from_type,
            **{f"torch._utils._rebuild_{name}": make_unsupported for name in UNSUPPORTED},
        }
        return {
            **{name: Call(function) for name, function in calls.items()},
            **{f"torch.{name}": getattr(torch, name) for name in DTYPES if hasattr(torch, name)},
            **{f"torch.{name}": Opaque() for name in SCHEMES},
            **{
                name: StorageType(name, dtype)
                for kind, dtype in STORAGES.items()
                for name in (f"torch.{kind}Storage", f"torch.cuda.{kind}Storage")
            },
            "torch.storage.UntypedStorage": StorageType("torch.storage.UntypedStorage", torch.uint8),
            "torch.Tensor": Named("torch.Tensor"),
        }

    def entries(self, pairs: Any = ()) -> Entries:
        """An OrderedDict; Python 2 wrote its entries as a list of pairs."""
        if not isinstance(pairs, list | tuple):
            raise PickleError(f"makes an OrderedDict of a {type(pairs).__name__}")
        self.budget.spend(len(pairs))
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise PickleError("makes an OrderedDict of something other than pairs")
        return Entries({safe_key(key): value for key, value in pairs})

    def storage(self, identifier: Any) -> Storage:
        """The storage for ("storage", type, key, device, number of values); old files add a view."""
        if not isinstance(identifier, tuple) or len(identifier) not in (5, 6):
            raise PickleError("refers to something that is not a storage")
        word, kind, key, _, count, *rest = identifier
        if type(word) is not str or word != "storage" or not isinstance(kind, StorageType) or type(key) is not str:
            raise PickleError("refers to something that is not a storage")
        if not is_count(count) or count * kind.dtype.itemsize > self.stored(key):
            raise PickleError("describes more values than it holds")
        stored = self.storages.setdefault(key, Storage(key, kind.dtype, count))
        if (stored.dtype, stored.count) != (kind.dtype, count):
            raise PickleError(f"describes storage {key} in two ways")
        view = rest[0] if rest else None
        if view is None:
            return stored
        if not isinstance(view, tuple) or len(view) != 3 or not is_count(view[1]) or not is_count(view[2]):
            raise PickleError("refers to an invalid view of a storage")
        if view[1] + view[2] > count:
            raise PickleError("describes more values than it holds")
        return Storage(key, kind.dtype, view[2], view[1])

    def tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _gradient: Any, _hooks: Any, _metadata: Any = None
    ) -> Any:
        return self.tensor(storage, offset, shape, stride)

    def tensor_v3(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        _gradient: Any,
        _hooks: Any,
        dtype: Any,
        _metadata: Any = None,
    ) -> Any:
        if not isinstance(dtype, torch.dtype):
            raise PickleError("describes a tensor without a dtype")
        return self.tensor(storage, offset, shape, stride, dtype)

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None) -> Any:
        if not isinstance(storage, Storage):
            raise PickleError("describes a tensor without a storage")
        if str(storage.dtype).removeprefix("torch.") not in DTYPES:
            return UnsupportedTensor()
        if not is_count(offset) or not is_shape(shape) or not is_shape(stride) or len(shape) != len(stride):
            raise PickleError("describes a tensor without a shape")
        dtype = dtype or storage.dtype
        place = TensorPlace(storage, dtype, offset, shape, stride)
        last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if prod(shape) else -1
        if (offset + last + 1) * dtype.itemsize > storage.size:
            raise PickleError("describes more values than it holds")
        self.left -= place.size
        if self.left < 0:
            raise PickleError(f"describes more values than it holds: tensors of more than {self.most} bytes")
        return place

    def from_type(self, rebuild: Any, kind: Any, arguments: Any, _state: Any) -> Any:
        """A tensor with attributes; a subclass of Tensor is unsupported."""
        known = (self.tensor, self.tensor_v2, self.tensor_v3, parameter, make_unsupported)
        if not isinstance(rebuild, Call) or rebuild.function not in known or not isinstance(arguments, tuple):
            raise PickleError("describes a tensor without a function that rebuilds it")
        self.budget.spend(len(arguments))
        made = rebuild.function(*arguments)
        return made if isinstance(kind, Named | Call) else UnsupportedTensor()


def counter(_entries: Any = None) -> Entries:
    return Entries()


def opaque(_value: Any = None, *_: Any) -> Opaque:
    return Opaque()


def make_unsupported(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor()


def shape_of(lengths: Any = ()) -> Any:
    if not is_shape(lengths):
        raise PickleError("makes a torch.Size of something that is not a shape")
    return lengths


def parameter(data: Any, *_: Any) -> Any:
    return data if isinstance(data, TensorPlace) else UnsupportedTensor()


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MOST_DIMENSIONS and all(is_count(each) for each in value)


class StorageReader:
    """Storages of a file, each read once. `read(key, memory)` fills memory with the bytes of a storage."""

    def __init__(
        self, storages: Mapping[str, Storage], read: Callable[[str, memoryview], None], byte_order: str
    ) -> None:
        self.storages, self.read, self.byte_order = storages, read, byte_order
        self.done = dict[str, Any]()

    def tensor(self, place: TensorPlace) -> Tensor:
        start = place.storage.start * place.storage.dtype.itemsize // place.dtype.itemsize
        bare = torch.empty(0, dtype=place.dtype)
        return bare.set_(self.storage(place.storage.key), start + place.offset, place.shape, place.stride)

    def storage(self, key: str) -> Any:
        if key not in self.done:
            storage = self.storages[key]
            memory = torch.empty(storage.size, dtype=torch.uint8)
            self.read(key, memory.numpy().data)
            self.done[key] = memory.untyped_storage()
            if self.byte_order != sys.byteorder:
                self.done[key].byteswap(storage.dtype)
        return self.done[key]
