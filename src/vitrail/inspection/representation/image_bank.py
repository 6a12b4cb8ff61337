"""Images that neighbours are searched among: a folder, a data set, or a file of features from `vitrail embed`."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, describe_error
from vitrail.data.images.datasets import ImageDataset, open_data
from vitrail.data.images.image_items import ImageItem
from vitrail.predict.output.feature_files import FEATURE_FORMAT_BY_SUFFIX, names_file_path
from vitrail.predict.output.row_formats import import_pyarrow
from vitrail.predict.pipeline import ImageResult

ROWS_AT_ONCE = 2048  # features in memory
EXPECTED_FEATURES = "expected a file that `vitrail embed` wrote, with one vector per image"
Chunk = tuple[NDArray[np.int64], NDArray[np.float32]]  # indices of images, (n,), and their features, (n, D)
ComputeFeatures = Callable[[Iterable[ImageItem]], Iterator[ImageResult]]


class ImageBank(Protocol):
    """Images by index, and their features in chunks."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> frozenset[str]: ...  # all classes; empty if there are none
    def __len__(self) -> int: ...
    def take(self, indices: Sequence[int]) -> list[ImageItem]: ...
    def iterate_features(self, compute: ComputeFeatures, skip: Callable[[DataError], object]) -> Iterator[Chunk]: ...


@dataclass(frozen=True, kw_only=True)
class OpenedImageBank:
    """Images whose features are computed."""

    name: str
    count: int
    item: Callable[[int], ImageItem]
    labels: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Sequence[int]) -> list[ImageItem]:
        return [self.item(index) for index in indices]

    def iterate_features(self, compute: ComputeFeatures, skip: Callable[[DataError], object]) -> Iterator[Chunk]:
        indices, features = list[int](), list[NDArray[np.float32]]()
        for index, result in enumerate(compute(map(self.item, range(self.count)))):
            if result.values is None:
                skip(result.error or DataError(f"{result.name}: no features"))
                continue
            indices.append(index)
            features.append(result.values)
            if len(indices) == ROWS_AT_ONCE:
                yield np.array(indices), np.stack(features)
                indices.clear()
                features.clear()
        if indices:
            yield np.array(indices), np.stack(features)


@dataclass(frozen=True, kw_only=True)
class FeatureBank:
    """Features that `vitrail embed` has written, and the names of their images."""

    name: str
    count: int
    names: Callable[[], Iterator[str]]  # of all rows, in order
    chunks: Callable[[], Iterator[NDArray[np.float32]]]
    labels: frozenset[str] = frozenset()  # names of the folders, if there are several

    def __len__(self) -> int:
        return self.count

    def take(self, indices: Sequence[int]) -> list[ImageItem]:
        wanted = set(indices)
        found = {row: name for row, name in enumerate(self.names()) if row in wanted}
        return [self.make_item(found[index]) for index in indices]

    def make_item(self, name: str) -> ImageItem:
        folder = Path(name).parent.name
        return ImageItem(name, name, folder if folder in self.labels else None)

    def iterate_features(self, compute: ComputeFeatures, skip: Callable[[DataError], object]) -> Iterator[Chunk]:  # noqa: ARG002
        start = 0
        for features in self.chunks():
            yield np.arange(start, start + len(features)), features
            start += len(features)


def open_bank(data: Any) -> ImageBank:
    """Open a folder, a data set, its name, a file of features, or a list of images; a bank is returned unchanged."""
    if isinstance(data, OpenedImageBank | FeatureBank):
        return data
    if isinstance(data, str | Path) and Path(data).suffix.lower() in FEATURE_FORMAT_BY_SUFFIX:
        return open_stored_features_file(Path(data))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        items = [each if isinstance(each, ImageItem) else ImageItem(each, str(each)) for each in data]
        labels = frozenset(each.label for each in items if each.label is not None)
        return OpenedImageBank(name="the given list", count=len(items), item=items.__getitem__, labels=labels)
    found = open_data(data, val_share=0.0, need_classes=False)
    parts = [part for part in (found.train, found.val) if part is not None]
    return OpenedImageBank(
        name=found.name,
        count=sum(map(len, parts)),
        item=partial(take_item, parts, found.classes),
        labels=frozenset(found.classes),
    )


def take_item(parts: Sequence[ImageDataset], classes: Sequence[str], index: int) -> ImageItem:
    """An image of several data sets, one after the other."""
    for part in parts:
        if index < len(part):
            label = part.label(index)
            return ImageItem(
                part.source(index), part.name(index), classes[label] if 0 <= label < len(classes) else None
            )
        index -= len(part)
    raise IndexError(index)


def open_stored_features_file(path: Path) -> FeatureBank:
    """Features from `vitrail embed`: .npy with its .files.csv, or .parquet."""
    opened = open_npy if FEATURE_FORMAT_BY_SUFFIX[path.suffix.lower()] == "npy" else open_parquet
    try:
        count, names, chunks = opened(path)
        first = next(chunks(), None)
        folders = {Path(name).parent for name in names()}
    except (OSError, EOFError, TypeError, ValueError, LookupError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; {EXPECTED_FEATURES}") from None
    if first is None or first.ndim != 2 or not count:
        shape = (count,) if first is None else (count, *first.shape[1:])
        raise DataError(f"{path} has the shape {shape}; {EXPECTED_FEATURES}")
    labels = frozenset(each.name for each in folders) if len(folders) > 1 else frozenset[str]()
    return FeatureBank(name=path.name, count=count, names=names, chunks=chunks, labels=labels)


Opened = tuple[int, Callable[[], Iterator[str]], Callable[[], Iterator[NDArray[np.float32]]]]


def open_npy(path: Path) -> Opened:
    array = np.load(path, mmap_mode="r", allow_pickle=False)  # read as it is used
    names_path = names_file_path(path)

    def iterate_names() -> Iterator[str]:
        with names_path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield from (row["file"] for row in csv.DictReader(file) if row["row"])

    if sum(1 for _ in iterate_names()) != len(array):
        raise ValueError(f"{names_path.name} does not have one row for each of {len(array)} features")

    def iterate_chunks() -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(array), ROWS_AT_ONCE):
            yield np.asarray(array[start : start + ROWS_AT_ONCE], np.float32)

    return len(array), iterate_names, iterate_chunks


def open_parquet(path: Path) -> Opened:
    arrow, parquet = import_pyarrow()
    try:
        table = parquet.ParquetFile(path)
        count = table.metadata.num_rows - sum(
            batch.column(0).null_count for batch in table.iter_batches(ROWS_AT_ONCE, columns=["features"])
        )
    except (arrow.ArrowException, IndexError) as error:
        raise ValueError(describe_error(error)) from None

    def iterate_names() -> Iterator[str]:
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=["file", "features"]):
            present = batch.column(1).is_valid().to_pylist()
            yield from (name for name, valid in zip(batch.column(0).to_pylist(), present, strict=True) if valid)

    def iterate_chunks() -> Iterator[NDArray[np.float32]]:
        for batch in table.iter_batches(ROWS_AT_ONCE, columns=["features"]):
            column = batch.column(0).drop_null()
            if len(column):
                yield np.array(column.to_pylist(), np.float32)

    return count, iterate_names, iterate_chunks
