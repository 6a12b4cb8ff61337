"""Pictures through an engine: in order, a bounded number ahead, whatever one of them is."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.base.errors import DataError
from vitrail.data.images.image_items import ImageItem
from vitrail.predict.pipeline import run_pipeline


class Doubling:
    """Returns twice the value of each image; records its batches and how many calls ran at once."""

    name, exact = "toy", True
    threads: int | None = 1

    def __init__(self, streams: int = 1, wait: Callable[[], object] = lambda: None) -> None:
        self.streams, self.wait, self.batches = streams, wait, list[int]()
        self.busy = self.most = 0
        self.lock = threading.Lock()

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
            self.batches.append(len(pixels))
        self.wait()
        with self.lock:
            self.busy -= 1
        return pixels[:, 0, 0].astype(np.float32) * 2  # (B, 1)


def prepare(source: Any) -> NDArray[np.uint8]:
    if source == "broken":
        raise DataError("'broken' is not an image")
    return np.full((2, 2, 1), source, np.uint8)


def shown(*sources: Any) -> list[ImageItem]:
    return [ImageItem(each, f"{n}.png") for n, each in enumerate(sources)]


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_results_are_in_the_order_of_the_images(batch: int, streams: int) -> None:
    engine, chance = Doubling(streams), random.Random(batch)

    def slowly(source: Any) -> NDArray[np.uint8]:
        time.sleep(chance.uniform(0, 0.002))
        return prepare(source)

    found = list(run_pipeline(engine, shown(*range(50)), slowly, batch))
    assert [row.name for row in found] == [f"{n}.png" for n in range(50)]
    assert [row.values.tolist() for row in found if row.values is not None] == [[2.0 * n] for n in range(50)]
    assert sorted(engine.batches, reverse=True)[0] == min(batch, 50)
    assert sum(engine.batches) == 50


@pytest.mark.parametrize("streams", [1, 3])
def test_at_most_as_many_calls_at_once_as_streams(streams: int) -> None:
    together = threading.Barrier(streams)  # a call ends when as many are running
    engine = Doubling(streams, wait=together.wait)
    assert len(list(run_pipeline(engine, shown(*range(24)), prepare, 2))) == 24
    assert engine.most == streams


def test_an_unreadable_image_is_an_error_in_its_own_result() -> None:
    engine = Doubling()
    found = list(run_pipeline(engine, shown(1, "broken", 3, "broken", "broken", "broken", 7), prepare, 2))
    assert [None if row.values is None else row.values[0] for row in found] == [2, None, 6, None, None, None, 14]
    assert [str(row.error) for row in found if row.values is None] == ["'broken' is not an image"] * 4
    assert sum(engine.batches) == 3
    assert 0 not in engine.batches, "nothing is computed of a batch without images"


def test_few_images_are_read_ahead() -> None:
    taken = 0

    def endless() -> Iterator[ImageItem]:
        nonlocal taken
        for taken in itertools.count(1):
            yield ImageItem(taken % 200, str(taken))

    engine = Doubling(streams=2)
    found = run_pipeline(engine, endless(), prepare, 4)
    assert taken == 0, "nothing before it is asked for"
    for wanted in range(1, 100):
        next(found)
        assert taken <= wanted + 4 * (engine.streams + 2)
    found.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_it_stops_when_closed_early() -> None:
    before, engine = threading.active_count(), Doubling(wait=lambda: time.sleep(0.02))
    found: Any = run_pipeline(engine, (ImageItem(n % 200, str(n)) for n in range(10_000)), prepare, 2)
    next(found)
    found.close()
    done = len(engine.batches)
    assert done <= 5
    assert threading.active_count() == before
    time.sleep(0.05)
    assert len(engine.batches) == done


class ToyError(Exception):
    pass


def test_errors_of_the_engine_are_raised() -> None:
    class Failing(Doubling):
        def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            if pixels.max() >= 6:
                raise ToyError
            return super().run(pixels)

    before, found = threading.active_count(), run_pipeline(Failing(), shown(*range(100)), prepare, 2)
    assert [next(found).name for _ in range(6)] == [f"{n}.png" for n in range(6)], "what came before it came"
    with pytest.raises(ToyError):
        next(found)
    assert threading.active_count() == before


def test_errors_other_than_bad_images_are_raised() -> None:
    def wrong(source: Any) -> NDArray[np.uint8]:
        raise ToyError if source == 5 else DataError("no")

    with pytest.raises(ToyError):
        list(run_pipeline(Doubling(), shown(*range(9)), wrong, 2))

    def images() -> Iterator[ImageItem]:
        yield from shown(1, 2, 3)
        raise ToyError

    with pytest.raises(ToyError):
        list(run_pipeline(Doubling(), images(), prepare, 1))


def test_decoding_overlaps_with_computing() -> None:
    """Of one stream too: decoding and computing of so many batches takes less than one after the other."""
    met = threading.Event()

    class Waiting(Doubling):
        def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
            if pixels[0, 0, 0, 0] == 0:
                assert met.wait(20), "the second was to be decoded meanwhile"
            return super().run(pixels)

    def second_is_seen(source: Any) -> NDArray[np.uint8]:
        if source == 1:
            met.set()
        return prepare(source)

    assert len(list(run_pipeline(Waiting(), shown(0, 1, 2), second_is_seen, 1))) == 3


def test_no_images_no_results() -> None:
    assert list(run_pipeline(Doubling(), [], prepare, 4)) == []
