"""CIFAR-10 and CIFAR-100 as published: binary files, or pickles for Python, of which no code is run."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, VitrailError, describe_error
from vitrail.base.files import read_bytes
from vitrail.base.pickle_reader import (
    BYTES_PER_STEP,
    AllowedCall,
    ForbiddenGlobalError,
    PickleError,
    StepBudget,
    evaluate_pickle,
)
from vitrail.data.images.array_dataset import ArrayDataset, check_label_range

IMAGE_SIDE = 32
MAX_FILE_BYTES = 2**30  # the largest file of CIFAR-100 has 155 million
MAX_NAMES_BYTES = 2**16
BYTES_PER_IMAGE = 3 * IMAGE_SIDE * IMAGE_SIDE  # the red channel row by row, then green, then blue


@dataclass(frozen=True)
class CifarLayout:
    """File names and keys of one of the four published versions."""

    classes: int
    train: tuple[str, ...]
    val: str
    names_file: str  # file of class names
    label_bytes: int = 0  # before each image, the last one is used; 0 for pickles
    labels_key: str = ""  # of pickles
    names_key: str = ""

    def is_present_in(self, folder: Path) -> bool:
        """Whether any image file exists; CIFAR-100's file names are so common that its class names must exist too."""
        has_images = any((folder / name).is_file() for name in (*self.train, self.val))
        return has_images and (self.classes == 10 or (folder / self.names_file).is_file())


BATCH_NAMES = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_LAYOUTS = (
    CifarLayout(10, tuple(f"{name}.bin" for name in BATCH_NAMES), "test_batch.bin", "batches.meta.txt", label_bytes=1),
    CifarLayout(10, BATCH_NAMES, "test_batch", "batches.meta", labels_key="labels", names_key="label_names"),
    CifarLayout(100, ("train.bin",), "test.bin", "fine_label_names.txt", label_bytes=2),
    CifarLayout(100, ("train",), "test", "meta", labels_key="fine_labels", names_key="fine_label_names"),
)


def find_cifar_layout(folder: Path) -> CifarLayout | None:
    return next((layout for layout in CIFAR_LAYOUTS if layout.is_present_in(folder)), None)


def read_cifar(folder: Path, layout: CifarLayout) -> tuple[ArrayDataset | None, ArrayDataset | None, list[str]]:
    """Training and validation images, None for those without files, and notes on missing files."""
    notes = [f"{folder / name} is missing" for name in layout.train if not (folder / name).is_file()]
    classes = tuple(str(number) for number in range(layout.classes))
    if (folder / layout.names_file).is_file():
        classes = read_class_names(folder / layout.names_file, layout)
    else:
        notes.append(f"{folder / layout.names_file} is missing: classes are named by their numbers")
    train, val = (read_cifar_split(folder, names, layout, classes) for names in (layout.train, (layout.val,)))
    return train, val, notes


def read_cifar_split(
    folder: Path, names: tuple[str, ...], layout: CifarLayout, classes: tuple[str, ...]
) -> ArrayDataset | None:
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        return None
    parts = [
        read_binary_file(file, layout) if layout.label_bytes else read_pickled_batch(file, layout) for file in files
    ]
    labels = [check_label_range(part[1], layout.classes, str(file)) for file, part in zip(files, parts, strict=True)]
    colors = np.split(np.concatenate([part[0] for part in parts]), 3, axis=1)
    images = np.stack(colors, axis=-1)  # three times as fast as a transposition
    return ArrayDataset(
        images.reshape(-1, IMAGE_SIDE, IMAGE_SIDE, 3), np.concatenate(labels), classes, f"{folder} ({names[0]})"
    )


def read_binary_file(path: Path, layout: CifarLayout) -> tuple[NDArray[np.uint8], Any]:
    """Images as stored, (N, 3072), and labels."""
    record = layout.label_bytes + BYTES_PER_IMAGE
    data = np.frombuffer(read_cifar_bytes(path), np.uint8)
    if not len(data) or len(data) % record:
        raise DataError(f"{path} has {len(data)} bytes; expected a multiple of {record}: is it truncated?")
    records = data.reshape(-1, record)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1]


def read_pickled_batch(path: Path, layout: CifarLayout) -> tuple[NDArray[np.uint8], Any]:
    batch = read_pickled_dict(path)
    images: Any = batch.get("data")
    labels: Any = batch.get(layout.labels_key)
    if not isinstance(images, np.ndarray) or images.shape[1:] != (BYTES_PER_IMAGE,) or not is_list_of(labels, int):
        raise DataError(
            f"{path} has no images; expected 'data' of bytes (N, {BYTES_PER_IMAGE}) and '{layout.labels_key}'"
        )
    if len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} images and {len(labels)} labels; expected one label per image")
    return images, labels


