"""Compute the features of images once, for all sources that receive the same input, and store them on disk."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from vitrail.base.errors import DataError, VitrailError
from vitrail.data.images.augment.augmentations import normalise
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.loader import evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.workers import wrap_dead_worker_errors
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.evaluation.probes.feature_cache import (
    FeatureWriter,
    StoredRows,
    compute_data_digest,
    compute_file_name,
    open_stored_rows,
)
from vitrail.evaluation.probes.feature_sources import FeatureSource


@dataclass(frozen=True, kw_only=True)
class FeatureStore:
    """The folders of feature files: one that is kept, and one for models and data sets that cannot be identified."""

    cache: Path | None
    temporary: Path
    batch: int
    workers: int
    device: torch.device
    strict: bool

    def locate(self, source: FeatureSource, dataset: ImageDataset, data_digest: str | None) -> Path:
        known = source.digest is not None and data_digest is not None
        folder = self.cache if known and self.cache is not None else self.temporary
        names = source.digest or f"model {id(source)}", data_digest or f"data set {id(dataset)}"  # of this process
        return folder / compute_file_name(*names)


@dataclass(frozen=True)
class FeaturePass:
    """Sources with the same preprocessing, whose features of a data set are not stored yet."""

    dataset: ImageDataset
    preprocessing: Preprocessing
    missing: Sequence[tuple[FeatureSource, Path]]


def plan_passes(
    sources: Sequence[FeatureSource], datasets: Sequence[ImageDataset], store: FeatureStore
) -> tuple[dict[tuple[int, int], Path], list[FeaturePass]]:
    """The file of each (data set, source), and the passes over the images that the missing ones need."""
    files, passes = dict[tuple[int, int], Path](), list[FeaturePass]()
    for number, dataset in enumerate(datasets):
        digest = compute_data_digest(dataset)
        by_preprocessing = dict[Preprocessing, list[tuple[FeatureSource, Path]]]()
        for place, source in enumerate(sources):
            path = files[number, place] = store.locate(source, dataset, digest)
            if open_stored_rows(path, len(dataset)) is None:
                by_preprocessing.setdefault(source.preprocessing, []).append((source, path))
        passes += [FeaturePass(dataset, how, missing) for how, missing in by_preprocessing.items()]
    return files, passes


def run_pass(work: FeaturePass, store: FeatureStore, advance: Callable[[int], object]) -> None:
    """Read every image once and store the features of all sources; files appear when they are complete."""
    unreadable, first = dict[int, str](), 0
    with ExitStack() as stack:
        stack.enter_context(wrap_dead_worker_errors(store.workers))
        stack.enter_context(torch.inference_mode())
        writers = list[tuple[FeatureSource, FeatureWriter]]()
        for source, path in work.missing:
            writers.append((source, FeatureWriter(path, {"features": source.name, "kind": source.kind})))
            stack.callback(writers[-1][1].discard)
            if source.module is not None:
                stack.enter_context(temporary_eval_mode(source.module, store.device))
        batches = evaluation_batches(work.dataset, work.preprocessing, batch=store.batch, workers=store.workers)
        for each in batches:
            indices = range(first, min(first + store.batch, len(work.dataset)))
            first = indices.stop
            if store.strict and each.skipped:
                raise DataError(each.skipped[0])
            missing = sorted(set(indices) - set(each["indices"].tolist()))
            unreadable.update(zip(missing, each.skipped, strict=True))  # both in the order of the images
            if each.size:
                images = normalise(each["images"].to(store.device), work.preprocessing)
                for source, writer in writers:
                    writer.append(compute_checked_features(source, images))
            advance(len(indices))
        for _, writer in writers:
            writer.finish(unreadable)


def compute_checked_features(source: FeatureSource, images: torch.Tensor) -> torch.Tensor:
    """The features of a batch (B, D); an error if they have another shape or are not finite."""
    dtype = torch.float32 if source.module is None else next(source.module.parameters()).dtype
    found = source.compute(images.to(dtype)).float()
    if found.ndim != 2 or len(found) != len(images):
        raise VitrailError(f"{source.name} returns features of shape {tuple(found.shape)}; expected one row per image")
    if not found.isfinite().all():
        raise VitrailError(f"the features of {source.name} are NaN or infinite; check that its weights are finite")
    return found


def open_features(path: Path, dataset: ImageDataset) -> StoredRows:
    """The features of a data set, which a pass has stored."""
    found = open_stored_rows(path, len(dataset))
    if found is None:
        raise VitrailError(f"{path} was changed by another process; start the command again")
    if not len(found.rows):
        reason = next(iter(found.unreadable.values()), "")
        raise DataError(f"none of {len(dataset)} images can be read, for instance: {reason}")
    return found
