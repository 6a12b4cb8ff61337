"""Features of images: computed once per model, images, preprocessing and layer, for all sources with the same input.

They are stored row by row, so that an interrupted command continues where it was, and memory-mapped.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail import __version__
from vitrail.base.array_file import ArrayFile
from vitrail.base.errors import CheckpointError, DataError, OutputError, VitrailError
from vitrail.base.files import get_cache_folder, make_writable_folder
from vitrail.base.progress import track_progress
from vitrail.data.batch import Batch, wrap_dead_worker_errors
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import DatasetSubset, ImageDataset
from vitrail.data.images.formats.class_folders import FileDataset
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.evaluation.evaluate import compute_batches, run_engine, temporary_eval_mode
from vitrail.evaluation.probes.feature_measures import FeatureRows, SelectedRows
from vitrail.evaluation.probes.feature_sources import FeatureSource, choose_source_engine
from vitrail.predict.engine_selection import INEXACT_ENGINES, EngineChoice, EngineOptions
from vitrail.predict.predictor import DEFAULT_BATCH

CACHE_FOLDER = "features"
IMAGES_AT_ONCE = 4096  # of arrays


@dataclass(frozen=True)
class DatasetFeatures:
    """The features of a data set, one row per image, and why some images could not be read."""

    file: ArrayFile
    unreadable: dict[int, str]  # by index in the data set

    @property
    def rows(self) -> FeatureRows:
        """The features of the readable images, in order: (N, D)."""
        rows = self.file.open_rows()
        return rows if self.file.valid.all() else SelectedRows(rows, np.flatnonzero(self.file.valid))

    def select_readable(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values, one per image of the data set, of the images that have a row."""
        return values[self.file.valid]


@dataclass(frozen=True, kw_only=True)
class FeatureStore:
    """The folders of feature files: one that is kept, and one for models and data sets that cannot be identified."""

    cache: Path | None
    temporary: Path
    batch: int
    workers: int
    device: torch.device
    strict: bool
    options: EngineOptions | None = None  # how models run; None for torch

    def open_file(self, source: FeatureSource, dataset: ImageDataset, data_digest: str | None) -> ArrayFile:
        known = source.digest is not None and data_digest is not None
        folder = self.cache if known and self.cache is not None else self.temporary
        names = source.digest or f"model {id(source)}", data_digest or f"data set {id(dataset)}"  # of this process
        description = " ".join((__version__, *names))
        name = hashlib.sha256(description.encode()).hexdigest()[:32] + ".npy"
        return ArrayFile(folder / name, len(dataset), description)


