"""The routes of the Open Inference Protocol, as tritonclient and KServe's client ask them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail import __version__
from vitrail.serve.model_table import HostedModel
from vitrail.serve.open_inference import HEADER_LENGTH, describe_tensor, read_infer_request, write_answer
from vitrail.serve.prediction_routes import admit_request, run_items
from vitrail.serve.request_errors import RequestError
from vitrail.serve.service import Service

EXTENSIONS = ["binary_tensor_data", "classification", "model_repository"]
VERSION = "1"  # of every model


class InferenceRoutes:
    def __init__(self, service: Service) -> None:
        self.service = service

    def list_routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        routes = [
            Route("/v2", self.describe_server, methods=["GET"]),
            Route("/v2/repository/index", self.list_models, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self.reload, methods=["POST"]),
        ]
        for place in (model, f"{model}/versions/{{version}}"):
            routes += [
                Route(place, self.describe_model, methods=["GET"]),
                Route(f"{place}/ready", self.model_ready, methods=["GET"]),
                Route(f"{place}/infer", self.infer, methods=["POST"]),
            ]
        return routes

    def find(self, request: Request) -> HostedModel:
        version = request.path_params.get("version", VERSION)
        model = self.service.models.find(request.path_params["model"])
        if version != VERSION:
            raise RequestError(404, f"{model.name} has no version {version[:20]!r}; expected {VERSION}")
        return model

    async def describe_server(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"name": "vitrail", "version": __version__, "extensions": EXTENSIONS})

    async def describe_model(self, request: Request) -> Response:
        model = self.find(request)
        about: dict[str, Any] = {"name": model.name, "versions": [VERSION], "platform": "vitrail"}
        served = model.served
        inputs, outputs = ([describe_tensor(each) for each in tensors] for tensors in (served.inputs, served.outputs))
        return JSONResponse({**about, "inputs": inputs, "outputs": outputs})

    async def model_ready(self, request: Request) -> Response:
        name, ready = self.find(request).name, self.service.is_ready
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def infer(self, request: Request) -> Response:
        model, service = self.find(request), self.service
        request.state.model = model.name
        admit_request(service, request, model)
        with service.bodies.count() as held:
            header_length = request.headers.get(HEADER_LENGTH)
            asked = read_infer_request(await service.bodies.read(request, held), header_length, model.served)
            settings = model.served.parse_settings(asked.parameters)
            names = list(dict.fromkeys(each.tensor.name for each in asked.outputs))
            seconds = min(asked.seconds or service.settings.timeout, service.settings.timeout)
            found = await run_items(service, request, model, asked.items, settings, names, seconds)
        answer, length = write_answer(model.name, asked, found)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, media_type="application/octet-stream", headers={HEADER_LENGTH: str(length)})

    async def list_models(self, request: Request) -> Response:
        self.service.check_admin(request)
        state = "READY" if self.service.is_ready else "UNAVAILABLE"
        listed = [{"name": each.name, "version": VERSION, "state": state, "reason": ""} for each in self.service.models]
        return JSONResponse(listed)

    async def reload(self, request: Request) -> Response:
        """Open a model again from the place that the command line named; the old one answers until it is warm."""
        self.service.check_admin(request)
        name = self.find(request).name
        request.state.model = name
        await self.service.reload(name)
        return JSONResponse({"name": name, "ready": True})
