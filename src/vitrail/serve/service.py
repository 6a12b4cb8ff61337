"""What all routes share: the models, the lanes that compute, and how one request is computed."""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from starlette.requests import Request

from vitrail.serve.body import BodyReader
from vitrail.serve.model_table import HostedModel, ModelTable
from vitrail.serve.request_errors import RequestError
from vitrail.serve.scheduler import Lane, Work
from vitrail.serve.settings import ServeSettings


class Service:
    """The state of one server."""

    def __init__(self, models: ModelTable, settings: ServeSettings) -> None:
        self.models, self.settings = models, settings
        self.bodies = BodyReader(settings)
        streams = settings.streams or max(each.served.streams for each in models)
        self.predictions = Lane("predict", streams, settings.max_wait)
        self.explanations = Lane("explore", 1, settings.max_explore_wait, low_priority=True)
        self.draining = False
        for each in models:
            self.add_queues(each)

    def add_queues(self, model: HostedModel) -> None:
        self.predictions.add_queue(model.name, model.seconds)
        self.explanations.add_queue(model.name, 5 * model.seconds)

    def start(self) -> None:
        self.predictions.start()
        self.explanations.start()

    def stop(self) -> None:
        self.predictions.stop()
        self.explanations.stop()

    @property
    def is_ready(self) -> bool:
        return not self.draining

    @property
    def is_alive(self) -> bool:
        return not (
            self.predictions.is_stuck(10 * self.settings.timeout)
            or self.explanations.is_stuck(10 * self.settings.explore_timeout)
        )

    async def compute(
        self,
        request: Request,
        lane: Lane,
        queue: str,
        functions: Sequence[Callable[[Work], Any]],
        seconds: float,
    ) -> list[Any]:
        """Compute the items of one request in order of arrival; none of them if the client leaves or time is up."""
        lane.check_wait(queue)
        loop, deadline = asyncio.get_running_loop(), monotonic() + seconds
        works = [Work(queue, function, deadline, loop.create_future()) for function in functions]
        for work in works:
            lane.submit(work)
        request.state.works = works
        answered = asyncio.gather(*(work.future for work in works))
        left = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            done, _ = await asyncio.wait((answered, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answered in done:
                return answered.result()
            if left in done:
                raise RequestError(499, "the client is gone", "gone")
            raise RequestError(504, f"not computed within {seconds:g} s; try again, or send a smaller request", "late")
        finally:
            left.cancel()
            if not answered.done() or answered.exception() is not None:
                for work in works:
                    lane.cancel(work)
                answered.cancel()


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
