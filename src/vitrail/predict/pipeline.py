"""Run images through an engine, in order and in bounded memory; some are decoded while others are computed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Semaphore
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError
from vitrail.data.images.image_items import ImageItem
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.predict.output.resumable_rows import compute_file_stamp

Part = TypeVar("Part")
Result = TypeVar("Result")
PrepareImage = Callable[[Any], NDArray[np.uint8]]  # a source → (rows, columns, C)


class Engine(Protocol):
    """Runs a model: eager, compiled, bfloat16, onnx or int8."""

    name: str
    exact: bool  # within 1e-4 of the model in float32
    streams: int  # calls that may run at the same time

    @property
    def threads(self) -> int | None:
        """Threads per call; None for the library's default."""
        ...

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → (B, …): logits, features or tokens per image."""
        ...


@dataclass(frozen=True)
class ImageResult:
    """The output for one image, or the reason why there is none."""

    name: str
    values: NDArray[np.float32] | None
    error: DataError | None = None
    stamp: int = 0  # of its file, before it was read


def run_pipeline(
    engine: Engine, images: Iterable[ImageItem], prepare: PrepareImage, batch: int
) -> Iterator[ImageResult]:
    """Yield one result per image, in order; no more than a few batches are read ahead.

    A worker takes a batch from its files to its results: while one computes, another decodes.
    """
    workers, gate = max(2, engine.streams), Semaphore(engine.streams)

    def run_batch(part: Sequence[ImageItem]) -> list[ImageResult]:
        stamps = [compute_file_stamp(each.source) for each in part]
        prepared = [prepare_image_or_return_error(each, prepare) for each in part]
        good = [found for found in prepared if isinstance(found, np.ndarray)]
        with gate:
            values = iter(engine.run(np.stack(good)) if good else ())
        return [
            ImageResult(each.name, None, found, stamp)
            if isinstance(found, DataError)
            else make_finite_or_error_result(each, next(values), stamp)
            for each, found, stamp in zip(part, prepared, stamps, strict=True)
        ]

    remaining = iter(images)
    for results in map_in_order(run_batch, iter(lambda: list(islice(remaining, batch)), []), workers):
        yield from results


def map_in_order(function: Callable[[Part], Result], parts: Iterable[Part], workers: int) -> Iterator[Result]:
    """Call the function for each part in a thread, and yield the results in order, a few parts ahead."""
    pending = deque[Future[Result]]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for part in parts:
                pending.append(pool.submit(function, part))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # also if the caller stops iterating
            for each in pending:
                each.cancel()


def prepare_image_or_return_error(image: ImageItem, prepare: PrepareImage) -> NDArray[np.uint8] | DataError:
    try:
        return prepare(image.source)
    except DataError as error:
        return error


def make_finite_or_error_result(image: ImageItem, values: NDArray[np.float32], stamp: int) -> ImageResult:
    """A result; an error if values are NaN, +inf or all -inf. Some -inf are allowed, since they may mask classes."""
    if (values < np.inf).all() and np.isfinite(values).any():
        return ImageResult(image.name, values, None, stamp)
    name = repr(image.name) if image.name else "an image"
    return ImageResult(image.name, None, DataError(f"{name}: {NOT_FINITE_MESSAGE}"), stamp)
