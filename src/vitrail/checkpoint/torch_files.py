"""Read the pickle in a file of torch.save: which tensors it describes, checked before any of their values is read.

torch.load(weights_only=True) runs no code, but some functions that it allows can allocate any amount of memory. So
the pickle is evaluated with stand-ins for the few names that plain checkpoints need. A tensor becomes a location in a
storage that lies within the file.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from vitrail.base.pickle_reader import (
    AllowedCall,
    OpaqueGlobal,
    OpaqueValue,
    PickleError,
    StepBudget,
    evaluate_pickle,
    replace_unsafe_key,
)

MAX_DIMENSIONS = 16
MAX_SIZE_RATIO, SIZE_ALLOWANCE = 4, 2**26  # all tensors together: 4 times the file plus 64 MB

ALLOWED_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
STORAGE_DTYPES = {
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
QUANTISATION_SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
UNSUPPORTED_REBUILDS = ("qtensor", "sparse_tensor", "nested_tensor", "meta_tensor_no_storage", "wrapper_subclass")


class StorageTypeStandIn(OpaqueGlobal):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name)
        self.dtype = dtype


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


class UnsupportedTensor(OpaqueValue):
    """A tensor that is sparse, quantised, nested, without values or of a subclass."""


class OrderedDictStandIn(dict[Any, Any]):
    """Stand-in for an OrderedDict; its attributes, such as the versions of modules, are not needed."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


class NamespaceStandIn(OpaqueValue):
    """Stand-in for the parsed arguments of a script."""

    def set_state(self, state: Any) -> None:
        """The state is not needed."""


class TorchPickleReader:
    """Collects the storages and tensors that the pickles in a file of `size` bytes describe.

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
        calls: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": self.make_ordered_dict,
            "collections.Counter": make_counter_stand_in,
            "argparse.Namespace": NamespaceStandIn,
            "torch.Size": make_torch_size,
            "torch.device": make_opaque,
            "torch.serialization._get_layout": make_opaque,
            "builtins.set": make_opaque,
            "__builtin__.set": make_opaque,
            "builtins.complex": make_opaque,
            "__builtin__.complex": make_opaque,
            "torch._utils._rebuild_tensor": self.locate_tensor,
            "torch._utils._rebuild_tensor_v2": self.locate_tensor_v2,
            "torch._utils._rebuild_tensor_v3": self.locate_tensor_v3,
            "torch._utils._rebuild_parameter": unwrap_parameter,
            "torch._utils._rebuild_parameter_with_state": unwrap_parameter,
            "torch.nn.parameter.Parameter": unwrap_parameter,
            "torch._tensor._rebuild_from_type_v2": self.locate_typed_tensor,
            **{f"torch._utils._rebuild_{name}": make_unsupported for name in UNSUPPORTED_REBUILDS},
        }
        return {
            **{name: AllowedCall(function) for name, function in calls.items()},
            # older versions of torch lack some dtypes
            **{f"torch.{name}": getattr(torch, name) for name in ALLOWED_DTYPES if hasattr(torch, name)},
            **{f"torch.{name}": OpaqueValue() for name in QUANTISATION_SCHEMES},
            **{
                name: StorageTypeStandIn(name, dtype)
                for kind, dtype in STORAGE_DTYPES.items()
                for name in (f"torch.{kind}Storage", f"torch.cuda.{kind}Storage")
            },
            "torch.storage.UntypedStorage": StorageTypeStandIn("torch.storage.UntypedStorage", torch.uint8),
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

    def locate_tensor_v2(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _gradient: Any, _hooks: Any, _metadata: Any = None
    ) -> Any:
        return self.locate_tensor(storage, offset, shape, stride)

    def locate_tensor_v3(
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
        return self.locate_tensor(storage, offset, shape, stride, dtype)

    def locate_tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None
    ) -> Any:
        if not isinstance(storage, StorageLocation):
            raise PickleError("describes a tensor without a storage")
        if str(storage.dtype).removeprefix("torch.") not in ALLOWED_DTYPES:
            return UnsupportedTensor()
        if not is_count(offset) or not is_shape(shape) or not is_shape(stride) or len(shape) != len(stride):
            raise PickleError("describes a tensor without a shape")
        dtype = dtype or storage.dtype
        location = TensorLocation(storage, dtype, offset, shape, stride)
        last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if prod(shape) else -1
        if (offset + last + 1) * dtype.itemsize > storage.size:
            raise PickleError("describes more values than it holds")
        self.bytes_left -= location.size
        if self.bytes_left < 0:
            raise PickleError(f"describes more values than it holds: tensors of more than {self.max_bytes} bytes")
        return location

    def locate_typed_tensor(self, rebuild: Any, kind: Any, arguments: Any, _state: Any) -> Any:
        """Locate a tensor with attributes; a subclass of Tensor is unsupported."""
        rebuilders = (
            self.locate_tensor,
            self.locate_tensor_v2,
            self.locate_tensor_v3,
            unwrap_parameter,
            make_unsupported,
        )
        if not isinstance(rebuild, AllowedCall) or rebuild.function not in rebuilders or type(arguments) is not tuple:
            raise PickleError("describes a tensor without a function that rebuilds it")
        self.budget.spend(len(arguments))
        location = rebuild.function(*arguments)
        return location if isinstance(kind, OpaqueGlobal | AllowedCall) else UnsupportedTensor()


def make_counter_stand_in(_entries: Any = None) -> OrderedDictStandIn:
    return OrderedDictStandIn()


def make_opaque(_value: Any = None, *_: Any) -> OpaqueValue:
    return OpaqueValue()


def make_unsupported(*_: Any) -> UnsupportedTensor:
    return UnsupportedTensor()


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


class StorageReader:
    """Reads tensors from a file, each storage once. `read_bytes(key, memory)` fills memory with the storage `key`."""

    def __init__(
        self, storages: Mapping[str, StorageLocation], read_bytes: Callable[[str, memoryview], None], byte_order: str
    ) -> None:
        self.storages, self.read_bytes, self.byte_order = storages, read_bytes, byte_order
        self.loaded = dict[str, Any]()

    def read_tensor(self, location: TensorLocation) -> Tensor:
        start = location.storage.start * location.storage.dtype.itemsize // location.dtype.itemsize
        storage = self.read_storage(location.storage.key)
        tensor = torch.empty(0, dtype=location.dtype)
        return tensor.set_(storage, start + location.offset, location.shape, location.stride)

    def read_storage(self, key: str) -> Any:
        if key not in self.loaded:
            storage = self.storages[key]
            memory = torch.empty(storage.size, dtype=torch.uint8)
            self.read_bytes(key, memory.numpy().data)
            self.loaded[key] = memory.untyped_storage()
            if self.byte_order != sys.byteorder:
                self.loaded[key].byteswap(storage.dtype)
        return self.loaded[key]
