"""The routes of the service as one ASGI application. No middleware of Starlette's hides that a client has left."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from vitrail.serve.guard import Guard
from vitrail.serve.health_routes import HealthRoutes
from vitrail.serve.inference_routes import InferenceRoutes
from vitrail.serve.page_routes import PageRoutes
from vitrail.serve.prediction_routes import PredictionRoutes
from vitrail.serve.service import Service


def build_app(service: Service) -> ASGIApp:
    return Guard(Router(list_routes(service), redirect_slashes=False), service)


def list_routes(service: Service) -> list[Route]:
    groups = (PredictionRoutes, InferenceRoutes, PageRoutes, HealthRoutes)
    return [route for group in groups for route in group(service).list_routes()]
