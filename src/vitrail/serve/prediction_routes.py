"""Predictions and embeddings in the dialect of Hugging Face: bytes, JSON with base64, or a form."""

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail.serve.hugging_face import read_request
from vitrail.serve.model_table import HostedModel
from vitrail.serve.scheduler import Work
from vitrail.serve.service import Service


class PredictionRoutes:
    def __init__(self, service: Service) -> None:
        self.service = service

    def list(self) -> list[Route]:
        return [
            Route("/", self.predict, methods=["POST"]),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/models/{model}", self.predict, methods=["POST"]),
        ]

    async def predict(self, request: Request) -> Response:
        """The classes of an image, a translation or a caption, as the kind of the model has it."""
        model = self.service.models.find(request.path_params.get("model"))
        self.service.bodies.check_length(request)
        self.service.predictions.check_wait(model.name)
        with self.service.bodies.count() as held:
            body = await self.service.bodies.read(request, held)
            asked = read_request(body, request.headers, request.query_params, model.served)
            settings = model.served.parse_settings(asked.parameters)
            name = model.served.outputs[0].name
            found = await run_items(self.service, request, model, asked.items, settings, [name])
        answers = [model.served.to_json(each, settings) for each in found]
        return JSONResponse(answers if asked.several else answers[0])


async def run_items(
    service: Service,
    request: Request,
    model: HostedModel,
    items: Sequence[tuple[str, Any]],
    settings: Any,
    outputs: Sequence[str],
    seconds: float | None = None,
) -> list[Mapping[str, Any]]:
    """The outputs of each item, in order. All items of a request run on the same model."""
    functions = [partial(compute_item, model, name, value, settings, outputs) for name, value in items]
    return await service.compute(
        request, service.predictions, model.name, functions, seconds or service.settings.timeout
    )


def compute_item(
    model: HostedModel, name: str, value: Any, settings: Any, outputs: Sequence[str], work: Work
) -> Mapping[str, Any]:
    start = perf_counter()
    item = model.served.prepare(name, value, settings)
    middle = perf_counter()
    found = model.served.run(item, outputs)
    work.timings |= {"decode": middle - start, "inference": perf_counter() - middle}
    return found
