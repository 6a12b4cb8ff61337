"""The queues: who is computed, in which order, and who is never computed."""

import asyncio
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from vitrail.serve.request_errors import RequestError
from vitrail.serve.scheduler import Lane, Work


def run(test: Callable[[Lane], Any], streams: int = 1, **queues: float) -> None:
    """Run a coroutine with a lane that has a queue per name, with the mean seconds of its items."""

    async def main() -> None:
        lane = Lane("test", streams, max_wait=1.0)
        for name, mean in (queues or {"a": 0.1}).items():
            lane.add_queue(name, mean)
        try:
            await asyncio.wait_for(test(lane), 30)
        finally:
            lane.stop()

    asyncio.run(main())


def make_work(queue: str, compute: Callable[[Work], Any], seconds: float = 30) -> Work:
    return Work(queue, compute, monotonic() + seconds, asyncio.get_running_loop().create_future())


def test_models_take_turns_and_each_is_first_in_first_out() -> None:
    async def test(lane: Lane) -> None:
        order = list[str]()
        names = ["a1", "a2", "a3", "b1", "b2"]
        works = [make_work(name[0], lambda _, name=name: order.append(name)) for name in names]
        for work in works:
            lane.submit(work)
        lane.start()
        await asyncio.gather(*(work.future for work in works))
        assert order == ["a1", "b1", "a2", "b2", "a3"]

    run(test, a=0.1, b=0.1)


def test_the_expected_wait_counts_what_is_ahead() -> None:
    async def test(lane: Lane) -> None:
        for name in ("a", "a", "a", "b", "b", "b", "b", "b"):
            lane.submit(make_work(name, lambda _: None))
        assert lane.expected_wait("a") == pytest.approx((3 * 0.1 + 4 * 0.2) / 2)
        assert lane.expected_wait("b") == pytest.approx((5 * 0.2 + 3 * 0.1) / 2)
        lane.check_wait("a")
        for _ in range(4):
            lane.submit(make_work("b", lambda _: None))
        with pytest.raises(RequestError, match=r"the expected wait is 1\.05 s; at most 1 s are accepted") as caught:
            lane.check_wait("b")
        assert (caught.value.status, caught.value.reason) == (429, "full")
        assert caught.value.headers == {"retry-after": "2"}
        lane.check_wait("a")

    run(test, streams=2, a=0.1, b=0.2)


def test_cancelled_and_late_items_are_never_computed() -> None:
    async def test(lane: Lane) -> None:
        computed = list[str]()
        gone, late, last = (
            make_work("a", lambda _, name=name: computed.append(name), seconds)
            for name, seconds in (("gone", 30), ("late", -1), ("last", 30))
        )
        for work in (gone, late, last):
            lane.submit(work)
        lane.cancel(gone)
        lane.start()
        await last.future
        assert computed == ["last"]
        assert lane.skipped == 2

    run(test)


def test_an_item_that_fails_does_not_change_the_mean() -> None:
    def fail(_: Work) -> None:
        raise ValueError("broken")

    async def test(lane: Lane) -> None:
        lane.start()
        for _ in range(3):
            work = make_work("a", fail)
            lane.submit(work)
            with pytest.raises(ValueError, match="broken"):
                await work.future
        assert lane.means["a"] == 0.5
        work = make_work("a", lambda _: None)
        lane.submit(work)
        await work.future
        assert lane.means["a"] < 0.5

    run(test, a=0.5)


def test_a_worker_that_hangs_is_found() -> None:
    async def test(lane: Lane) -> None:
        free = threading.Event()
        lane.start()
        work = make_work("a", lambda _: free.wait(30))
        lane.submit(work)
        while not lane.running:
            await asyncio.sleep(0.01)
        assert not lane.is_stuck(1000)
        assert lane.is_stuck(0)
        free.set()
        await work.future

    run(test)
