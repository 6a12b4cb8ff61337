"""What Prometheus reads at /metrics. Labels come from fixed sets: names of models, routes, statuses, reasons."""

from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector

from vitrail.serve.request_errors import REASONS

if TYPE_CHECKING:
    from vitrail.serve.model_table import HostedModel

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MEDIA_TYPE = CONTENT_TYPE_LATEST
STAGES = ("queue", "decode", "inference")


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # they double the text
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("vitrail_requests", "Requests", ("model", "route", "status"), **given)
        self.seconds = Histogram(
            "vitrail_request_seconds", "Seconds per request", ("model", "route"), buckets=BUCKETS, **given
        )
        self.stages = {
            stage: Histogram(f"vitrail_{stage}_seconds", f"Seconds of {stage}", ("model",), buckets=BUCKETS, **given)
            for stage in STAGES
        }
        self.items = Counter("vitrail_items", "Photos or texts that were computed", ("model",), **given)
        self.rejected = Counter("vitrail_rejected", "Requests that were not answered", ("reason",), **given)
        self.queue_length = Gauge("vitrail_queue_length", "Items that wait", ("model",), **given)
        self.in_flight = Gauge("vitrail_in_flight", "Requests that are being answered", **given)
        self.buffered = Gauge("vitrail_buffered_bytes", "Bytes of the bodies that wait", **given)
        self.ready = Gauge("vitrail_ready", "1 if the service accepts requests", **given)
        self.model_info = Gauge(
            "vitrail_model_info", "What is served", ("model", "digest", "engine", "precision"), **given
        )
        ProcessCollector(registry=self.registry)
        for reason in REASONS:
            self.rejected.labels(reason)  # counters begin at 0

    def set_model(self, model: "HostedModel", before: "HostedModel | None" = None) -> None:
        if before is not None:
            self.model_info.remove(*list_labels(before))
        self.model_info.labels(*list_labels(model)).set(1)

    def count_refusal(self, status: int, reason: str) -> None:
        """What a connection refused before there was a request."""
        self.requests.labels("", "connection", status).inc()
        self.rejected.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def list_labels(model: "HostedModel") -> list[str]:
    facts = model.served.facts
    return [model.name, *(str(facts.get(name, "")) for name in ("digest", "engine", "precision"))]
