"""Nearest neighbors of images: the most similar ones of a folder or a data set, by their pooled features.

The bank is what they are searched among. Q queries, N images in the bank, D width, K neighbors.
"""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps
from torch import nn

from vitrail.base.errors import ConfigError, DataError, describe_error
from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label
from vitrail.base.progress import Progress, track_progress
from vitrail.base.style import FIGURE_WIDTH, GRAY, GREEN, NOTE_POINTS, RED
from vitrail.base.text import format_count
from vitrail.data.images.datasets import ImageDataset, open_data
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.models.base.checks import check_count
from vitrail.models.base.contract import find_image_model
from vitrail.opening import Opened, open_torch_model
from vitrail.predict.output.feature_files import FEATURE_FORMAT_BY_SUFFIX, names_file_path
from vitrail.predict.output.resumable_rows import import_pyarrow
from vitrail.predict.pipeline import Engine, ImageResult, PrepareImage, run_pipeline
from vitrail.predict.predictor import DEFAULT_BATCH, Predictor, choose_features
from vitrail.predict.torch_engine import TorchEngine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
class UncomputedImageBank:
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
    if isinstance(data, UncomputedImageBank | FeatureBank):
        return data
    if isinstance(data, str | Path) and Path(data).suffix.lower() in FEATURE_FORMAT_BY_SUFFIX:
        return open_stored_features_file(Path(data))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        items = [each if isinstance(each, ImageItem) else ImageItem(each, str(each)) for each in data]
        labels = frozenset(each.label for each in items if each.label is not None)
        return UncomputedImageBank(name="the given list", count=len(items), item=items.__getitem__, labels=labels)
    found = open_data(data, val_share=0.0, need_classes=False)
    parts = [part for part in (found.train, found.val) if part is not None]
    return UncomputedImageBank(
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


OpenBank = tuple[int, Callable[[], Iterator[str]], Callable[[], Iterator[NDArray[np.float32]]]]


def open_npy(path: Path) -> OpenBank:
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


def open_parquet(path: Path) -> OpenBank:
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


ROWS_PER_FIGURE = 10  # queries
MAX_SIDE, MIN_LABELED_SIDE = 1.25, 0.6  # inches of an image; below the minimum, its label would not fit
SAME_FEATURES = 0.999  # cosine similarity of the stored features of an image and those computed again


@dataclass(frozen=True, kw_only=True)
class Neighbor:
    """An image of the bank and its cosine similarity to a query."""

    image: ImageItem
    similarity: float


@dataclass(frozen=True, kw_only=True)
class NeighborSearch:
    """The nearest neighbors of each query, most similar first; a notebook shows them as a figure."""

    queries: tuple[ImageItem, ...]
    neighbors: tuple[tuple[Neighbor, ...], ...]  # K of each query
    bank: str  # where they were searched
    bank_size: int
    skipped: tuple[str, ...] = ()  # images of the bank that could not be read, and why
    failed: tuple[DataError, ...] = ()  # queries that could not be read
    notes: tuple[str, ...] = ()

    @property
    def figures(self) -> list[CaptionedFigure]:
        """Figures of at most ten queries each."""
        starts = range(0, len(self.queries), ROWS_PER_FIGURE)
        return [self.make_figure(slice(start, start + ROWS_PER_FIGURE), start) for start in starts]

    def make_figure(self, part: slice, start: int) -> CaptionedFigure:
        queries, found = self.queries[part], self.neighbors[part]
        labeled = [(query, each) for query, row in zip(queries, found, strict=True) if query.label for each in row]
        agreeing = [query.label == each.image.label for query, each in labeled if each.image.label]
        agreement = f" {sum(agreeing)} of {len(agreeing)} are of the query's class (green)." if agreeing else ""
        return CaptionedFigure(
            name=f"neighbors-{start // ROWS_PER_FIGURE + 1}" if start else "neighbors",
            title="The most similar images",
            caption=f"The images of {self.bank} ({self.bank_size:,}) whose features are most similar to those of the "
            f"image on the left, with their cosine similarity.{agreement}",
            arrays={"similarities": np.array([[each.similarity for each in row] for row in found], np.float32)},
            draw=lambda: draw_neighbors(queries, found),
        )

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "image": query.name,
                "label": query.label,
                "method": "neighbors",
                "neighbors": [
                    {"image": each.image.name, "label": each.image.label, "similarity": each.similarity} for each in row
                ],
            }
            for query, row in zip(self.queries, self.neighbors, strict=True)
        ]

    def _repr_png_(self) -> bytes:
        return self.figures[0].to_png()


