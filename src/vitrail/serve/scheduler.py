"""Worker threads that compute the items of requests: first in first out per model, models in turn.

A request is admitted by the time that it would wait, not by the length of a queue. An item whose client is gone or
whose deadline has passed is never computed.
"""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from vitrail.serve.request_errors import full_error

SMOOTHING = 0.1  # weight of the newest item in the mean time per item
LOW_PRIORITY = 15  # of `nice`, for work that must not slow down other lanes


@dataclass(eq=False)
class Work:
    """One item in a queue. `compute` runs in a worker thread; `timings` are what it reports, in seconds."""

    queue: str
    compute: Callable[["Work"], Any]
    deadline: float  # of `time.monotonic`
    future: "asyncio.Future[Any]"
    queued: float = field(default_factory=monotonic)
    cancelled: bool = False
    timings: dict[str, float] = field(default_factory=dict[str, float])


class Lane:
    """Some worker threads and the queues that they serve."""

    def __init__(self, name: str, streams: int, max_wait: float, *, low_priority: bool = False) -> None:
        self.name, self.streams, self.max_wait, self.low_priority = name, streams, max_wait, low_priority
        self.queues: dict[str, deque[Work]] = {}
        self.means: dict[str, float] = {}  # seconds per item
        self.turns: deque[str] = deque()
        self.running: dict[int, float] = {}  # thread → start of its item
        self.lock = threading.Condition()
        self.stopped = False
        self.skipped = 0  # items that were never computed
        self.threads = [
            threading.Thread(target=self.work, name=f"vitrail-{name}-{number}", daemon=True)
            for number in range(streams)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Let the workers end after the item that they compute."""
        with self.lock:
            self.stopped = True
            self.lock.notify_all()

    def add_queue(self, name: str, mean: float) -> None:
        with self.lock:
            if name not in self.queues:
                self.queues[name] = deque()
                self.turns.append(name)
            self.means[name] = mean

    def count_queued(self, name: str | None = None) -> int:
        return sum(len(queue) for key, queue in self.queues.items() if name in (None, key))

    def expected_wait(self, name: str) -> float:
        """Seconds until the next item of this model starts: the queues take turns, one item each."""
        ahead = len(self.queues[name])
        cost = sum(
            (ahead if key == name else min(len(queue), ahead + 1)) * self.means[key]
            for key, queue in self.queues.items()
        )
        return cost / self.streams

    def check_wait(self, name: str) -> None:
        if (wait := self.expected_wait(name)) > self.max_wait:
            raise full_error(wait, self.max_wait)

    def is_stuck(self, seconds: float) -> bool:
        """Whether a worker has computed one item for so long."""
        now = monotonic()
        return any(now - start > seconds for start in list(self.running.values()))

    def submit(self, work: Work) -> None:
        with self.lock:
            self.queues[work.queue].append(work)
            self.lock.notify()

    def cancel(self, work: Work) -> None:
        """Never compute it; without effect if it runs already."""
        with self.lock:
            work.cancelled = True
            if work in (queue := self.queues[work.queue]):
                queue.remove(work)
                self.skipped += 1

    def take(self) -> Work | None:
        """The next item to compute, or None at the end."""
        with self.lock:
            while not self.stopped:
                for _ in range(len(self.turns)):
                    name = self.turns[0]
                    self.turns.rotate(-1)
                    if self.queues[name]:
                        return self.queues[name].popleft()
                self.lock.wait()
        return None

    def work(self) -> None:
        if self.low_priority and sys.platform == "linux":  # elsewhere the priority is that of the process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        here = threading.get_ident()
        while (work := self.take()) is not None:
            start = monotonic()
            if work.cancelled or start > work.deadline:
                self.skipped += 1
                continue
            work.timings["queue"] = start - work.queued
            self.running[here] = start
            try:
                found, error = work.compute(work), None
            except Exception as failure:  # the request reports it
                found, error = None, failure
            del self.running[here]
            if error is None:  # an item that cannot be read is quicker than others
                self.means[work.queue] += SMOOTHING * (monotonic() - start - self.means[work.queue])
            loop = work.future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve, work.future, found, error)


def resolve(future: "asyncio.Future[Any]", found: Any, error: Exception | None) -> None:
    if future.done():  # the client is gone
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)
