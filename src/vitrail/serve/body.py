"""Bodies of requests, read with limits of size and time and counted while they wait."""

import asyncio
import zlib
from collections.abc import Generator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from vitrail.serve.request_errors import RequestError, full_error
from vitrail.serve.settings import ServeSettings

CLOSE = {"connection": "close"}  # the rest of the body is not read


class BodyReader:
    """Reads bodies; `buffered` is what all requests together hold."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings, self.buffered = settings, 0

    @contextmanager
    def count(self) -> Generator[list[int]]:
        """Count the bytes of one request until it is answered."""
        held = [0]
        try:
            yield held
        finally:
            self.buffered -= held[0]

    def check_length(self, request: Request) -> None:
        """Refuse a body that says that it is too long before any of it is read."""
        length = request.headers.get("content-length", "0")
        if int(length) > self.settings.max_body:  # httptools accepts digits only
            raise self.large_error(int(length))

    async def read(self, request: Request, held: list[int]) -> bytes:
        """The body, inflated if it is compressed."""
        self.check_length(request)
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip", "deflate"):
            raise RequestError(
                415, f"Content-Encoding {encoding[:40]!r}; expected gzip, deflate or none", headers=CLOSE
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                async for chunk in request.stream():
                    body += chunk
                    held[0] += len(chunk)
                    self.buffered += len(chunk)
                    if len(body) > self.settings.max_body:
                        raise self.large_error(len(body))
                    if self.buffered > self.settings.max_buffered:
                        error = full_error(1.0, self.settings.max_wait)
                        error.headers.update(CLOSE)
                        raise error
        except TimeoutError:
            raise RequestError(
                408,
                f"the body was not complete after {self.settings.body_timeout:g} s; send it faster",
                "slow",
                CLOSE,
            ) from None
        except ClientDisconnect:
            raise RequestError(499, "the client is gone", "gone") from None
        if encoding == "identity":
            return bytes(body)
        plain = await asyncio.to_thread(self.inflate, bytes(body))
        held[0] += len(plain)
        self.buffered += len(plain)
        return plain

    def inflate(self, body: bytes) -> bytes:
        """Never more than the limit of a body."""
        reader = zlib.decompressobj(wbits=47)  # the header says gzip or zlib
        try:
            plain = reader.decompress(body, self.settings.max_body + 1)
        except zlib.error:
            raise RequestError(400, "the body is not valid gzip; send it without Content-Encoding") from None
        if len(plain) > self.settings.max_body:
            raise self.large_error(len(plain))
        if not reader.eof or reader.unused_data:
            raise RequestError(400, "the compressed body is not complete; send it again")
        return plain

    def large_error(self, length: int) -> RequestError:
        most = self.settings.max_body
        return RequestError(
            413, f"the body has {length:,} bytes or more; at most {most:,} are accepted; send less", "large", CLOSE
        )
