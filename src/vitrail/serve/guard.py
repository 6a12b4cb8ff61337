"""Around every request: who may ask, the headers of every answer, errors as one line of JSON, the log, the counters."""

import traceback
from collections.abc import Sequence
from time import monotonic
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.base.errors import VitrailError
from vitrail.serve.request_errors import RequestError
from vitrail.serve.request_log import choose_request_id, read_trace, write_log
from vitrail.serve.scheduler import Work
from vitrail.serve.service import Service, check_bearer

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; style-src 'self'; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
}
ENCODED_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
PUBLIC_PATHS = ("/", "/favicon.svg", "/favicon.ico", "/health")
PUBLIC_FOLDERS = ("/page/", "/v2/health/")
ADMIN_FOLDER = "/v2/repository/"  # has a token of its own


class Guard:
    """Pure ASGI, so that routes see when a client leaves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # uvicorn is started without websockets
            return
        request, start = Request(scope, receive), monotonic()
        scope["app"] = self.app  # so that an unknown path is an exception
        request.state.request_id = choose_request_id(request.headers.get("x-request-id"))
        sent = {"status": 0, "bytes": 0}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                message["headers"] = [*message.get("headers", []), *self.list_headers(request)]
            else:
                sent["bytes"] += len(message.get("body", b""))
            await send(message)

        self.service.in_flight += 1
        try:
            error = await self.answer(request, scope, receive, send_with_headers)
            if error is not None and not sent["status"]:
                response = JSONResponse({"error": str(error)}, error.status, error.headers)
                await response(scope, receive, send_with_headers)
        finally:
            self.service.in_flight -= 1
        self.record(request, sent["status"], sent["bytes"], monotonic() - start, error)

    async def answer(self, request: Request, scope: Scope, receive: Receive, send: Send) -> RequestError | None:
        """Run the route; what it refuses, or fails at, is the result."""
        try:
            self.check(request)
            await self.app(scope, receive, send)
        except RequestError as error:
            return error
        except VitrailError as error:  # what a model says about its input
            return RequestError(400, str(error))
        except HTTPException as error:
            path = scope["path"][:200]
            return RequestError(error.status_code, f"{request.method} {path}: {error.detail}; see /openapi.json")
        except Exception:  # a bug: the client learns the id, the log has the traceback
            name = request.state.request_id
            write_log({"event": "bug", "id": name, "traceback": traceback.format_exc()})
            return RequestError(500, f"an error of the server; its log has the details of the request {name}")
        return None

    def check(self, request: Request) -> None:
        check_origin(request, self.service.settings.known_hosts)
        token, path = self.service.settings.token, request.scope["path"]
        public = request.method in ("GET", "HEAD") and (path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDERS))
        if token is not None and not public and not path.startswith(ADMIN_FOLDER):
            check_bearer(request, token)

    def list_headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        headers = [*ENCODED_HEADERS, (b"x-request-id", request.state.request_id.encode())]
        if timings := sum_timings(request):
            text = ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in timings.items())
            headers.append((b"server-timing", text.encode()))
        if self.service.draining:
            headers.append((b"connection", b"close"))
        return headers

    def record(self, request: Request, status: int, sent: int, seconds: float, error: RequestError | None) -> None:
        endpoint: Any = request.scope.get("endpoint")
        route = "unknown" if endpoint is None else endpoint.__name__
        model, works = list_state(request, "model", ""), list_state(request, "works", [])
        metrics, timings = self.service.metrics, sum_timings(request)
        status = status or 499  # the client left
        metrics.requests.labels(model, route, status).inc()
        metrics.seconds.labels(model, route).observe(seconds)
        for stage, value in timings.items():
            metrics.stages[stage].labels(model).observe(value)
        if works:
            metrics.items.labels(model).inc(sum("inference" in each.timings for each in works))
        if error is not None:
            metrics.rejected.labels(error.reason).inc()
        if not self.service.settings.log:
            return
        facts = {"id": request.state.request_id, "trace": read_trace(request.headers.get("traceparent"))}
        facts |= {"method": request.method, "route": route, "model": model or None, "status": status, "bytes": sent}
        facts |= {f"{name}_ms": round(1000 * value, 2) for name, value in {"total": seconds, **timings}.items()}
        write_log({**facts, "reason": None if error is None else error.reason})


def list_state(request: Request, name: str, default: Any) -> Any:
    """What a route has noted about a request."""
    return request.scope["state"].get(name, default)


def sum_timings(request: Request) -> dict[str, float]:
    """Seconds of each stage, of all items of a request; that of the queue is the longest."""
    works: list[Work] = list_state(request, "works", [])
    done = [dict(work.timings) for work in works if work.timings]
    if not done:
        return {}
    stages = dict.fromkeys(name for timings in done for name in timings)
    found = {name: sum(timings.get(name, 0.0) for timings in done) for name in stages}
    return {**found, "queue": max(timings["queue"] for timings in done)}


def check_origin(request: Request, known: Sequence[str] | None) -> None:
    """Refuse pages of other sites, which could otherwise ask through the browser of a person on this machine."""
    for name in ("host", "origin"):
        if len(given := request.headers.getlist(name)) > 1:
            raise RequestError(400, f"{len(given)} headers {name.capitalize()}; expected one", "auth")
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if known is not None and name.lower() not in known:
        raise RequestError(403, f"the host is {host[:100]!r}; expected {' or '.join(known)}", "auth")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise RequestError(403, f"the origin is {origin[:100]!r}; expected the page of this server", "auth")
