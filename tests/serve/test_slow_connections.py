"""Connections that send or read slowly are closed, each by its limit; others are not affected."""

import http.client
import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from support.server_process import Server, run_server
from support.service_load import wait_until
from support.toy_served import save_digits

LIMITS = {"header_timeout": 0.4, "body_timeout": 0.8, "keep_alive": 1.0}
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("slow")
    with run_server(save_digits(folder / "digits"), "--max-connections", 100, "--drain", 0, settings=LIMITS) as running:
        yield running


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"POST", b"408"),
        (HEAD, b"408"),
        (HEAD + b"Content-Length: 5\r\n\r\n12", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n7\r\n", b"408"),
        (HEAD + b"Content-Length: 1\r\n\r\n7\r\n", b"200"),  # then half of another one
    ],
    ids=["nothing", "method", "headers", "body", "chunks", "second"],
)
def test_what_never_ends_is_closed(bounded: Server, sent: bytes, status: bytes) -> None:
    with bounded.connect() as connection:
        connection.sendall(sent)
        found = read_all(connection)
    assert found.startswith(b"HTTP/1.1 " + status)


def test_dripping_headers_do_not_extend_the_time(bounded: Server) -> None:
    with bounded.connect() as connection:
        connection.sendall(HEAD)
        connection.setblocking(False)
        end, closed = time.monotonic() + 20, False
        while not closed and time.monotonic() < end:
            try:
                connection.send(b"X-Drip: 1\r\n")
                closed = connection.recv(1000, socket.MSG_PEEK) != b""
            except BlockingIOError:
                pass
            except ConnectionError:
                closed = True
            time.sleep(0.05)
        assert closed


def test_an_answer_that_nobody_reads_is_dropped(bounded: Server) -> None:
    """Many requests for the description, on one connection, and none of the answers is read."""
    with bounded.connect() as connection:
        connection.setblocking(False)
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200
        end, closed = time.monotonic() + 20, False
        while not closed and time.monotonic() < end:
            try:
                connection.send(asked)
            except BlockingIOError:
                pass
            except ConnectionError:
                closed = True
            time.sleep(0.05)
        assert closed


def test_too_many_headers_and_connections(bounded: Server) -> None:
    with bounded.connect() as connection:
        connection.sendall(HEAD + b"X-Large: " + b"a" * 300_000)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")
    held = [bounded.connect() for _ in range(120)]
    with bounded.connect() as connection:
        found = read_all(connection)
    for each in held:
        each.close()
    assert found.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in found
    assert bounded.post("/", b"7").status == 200


def test_200_slow_connections_do_not_hold_up_a_normal_client(tmp_path: Path) -> None:
    beginnings = (b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n1", HEAD + b"Content-Length: 1\r\n\r\n7")
    with run_server(save_digits(tmp_path / "digits"), "--drain", 0, settings=LIMITS) as server:
        held = [server.connect() for _ in range(200)]
        for number, connection in enumerate(held):
            connection.sendall(beginnings[number % 4])
        for _ in range(20):
            assert server.post("/", b"7").status == 200
        for number, connection in enumerate(held):
            status = b"200" if number % 4 == 3 else b"408"
            assert read_all(connection).startswith(b"HTTP/1.1 " + status)
            connection.close()
        wait_until(lambda: server.read_metrics("vitrail_buffered_bytes")[""] == 0)
        assert server.read_metrics("vitrail_rejected_total")['reason="slow"'] >= 150


def test_a_fast_connection_may_be_kept(bounded: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", bounded.port, timeout=30)
    connection.connect()
    first = connection.sock
    for _ in range(3):
        connection.request("POST", "/", b"7")
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (200, True)
        assert connection.sock is first
        time.sleep(0.6)  # longer than the limit of headers
    connection.close()
