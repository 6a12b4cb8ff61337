"""What all routes share: the models, the lanes that compute, and how one request is computed."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from starlette.requests import Request

from vitrail.base.errors import VitrailError
from vitrail.serve.body import BodyReader
from vitrail.serve.metrics import Metrics
from vitrail.serve.model_table import HostedModel, ModelTable, host_model
from vitrail.serve.request_errors import RequestError
from vitrail.serve.request_log import write_log
from vitrail.serve.scheduler import Lane, Work
from vitrail.serve.settings import ServeSettings

STUCK = 10  # timeouts that one item may take before the service is restarted
EXPLORE_COST = 5  # of an explanation relative to a prediction, until the first was measured


class Service:
    """The state of one server."""

    def __init__(self, models: ModelTable, settings: ServeSettings) -> None:
        self.models, self.settings = models, settings
        self.bodies, self.metrics = BodyReader(settings), Metrics()
        streams = max(each.served.streams for each in models)
        self.predictions = Lane("predict", streams, settings.max_wait)
        self.explanations = Lane("explore", 1, settings.max_explore_wait, low_priority=True)
        self.lanes = (self.predictions, self.explanations)
        self.draining, self.in_flight = False, 0
        self.reloading = asyncio.Lock()
        for each in models:
            self.add_model(each)

    def add_model(self, model: HostedModel, before: HostedModel | None = None) -> None:
        self.predictions.add_queue(model.name, model.seconds)
        self.explanations.add_queue(model.name, EXPLORE_COST * model.seconds)
        self.metrics.set_model(model, before)

    def start(self) -> None:
        for lane in self.lanes:
            lane.start()

    def stop(self) -> None:
        for lane in self.lanes:
            lane.stop()

    @property
    def is_ready(self) -> bool:
        return not self.draining

    @property
    def is_alive(self) -> bool:
        """The event loop answers; no worker hangs."""
        longest = (self.settings.timeout, self.settings.explore_timeout)
        return not any(lane.is_stuck(STUCK * each) for lane, each in zip(self.lanes, longest, strict=True))

    def check_admin(self, request: Request) -> None:
        token = self.settings.admin_token
        if token is None:
            raise RequestError(403, "this server has no admin token; start it with one", "auth")
        check_bearer(request, token)

    def render_metrics(self) -> bytes:
        found = self.metrics
        found.in_flight.set(self.in_flight)
        found.buffered.set(self.bodies.buffered)
        found.ready.set(self.is_ready)
        for name in self.models.names:
            found.queue_length.labels(name).set(sum(lane.count_queued(name) for lane in self.lanes))
        return found.render()

    async def reload(self, name: str) -> None:
        """Open a model again, warm it up, then let it answer; one that cannot be opened changes nothing."""
        async with self.reloading:
            before = self.models.find(name)
            try:
                model = await asyncio.to_thread(host_model, name, before.source, self.settings.options)
            except VitrailError as error:
                write_log({"event": "reload", "model": name, "error": str(error)})
                raise RequestError(400, f"{name} was not reloaded, the model before answers: see the log") from None
            self.add_model(model, before)
            self.models.replace(model)
            write_log({"event": "reload", "model": name, "digest": model.served.facts.get("digest")})

    async def reload_all(self) -> None:
        for name in self.models.names:
            try:
                await self.reload(name)
            except RequestError:
                continue  # it is in the log

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
            for work in works:
                if not work.future.done():
                    lane.cancel(work)
                    work.future.cancel()  # its result or error is not waited for


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_bearer(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if not secrets.compare_digest(given.encode(), token.encode()):
        raise RequestError(
            401,
            "the token is missing or wrong; send Authorization: Bearer TOKEN",
            "auth",
            {"www-authenticate": "Bearer"},
        )