@dataclass
class MostSimilar:
    """The most similar features so far for each query; equal ones in the order of their indices."""

    queries: NDArray[np.float32]  # (Q, D), of length 1
    count: int
    similarities: NDArray[np.float32] = field(init=False)  # (Q, ≤ count), descending
    indices: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.similarities = np.zeros((len(self.queries), 0), np.float32)
        self.indices = np.zeros((len(self.queries), 0), np.int64)

    def add(self, indices: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """Compare features (n, D) with the queries; memory is bounded by Q·(n + count) numbers."""
        similarities = np.concatenate([self.similarities, self.queries @ scale_to_unit_length(features).T], axis=1)
        places = np.concatenate([self.indices, np.broadcast_to(indices, (len(self.queries), len(indices)))], axis=1)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, : self.count]
        self.similarities = np.take_along_axis(similarities, order, 1)
        self.indices = np.take_along_axis(places, order, 1)


def scale_to_unit_length(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide each row by its length."""
    return features / np.maximum(np.linalg.norm(features, axis=-1, keepdims=True), 1e-12)


def find_neighbors(
    model: "str | Path | nn.Module | Opened | Predictor",
    images: Iterable[Any],
    data: Any,
    *,
    k: int = 5,
    batch: int = DEFAULT_BATCH,
    progress: Progress = None,
) -> NeighborSearch:
    """Find the k images of `data` whose features are most similar to those of each image, by cosine similarity.

    `data` is a folder, a data set or its name, a list of images, or a file that `vitrail embed` wrote with this model.
    Features are what the head reads, and the output of a model without a head. An image is not its own neighbor.
    The class of an image is the name of its folder if `data` has a class of this name.

    >>> found = vitrail.find_neighbors("vit_fashion", ["example:cat"], "photos", k=3)  # doctest: +SKIP
    >>> [each.image.name for each in found.neighbors[0]]  # doctest: +SKIP
    """
    check_count("k", k)
    check_count("batch", batch)
    if isinstance(images, str | bytes | Path) or not isinstance(images, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"images is one {type(images).__name__}; expected several in a list")
    loaded = open_torch_model(model.loaded if isinstance(model, Predictor) else model)
    bank = open_bank(data)
    if k > len(bank):
        raise too_few_images_error(k, bank, len(bank))
    given = [each if isinstance(each, ImageItem) else ImageItem(each, name_of(each)) for each in images]
    engine, notes = open_matching_engine(loaded, bank)
    prepare = partial(decode_for_model, preprocessing=loaded.preprocessing)
    queries, features, failed = compute_query_features(engine, prepare, given, batch)
    queries = [label_by_folder(each, bank.labels) for each in queries]
    found, skipped = MostSimilar(scale_to_unit_length(features), k + 1), list[str]()

    def compute(items: Iterable[ImageItem]) -> Any:
        with track_progress(progress, len(bank), "images") as advance:
            for result in run_pipeline(engine, items, prepare, batch):
                advance(1)
                yield result

    for indices, part in bank.iterate_features(compute, lambda error: skipped.append(str(error))):
        if part.shape[1] != features.shape[1]:
            raise other_width_error(bank, part.shape[1], features.shape[1])
        found.add(indices, part)
    rows = [
        select_others(bank, query, indices.tolist(), similarities.tolist(), k, len(bank) - len(skipped))
        for query, indices, similarities in zip(queries, found.indices, found.similarities, strict=True)
    ]
    return NeighborSearch(
        queries=tuple(queries),
        neighbors=tuple(rows),
        bank=bank.name,
        bank_size=len(bank) - len(skipped),
        skipped=tuple(skipped),
        failed=tuple(failed),
        notes=tuple(notes),
    )


def name_of(image: Any) -> str:
    return str(image) if isinstance(image, str | Path) else "image"


def too_few_images_error(k: int, bank: ImageBank, others: int) -> ConfigError:
    return ConfigError(
        f"`k` is {k}, but {bank.name} has {format_count(others, 'image')} to compare with; use {others} or less"
        if others
        else f"{bank.name} has no images to compare with; expected at least one other image"
    )


def compute_query_features(
    engine: Engine, prepare: PrepareImage, items: Sequence[ImageItem], batch: int
) -> tuple[list[ImageItem], NDArray[np.float32], list[DataError]]:
    """The queries that can be read, their features (Q, D), and the errors of the others."""
    if not items:
        raise ConfigError("there are no images; expected at least one")
    queries, features, failed = list[ImageItem](), list[NDArray[np.float32]](), list[DataError]()
    results = run_pipeline(engine, items, prepare, batch)
    for item, result in zip(items, results, strict=True):
        if result.values is None:
            failed.append(result.error or DataError(f"{item.name}: no features"))
        else:
            queries.append(item)
            features.append(result.values)
    if not queries:
        raise failed[0]
    return queries, np.stack(features), failed


def open_matching_engine(loaded: Opened, bank: ImageBank) -> tuple[Engine, list[str]]:
    """What computes the features of the queries: the kind of features that the bank stores, if it stores some."""
    kind = choose_features(loaded)
    engine = TorchEngine(loaded.module, loaded.preprocessing, kind)
    if not isinstance(bank, FeatureBank):
        declared = find_image_model(loaded.module)
        if declared is not None and declared.attention_pool and not loaded.classes:
            engine.output_function = loaded.module  # the output of attention pooling
        return engine, []
    (item,), stored = bank.take([0]), next(bank.chunks())[0]
    try:
        pixels = np.stack([decode_for_model(item.source, loaded.preprocessing)])
    except DataError:
        return engine, [f"{item.name} cannot be read, so {bank.name} was not checked against the model"]
    for each in (engine, TorchEngine(loaded.module, loaded.preprocessing, "mean")):
        values = each.run(pixels)[0]
        if values.shape != stored.shape:
            raise other_width_error(bank, stored.size, values.size)
        if float(scale_to_unit_length(values) @ scale_to_unit_length(stored)) > SAME_FEATURES:
            return each, []
    raise DataError(
        f"{bank.name} holds other features of {item.name} than this model computes; expected those of the same model: "
        "write them again with `vitrail embed`"
    )


def other_width_error(bank: ImageBank, stored: int, computed: int) -> DataError:
    return DataError(
        f"{bank.name} has features of width {stored}, but this model's have {computed}; expected features of the same "
        "model"
    )


def label_by_folder(item: ImageItem, labels: frozenset[str]) -> ImageItem:
    """The image with the name of its folder as its class, if there is such a class."""
    folder = Path(item.name).parent.name
    return replace(item, label=folder) if item.label is None and folder in labels else item


def select_others(
    bank: ImageBank, query: ImageItem, indices: list[int], similarities: list[float], k: int, readable: int
) -> tuple[Neighbor, ...]:
    """The k most similar images without the query itself."""
    itself = identify(query)
    pairs = zip(bank.take(indices), similarities, strict=True)
    others = [Neighbor(image=item, similarity=value) for item, value in pairs if identify(item) != itself]
    if len(others) < k:
        raise too_few_images_error(k, bank, readable - (len(others) < len(indices)))
    return tuple(others[:k])


def identify(item: ImageItem) -> str:
    """The same text for the same image: the real path of its file, otherwise its name."""
    if isinstance(item.source, str | Path) and not str(item.source).startswith(EXAMPLE_PREFIX):
        return os.path.realpath(item.source)
    return item.name


def draw_neighbors(queries: Sequence[ImageItem], found: Sequence[Sequence[Neighbor]]) -> "Figure":
    """A row per query: the image, then its neighbors with similarity and class; all in one axes, in inches."""
    columns, gap, margin = len(found[0]) + 1, 0.12, 0.15
    side = min(MAX_SIDE, (FIGURE_WIDTH - 2 * margin - 0.2) / columns - gap)
    row_height = side + (0.42 if side >= MIN_LABELED_SIDE else 0.1)
    height = len(queries) * row_height + 0.4
    figure = new_figure(FIGURE_WIDTH, height)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    start = (FIGURE_WIDTH - columns * (side + gap) - 0.2 + gap) / 2
    for left, text in ((start, "image"), (start + side + gap + 0.2, "nearest neighbors")):
        axes.text(left, 0.22, text, fontsize=10)
    for row, (query, neighbors) in enumerate(zip(queries, found, strict=True)):
        top = 0.32 + row * row_height
        note = query.label or Path(query.name.removeprefix(EXAMPLE_PREFIX)).stem
        plot_image(axes, query, (start, top), side, "black", note)
        for column, each in enumerate(neighbors, 1):
            known = query.label is not None and each.image.label is not None
            color = GRAY if not known else GREEN if query.label == each.image.label else RED
            note = f"{each.similarity:.2f} {each.image.label or ''}".rstrip()
            plot_image(axes, each.image, (start + column * (side + gap) + 0.2, top), side, color, note)
    axes.set(xlim=(0, FIGURE_WIDTH), ylim=(height, 0))
    return figure


def plot_image(axes: Any, item: ImageItem, corner: tuple[float, float], side: float, color: str, note: str) -> None:
    """A square part of an image in a frame, with a note below it; an empty frame if it cannot be read any more."""
    from matplotlib.patches import Rectangle

    left, top = corner
    try:
        photo = ImageOps.fit(open_image(item.source), (160, 160))
        axes.imshow(photo, extent=(left, left + side, top + side, top), aspect="auto")
    except DataError:
        axes.text(left + side / 2, top + side / 2, "not found", fontsize=7, ha="center", color=GRAY)
    axes.add_patch(Rectangle(corner, side, side, fill=False, edgecolor=color, linewidth=2.0))
    if side >= MIN_LABELED_SIDE:
        axes.text(left, top + side + 0.17, sanitize_label(note, int(14 * side)), fontsize=NOTE_POINTS, parse_math=False)
