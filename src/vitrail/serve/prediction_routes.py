"""Predictions and embeddings in the dialect of Hugging Face: bytes, JSON with base64, or a form."""

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from time import perf_counter
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail.serve.hugging_face import Asked, read_request
from vitrail.serve.model_table import HostedModel
from vitrail.serve.request_errors import RequestError
from vitrail.serve.scheduler import Work
from vitrail.serve.service import Service

NPY = "application/x-npy"


class PredictionRoutes:
    """A route without the name of a model means the first one."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def list_routes(self) -> list[Route]:
        return [
            Route("/", self.predict, methods=["POST"]),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/models/{model}", self.predict, methods=["POST"]),
            Route("/embed", self.embed, methods=["POST"]),
            Route("/models/{model}/embed", self.embed, methods=["POST"]),
        ]

    async def predict(self, request: Request) -> Response:
        """The classes of an image, a translation or a caption, as the kind of the model has it."""
        model = self.service.models.find(request.path_params.get("model"))
        asked, settings, found = await self.run(request, model, model.served.outputs[0].name)
        answers = [model.served.to_json(each, settings) for each in found]
        return answer_json(answers if asked.several else answers[0])

    async def embed(self, request: Request) -> Response:
        """A list of numbers per item, or a .npy file if the client accepts it."""
        model = self.service.models.find(request.path_params.get("model"))
        features = model.served.features
        if features is None:
            raise RequestError(404, f"{model.name} has no features; expected a model that embeds its inputs")
        _, _, found = await self.run(request, model, features)
        values = np.stack([np.asarray(each[features]) for each in found])
        if NPY not in request.headers.get("accept", ""):
            return answer_json(values.tolist())
        file = BytesIO()
        np.save(file, values, allow_pickle=False)
        return Response(file.getvalue(), media_type=NPY)

    async def run(
        self, request: Request, model: HostedModel, output: str
    ) -> tuple[Asked, Any, list[Mapping[str, Any]]]:
        service = self.service
        request.state.model = model.name
        admit_request(service, request, model)
        with service.bodies.count() as held:
            asked = read_request(await service.bodies.read(request, held), request.query_params, model.served)
            settings = model.served.parse_settings(asked.parameters)
            return asked, settings, await run_items(service, request, model, asked.items, settings, [output])


def admit_request(service: Service, request: Request, model: HostedModel) -> None:
    """Refuse a request before its body is read: it is too large, or would wait too long."""
    service.bodies.check_length(request)
    service.predictions.check_wait(model.name)


def answer_json(data: Any) -> Response:
    try:
        return JSONResponse(data)
    except ValueError:  # NaN or infinity
        raise RequestError(500, "the model computed a value that is not a number; send another input") from None


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
