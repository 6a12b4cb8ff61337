"""Whether the service lives and is ready, what it counts, and what it offers."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail.serve.metrics import MEDIA_TYPE
from vitrail.serve.service import Service

OPENAPI_FILE = Path(__file__).with_name("openapi.json")


class HealthRoutes:
    def __init__(self, service: Service) -> None:
        self.service = service

    def list_routes(self) -> list[Route]:
        return [
            Route("/health", self.ready, methods=["GET"]),
            Route("/models/{model}/health", self.ready, methods=["GET"]),
            Route("/v2/health/ready", self.ready, methods=["GET"]),
            Route("/v2/health/live", self.live, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def ready(self, request: Request) -> Response:
        if "model" in request.path_params:
            self.service.models.find(request.path_params["model"])
        ready = self.service.is_ready
        # the text of the protocol says live, its clients read ready
        return JSONResponse({"live": True, "ready": ready}, 200 if ready else 503)

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        alive = self.service.is_alive
        return JSONResponse({"live": alive}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        return Response(self.service.render_metrics(), headers={"content-type": MEDIA_TYPE})

    async def openapi(self, request: Request) -> Response:  # noqa: ARG002
        return Response(OPENAPI_FILE.read_bytes(), media_type="application/json")
