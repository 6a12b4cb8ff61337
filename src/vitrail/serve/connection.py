"""Connections with limits that uvicorn does not have: of time for headers, bodies and unread answers, and of number.

It builds on a class of uvicorn's that is not a public interface: pyproject.toml bounds the version, and each limit
has a test in tests/serve/test_slow_connections.py.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitrail.serve.settings import ServeSettings

MAX_HEADER_BYTES = 64 * 1024
LAST_SECONDS = 0.5  # in which a connection without a request is kept at the end


class BoundedConnection(HttpToolsProtocol):
    """One connection; `make_connection_class` gives it the settings."""

    settings: ServeSettings
    on_rejected: Callable[[int, str], object]
    timer: asyncio.TimerHandle | None = None  # of the request that is being received
    write_timer: asyncio.TimerHandle | None = None
    header_bytes = 0
    in_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self.refuse(429, "too many connections; try again in 1 s", "full", b"retry-after: 1\r\n")
        else:
            self.start_timer(self.settings.header_timeout)

    def shutdown(self) -> None:
        """A request that is on its way is still answered; the guard closes the connection after its answer."""
        if self.is_idle:
            self.loop.call_later(min(LAST_SECONDS, self.settings.drain), self.close_if_idle)
        else:
            super().shutdown()

    def close_if_idle(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.in_headers:
            self.header_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.in_headers and self.header_bytes > MAX_HEADER_BYTES:
            self.refuse(431, f"the headers have more than {MAX_HEADER_BYTES:,} bytes; send fewer", "large")
        elif self.timer is None and self.timeout_keep_alive_task is None and self.is_idle:
            self.start_timer(self.settings.header_timeout)  # an empty line after a request

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_headers = True
        self.start_timer(self.settings.header_timeout)

    def on_headers_complete(self) -> None:
        self.in_headers, self.header_bytes = False, 0
        # the route reads the body and answers 408; this holds where nobody reads it any more
        self.start_timer(self.settings.body_timeout + 0.5)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.stop_timer()
        self.in_headers = True
        super().on_message_complete()

    def start_timer(self, seconds: float) -> None:
        self.stop_timer()
        self.timer = self.loop.call_later(seconds, self.end_slow_request)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end_slow_request(self) -> None:
        self.timer = None
        if self.transport.is_closing():
            return
        if self.is_idle and self.in_headers:
            self.refuse(408, "the headers were not complete in time; send the request again", "slow")
        else:
            self.transport.abort()

    def refuse(self, status: int, message: str, reason: str, headers: bytes = b"") -> None:
        """Answer without the application, and close."""
        self.on_rejected(status, reason)
        self.stop_timer()
        body = json.dumps({"error": message}).encode()
        length = f"content-length: {len(body)}\r\n".encode()
        common = b"content-type: application/json\r\nx-content-type-options: nosniff\r\nconnection: close\r\n"
        self.transport.write(STATUS_LINE[status] + common + headers + length + b"\r\n" + body)
        self.transport.close()
        self.start_write_timer()

    def send_400_response(self, msg: str) -> None:
        del msg
        self.refuse(400, "this is not a valid HTTP request; send HTTP/1.1", "invalid")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None
        super().resume_writing()

    def start_write_timer(self) -> None:
        """Give up on a client that does not read its answer."""
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.settings.body_timeout, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.start_write_timer()


def make_connection_class(
    settings: ServeSettings, on_rejected: Callable[[int, str], object]
) -> type[BoundedConnection]:
    """uvicorn makes the instances."""
    members = {"settings": settings, "on_rejected": staticmethod(on_rejected)}
    return type("Connection", (BoundedConnection,), members)
