"""The routes of the service as one ASGI application. No middleware of Starlette's hides that a client has left."""

from starlette.routing import Router
from starlette.types import ASGIApp

from vitrail.serve.guard import Guard
from vitrail.serve.health_routes import HealthRoutes
from vitrail.serve.page_routes import PageRoutes
from vitrail.serve.prediction_routes import PredictionRoutes
from vitrail.serve.service import Service


def build_app(service: Service) -> ASGIApp:
    groups = (PageRoutes(service), PredictionRoutes(service), HealthRoutes(service))
    return Guard(Router([route for group in groups for route in group.list()]), service)