def read_class_names(path: Path, layout: CifarLayout) -> tuple[str, ...]:
    if layout.label_bytes:
        names = read_cifar_bytes(path, MAX_NAMES_BYTES).decode("utf-8", "replace").split("\n")
    else:
        listed: Any = read_pickled_dict(path).get(layout.names_key)
        names = [decode_if_bytes(name) for name in listed] if is_list_of(listed, str, bytes) else []
    names = [name.strip() for name in names if name.strip()]
    if len(names) != layout.classes:
        raise DataError(f"{path} has {len(names)} class names; expected {layout.classes}")
    return tuple(names)


def read_pickled_dict(path: Path) -> Mapping[str, Any]:
    """The dictionary in a pickle; Python 2 wrote its keys as bytes."""
    contents: Any = read_array_pickle(read_cifar_bytes(path), path)
    if not isinstance(contents, dict):
        raise DataError(f"{path} holds a {type(contents).__name__}; expected the dictionary of a CIFAR batch")
    return {decode_if_bytes(key): value for key, value in contents.items() if isinstance(key, str | bytes)}


def is_list_of(values: Any, *kinds: type) -> bool:
    """Whether it is a flat list of these types; a list that contains itself would never end."""
    return isinstance(values, list) and all(type(value) in kinds for value in values)


def decode_if_bytes(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def read_cifar_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    try:
        return read_bytes(path, max_bytes)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; expected a readable file") from None


MAX_DIMENSIONS = 8


def read_array_pickle(data: bytes, path: Path) -> Any:
    """The object in a pickle; if it is a dictionary, its values may be arrays of bytes."""
    try:
        contents = evaluate_pickle(BytesIO(data), make_allowed_pickle_globals(budget := StepBudget(len(data))), budget)
    except VitrailError:
        raise
    except ForbiddenGlobalError as error:
        raise DataError(f"{path} {error}; refused: expected arrays only") from None
    except PickleError as error:
        raise DataError(f"{path} {error}; expected a pickle of arrays") from None
    except Exception as error:  # the parser may raise anything on broken bytes
        raise DataError(
            f"{path} cannot be read: {describe_error(error)}; expected a complete and readable pickle"
        ) from None
    if isinstance(contents, dict):
        return {key: value.values if isinstance(value, ArrayStandIn) else value for key, value in contents.items()}
    return contents


def make_allowed_pickle_globals(budget: StepBudget) -> dict[str, object]:
    """The names that pickles of numpy arrays use, with their stand-ins."""

    def encode(text: Any, _: Any) -> bytes:
        """Read bytes that Python 3 pickled for Python 2; always latin1, since other codecs may have side effects."""
        if not isinstance(text, str):
            raise PickleError(f"encodes a {type(text).__name__}")
        budget.spend(len(text) // BYTES_PER_STEP)
        return text.encode("latin1")

    def make_array_stand_in(_class: object, _shape: object, _code: object) -> ArrayStandIn:
        return ArrayStandIn()

    core = ("numpy.core", "numpy._core")
    return {
        **{f"{each}.multiarray._reconstruct": AllowedCall(make_array_stand_in) for each in core},
        **{f"{each}.numeric._frombuffer": AllowedCall(make_filled_array_stand_in) for each in core},
        "numpy.ndarray": AllowedCall(ArrayStandIn),
        "numpy.dtype": AllowedCall(DTypeStandIn),
        "_codecs.encode": AllowedCall(encode),
    }


class DTypeStandIn:
    """Stands in for numpy.dtype; only uint8 is allowed."""

    def __init__(self, code: Any, _align: Any = None, _copy: Any = None) -> None:
        if not isinstance(code, str | bytes) or code not in ("u1", b"u1"):
            given = repr(code[:20]) if isinstance(code, str | bytes) else f"a {type(code).__name__}"
            raise PickleError(f"has an array of {given}, not of bytes")

    def set_state(self, state: Any) -> None:
        """Ignore the state: bytes have no byte order."""


class ArrayStandIn:
    """Stands in for numpy.ndarray: created empty, then filled."""

    values: NDArray[np.uint8] | None = None

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise PickleError("has an array without values")
        _, shape, _, columns_first, values = state
        self.fill(values, shape, columns_first=bool(columns_first))

    def fill(self, values: Any, shape: Any, *, columns_first: bool) -> "ArrayStandIn":
        if not isinstance(values, bytes | bytearray):
            raise PickleError("has an array without values")
        if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or any(type(each) is not int for each in shape):
            raise PickleError("has an array without a shape")
        self.values = np.frombuffer(values, np.uint8).reshape(shape, order="F" if columns_first else "C")
        return self


def make_filled_array_stand_in(values: Any, _kind: Any, shape: Any, order: Any) -> ArrayStandIn:
    return ArrayStandIn().fill(values, shape, columns_first=isinstance(order, str) and order == "F")