@dataclass(frozen=True)
class FeaturePass:
    """Sources with the same preprocessing, some of whose features of a data set are not stored yet."""

    dataset: ImageDataset
    preprocessing: Preprocessing
    missing: Sequence[tuple[FeatureSource, ArrayFile]]

    def list_images(self, batch: int) -> NDArray[np.int64]:
        """The images of all batches with a missing row: an image in another batch may have other last digits."""
        missing = np.flatnonzero(~np.all([file.valid for _, file in self.missing], axis=0))
        every = np.arange(len(self.dataset))
        return every[np.isin(every // batch, missing // batch)]


def store_features(
    sources: Sequence[FeatureSource],
    datasets: Sequence[ImageDataset],
    store: FeatureStore,
    progress: bool | Callable[[int], object] | None,
    notes: list[str] | None = None,
) -> dict[tuple[int, int], DatasetFeatures]:
    """The features of each (data set, source); those that are not stored are computed."""
    files, passes = dict[tuple[int, int], ArrayFile](), list[tuple[int, FeaturePass]]()
    digests = [compute_data_digest(dataset) for dataset in datasets]
    if store.options is not None:
        sources, store = choose_engines(
            sources, datasets, digests, store, store.options, [] if notes is None else notes
        )
    for number, (dataset, digest) in enumerate(zip(datasets, digests, strict=True)):
        by_preprocessing = dict[Preprocessing, list[tuple[FeatureSource, ArrayFile]]]()
        for place, source in enumerate(sources):
            file = files[number, place] = store.open_file(source, dataset, digest)
            if not file.valid.all():
                by_preprocessing.setdefault(source.preprocessing, []).append((source, file))
        passes += [(number, FeaturePass(dataset, how, missing)) for how, missing in by_preprocessing.items()]
    unreadable: list[dict[int, str]] = [{} for _ in datasets]
    with track_progress(
        progress, sum(len(each.list_images(store.batch)) for _, each in passes), "computing features"
    ) as advance:
        for number, each in passes:
            unreadable[number] |= run_pass(each, store, advance)
    for (number, _), file in files.items():
        if not file.valid.any():
            reason = next(iter(unreadable[number].values()), "")
            raise DataError(f"none of {file.count} images can be read, for instance: {reason}")
    return {key: DatasetFeatures(file, unreadable[key[0]]) for key, file in files.items()}


def choose_engines(
    sources: Sequence[FeatureSource],
    datasets: Sequence[ImageDataset],
    digests: Sequence[str | None],
    store: FeatureStore,
    options: EngineOptions,
    notes: list[str],
) -> tuple[list[FeatureSource], FeatureStore]:
    """The sources on the fastest engines, but for those whose features are stored, and the batch that suits them."""
    found, known = list[FeatureSource](), dict[str, EngineChoice]()
    largest = max(datasets, key=len)
    for source in sources:
        lacking = any(
            not store.open_file(source, dataset, digest).valid.all()
            for dataset, digest in zip(datasets, digests, strict=True)
        )
        if lacking or options.fast or options.engine in INEXACT_ENGINES:
            source, more = choose_source_engine(source, largest, options, known)
            notes += more
        found.append(source)
    batch = options.batch or (DEFAULT_BATCH if known else store.batch)
    return found, replace(store, batch=batch)


def run_pass(work: FeaturePass, store: FeatureStore, advance: Callable[[int], object]) -> dict[int, str]:
    """Read every image once that a source lacks, and store its features; return why images could not be read.

    Those are read again by the next command, which reports them, too.
    """
    unreadable, first = dict[int, str](), 0
    files = [file for _, file in work.missing]
    with ExitStack() as stack:
        stack.enter_context(wrap_dead_worker_errors(store.workers))
        stack.enter_context(torch.inference_mode())
        for file in sorted(files, key=lambda file: file.path):  # in one order, so that no two processes wait forever
            stack.enter_context(file.lock())
        stack.enter_context(delete_if_disk_is_full(files))
        for source, _ in work.missing:
            if source.module is not None:
                stack.enter_context(temporary_eval_mode(source.module, store.device))
        needed = work.list_images(store.batch)
        dataset = work.dataset if len(needed) == len(work.dataset) else DatasetSubset(work.dataset, needed)
        streams = [each.engine.streams if each.engine else 1 for each, _ in work.missing]
        gates = [*map(Semaphore, streams)]

        def compute(each: Batch) -> list[NDArray[np.float32] | None]:
            readable = needed[each["indices"].numpy()]
            found: list[NDArray[np.float32] | None] = [None] * len(files)
            for place, (source, file) in enumerate(work.missing):
                if not file.valid[readable].all():
                    with gates[place], torch.inference_mode():
                        found[place] = compute_checked_features(source, each, store.device)
            return found

        for each, features in compute_batches(
            compute,
            dataset,
            work.preprocessing,
            batch=store.batch,
            workers=store.workers,
            streams=max(streams) if any(source.engine for source, _ in work.missing) else 0,
        ):
            indices = needed[first : first + store.batch]
            readable = needed[each["indices"].numpy()]
            first += len(indices)
            if store.strict and each.skipped:
                raise DataError(each.skipped[0])
            unreadable.update(zip(np.setdiff1d(indices, readable).tolist(), each.skipped, strict=True))  # in one order
            for (_, file), found in zip(work.missing, features, strict=True):
                rows = np.flatnonzero(~file.valid[readable])
                if found is not None and len(rows):
                    file.write(readable[rows], found[rows])
            advance(len(indices))
    return unreadable


@contextmanager
def delete_if_disk_is_full(files: Sequence[ArrayFile]) -> Generator[None]:
    """Make room for the temporary files that replace them."""
    try:
        yield
    except OutputError:
        for file in files:
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
        raise


def compute_checked_features(source: FeatureSource, batch: Batch, device: torch.device) -> NDArray[np.float32]:
    """The features of a batch (B, D); an error if they have another shape or are not finite."""
    if source.engine is not None:
        found = run_engine(source.engine, batch)
    else:
        dtype = torch.float32 if source.module is None else next(source.module.parameters()).dtype
        found = source.compute(normalize(batch["images"].to(device), source.preprocessing).to(dtype)).float()
    if found.ndim != 2 or len(found) != batch.size:
        raise VitrailError(f"{source.name} returns features of shape {tuple(found.shape)}; expected one row per image")
    if not found.isfinite().all():
        raise VitrailError(f"the features of {source.name} are NaN or infinite; check that its weights are finite")
    return found.cpu().numpy()


def get_feature_cache_folder() -> Path | None:
    """A folder for features that are kept; None if it cannot be written."""
    with suppress(CheckpointError):
        folder = get_cache_folder() / CACHE_FOLDER
        make_writable_folder(folder)
        return folder
    return None


def compute_data_digest(dataset: ImageDataset) -> str | None:
    """Digest of the images in their order: pixels of arrays, else name, size and times of each file.

    None for a data set of another library, whose images are not known before they are read.
    """
    indices: Any = range(len(dataset))
    inner = dataset
    if isinstance(dataset, DatasetSubset):
        inner, indices = dataset.dataset, dataset.indices
    found = hashlib.sha256()
    if isinstance(inner, ArrayDataset):
        found.update(repr((len(indices), inner.images.shape[1:])).encode())
        for start in range(0, len(indices), IMAGES_AT_ONCE):
            found.update(np.ascontiguousarray(inner.images[indices[start : start + IMAGES_AT_ONCE]]).data)
        return found.hexdigest()
    if not isinstance(inner, FileDataset):
        return None
    for index in indices:
        path = inner.source(int(index))
        try:
            about = path.stat()
            stamp = f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"  # cp -p keeps the first time
        except OSError:  # reported when it is read
            stamp = "missing"
        found.update(f"{path.absolute()} {stamp}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()
