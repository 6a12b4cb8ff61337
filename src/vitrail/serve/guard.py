"""Around every request: who may ask, the headers of every answer, and errors as one line of JSON."""

import secrets
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.base.errors import VitrailError
from vitrail.serve.request_errors import RequestError
from vitrail.serve.service import Service
from vitrail.serve.settings import LOCAL_NAMES

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


class Guard:
    """Pure ASGI, so that routes see when a client leaves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *ENCODED_HEADERS]
            await send(message)

        request = Request(scope, receive)
        scope["app"] = self.app  # so that an unknown path is an exception
        try:
            check_origin(request, local=self.service.settings.is_local)
            check_token(request, self.service.settings.token)
            await self.app(scope, receive, send_with_headers)
        except RequestError as error:
            await answer_error(error)(scope, receive, send_with_headers)
        except VitrailError as error:
            await answer_error(RequestError(400, str(error)))(scope, receive, send_with_headers)
        except HTTPException as error:
            await answer_error(
                RequestError(
                    error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}; see /openapi.json"
                )
            )(scope, receive, send_with_headers)


def answer_error(error: RequestError) -> Response:
    return JSONResponse({"error": str(error)}, error.status, error.headers)


def check_origin(request: Request, *, local: bool) -> None:
    """Refuse pages of other sites, which could otherwise ask through the browser of a person on this machine."""
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if local and name.lower() not in LOCAL_NAMES:
        raise RequestError(403, f"the host is {host[:100]!r}; expected {' or '.join(LOCAL_NAMES)}", "auth")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise RequestError(403, f"the origin is {origin[:100]!r}; expected the page of this server", "auth")


def check_token(request: Request, token: str | None) -> None:
    path = request.url.path
    public = path in ("/", "/favicon.svg", "/health") or path.startswith(("/page/", "/v2/health/"))
    if token is None or (public and request.method == "GET"):
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if not secrets.compare_digest(given.encode(), token.encode()):
        raise RequestError(
            401,
            "the token is missing or wrong; send Authorization: Bearer TOKEN",
            "auth",
            {"www-authenticate": "Bearer"},
        )
