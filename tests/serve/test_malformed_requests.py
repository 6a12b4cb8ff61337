"""Generated requests of every wrong kind: each is refused as the fault of the client, or closed; none finds a bug."""

import base64
import gzip
import json
import socket
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
from support import hostile_images
from support.encoded_images import encode_test_image
from support.server_process import Server, run_server
from support.service_load import read_memory
from support.toy_exports import ExportFinder
from support.toy_served import save_digits

CLIENTS = 16
MEMORY = 600 * 2**20  # above that of the idle server: two decoded images, and the bodies
LIMITS = {"header_timeout": 0.3, "body_timeout": 0.5, "keep_alive": 1}
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW", "", "PO ST", "é")
PATHS = (
    *("/", "/predict", "/embed", "/explain", "/explore", "/metrics", "/health", "/openapi.json", "/page/main.js"),
    *("/models/digits", "/models/photos", "/models/digits/embed", "/models/digits/explain", "/models/photos/explore"),
    *(
        "/v2",
        "/v2/models/digits",
        "/v2/models/digits/infer",
        "/v2/models/photos/infer",
        "/v2/models/digits/versions/1/infer",
    ),
    *("/v2/repository/index", "/v2/repository/models/digits/load", "/v2/health/ready", "/examples/cat.jpg"),
    *(
        "*",
        "//",
        "/%00",
        "/..%2f..%2fetc/passwd",
        "/page/../../settings.py",
        "http://evil.example/",
        "/é",
        "/?" + "a=1&" * 500,
    ),
    *(
        "/?top_k=-1",
        "/?top_k=1&top_k=2",
        "/?%ff=%fe",
        "/models/%E2%80%AE",
        "/models/" + "a" * 5000,
        "/?top_k=" + "9" * 5000,
    ),
)
MODEL_PATHS = ("/", "/models/digits", "/models/digits/embed", "/models/digits/explain", "/v2/models/digits/infer")
ODD_HEADERS = (
    *("Content-Length: -1", "Content-Length: 1\r\nContent-Length: 2", "Content-Length: 0x7", "Content-Length: 1e3"),
    *("Content-Length: 99999999999999999999999", "Content-Length: +1", "Content-Length: 1, 1", "Content-Length:"),
    *("Transfer-Encoding: chunked\r\nContent-Length: 3", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x"),
    *(
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: chunked\r\n\tx",
        "X: \x00",
        "X: a\nY: b",
        ": empty",
        "no colon",
    ),
    *("Host: evil.example", "Host:", "Host: a\r\nHost: b", "Host: [::1", "Host: localhost:99999999", "Host: \xff"),
    *("Origin: null", "Origin: https://evil.example", "Origin: http://[", "Origin: \xff", "Origin: http://localhost:x"),
    *(
        "Expect: 100-continue",
        "Expect: 200-ok",
        "Upgrade: websocket\r\nConnection: Upgrade",
        "Upgrade: h2c\r\nConnection: Upgrade",
    ),
    *(
        "Content-Encoding: gzip",
        "Content-Encoding: br",
        "Content-Encoding: gzip, gzip",
        "Content-Encoding: " + "x" * 9000,
    ),
    *(
        "Inference-Header-Content-Length: 5",
        "Inference-Header-Content-Length: -5",
        "Inference-Header-Content-Length: ٣",
    ),
    *(
        "Accept: application/x-npy",
        "Accept-Encoding: gzip",
        "If-None-Match: *",
        "Range: bytes=0-1",
        "Authorization: Bearer \xe9",
    ),
    *(
        "X-Request-Id: " + "a" * 9000,
        "X-Request-Id: <script>",
        "traceparent: \x7f",
        "Content-Type: multipart/form-data",
    ),
)
JSON_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        10**40,
        1e400,
        "",
        "Nw==",
        "\ud800",
        "https://evil.example/x",
        "data:,",
        "\x00",
        [],
        [[]],
        {},
    ),
    *([None], ["Nw=="], ["Nw=="] * 65, {"a": 1}, [[["Nw=="]]], "A" * 10_000, [1, [2]], float("nan"), [True, False]),
)
TENSOR = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2], "data": [3, 4]}
FILE = {"name": "file", "datatype": "BYTES", "shape": [1], "data": ["Nw=="]}
PACKED = tuple(gzip.compress(content, 1) for content in (b"7", b"7", b"0" * 2**25, b"", b"seven"))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"


def write_json(value: object, draw: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return damage(text, draw) if draw.random() < 0.2 else text


def make_json(draw: Random) -> bytes:
    keys = ("inputs", "parameters", "id", "outputs", "instances", "top_k")
    found: dict[str, Any] = {key: draw.choice(JSON_VALUES) for key in draw.sample(keys, draw.randrange(4))}
    if draw.random() < 0.5:
        names = ("top_k", "function_to_apply", "timeout", "binary_data_output", "x")
        found["parameters"] = {name: draw.choice(JSON_VALUES) for name in draw.sample(names, 2)}
    return write_json(draw.choice((found, draw.choice(JSON_VALUES))), draw)


def make_inference(draw: Random) -> bytes:
    tensor: dict[str, Any] = {**draw.choice((TENSOR, FILE))}
    for key in draw.sample(("name", "datatype", "shape", "data", "parameters"), draw.randrange(3)):
        tensor[key] = draw.choice(JSON_VALUES)
    found: dict[str, object] = {"inputs": [tensor] * draw.choice((1, 1, 1, 2))}
    if draw.random() < 0.4:
        parameters = {draw.choice(("classification", "binary_data", "x")): draw.choice(JSON_VALUES)}
        found["outputs"] = [{"name": draw.choice(("logits", "features", "x", None)), "parameters": parameters}]
    if draw.random() < 0.3:
        found["parameters"] = {draw.choice(("timeout", "binary_data_output", "top_k")): draw.choice(JSON_VALUES)}
    return write_json(found, draw) + draw.choice((b"", b"12", b"\x01\0\0\x007"))


def make_form(draw: Random) -> bytes:
    name = draw.choice(("image", "", "a" * 5000, '"', "../../x", "<script>", "\\"))
    part = f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\n\r\n7\r\n'.encode()
    return damage(part * draw.choice((0, 1, 1, 2, 20)) + draw.choice((b"--b--\r\n", b"--b--", b"--b\r\n", b"")), draw)


def make_gzip(draw: Random) -> bytes:
    packed = draw.choice(PACKED)
    return draw.choice((packed, packed[: len(packed) // 2], packed + b"x", packed + packed, damage(packed, draw)))


def make_image(draw: Random) -> bytes:
    return draw.choice(hostile_images.GENERATORS)(draw)


def make_text(draw: Random) -> bytes:
    texts = (
        *[b"7"] * 12,
        b"",
        b"\0",
        EPS,
        b"\xff\xfe7\0",
        "٧".encode(),
        b"7" * 100_000,
        b"[" * 50_000,
        b"{" * 50_000,
        b"GIF89a",
        b"--b\r\n",
    )
    return draw.choice(texts)


BODIES: tuple[Callable[[Random], bytes], ...] = (make_json, make_inference, make_form, make_gzip, make_text)


def damage(content: bytes, draw: Random) -> bytes:
    """Some bytes are changed, removed or repeated."""
    found = bytearray(content)
    for _ in range(draw.randrange(3)):
        at = draw.randrange(len(found) + 1)
        found[at : at + draw.randrange(4)] = draw.choice(
            (b"", b"\0", b"\r\n", b"\xff", bytes([draw.randrange(256)]) * draw.randrange(40))
        )
    return bytes(found)


def make_chunks(body: bytes, draw: Random) -> bytes:
    """In chunks, some with wrong lengths."""
    size = draw.choice(
        (f"{len(body):x}", f"{len(body):x};a=b", "-1", "0x1", "fffffffffffffffff", "", "g", f"{len(body) + 1:x}")
    )
    return size.encode() + b"\r\n" + body + draw.choice((b"\r\n0\r\n\r\n", b"\r\n0\r\nX: y\r\n\r\n", b"", b"\r\n"))


def make_request(draw: Random) -> bytes:
    """A request as the bytes of a connection; most have a few faults, so that they reach far."""
    is_image = draw.random() < 0.1
    body = make_image(draw) if is_image else draw.choice(BODIES)(draw)
    method, path = "POST", draw.choice(draw.choice((MODEL_PATHS, PATHS)))
    if is_image:
        path = "/models/photos"
    if draw.random() < 0.2:
        method = draw.choice(METHODS)
    lines = [
        f"{method} {path} {draw.choice(('HTTP/1.1',) * 12 + ('HTTP/1.0', 'HTTP/2.0', 'HTTP/9', ''))}",
        "Host: localhost",
    ]
    chunked = draw.random() < 0.1
    lines.append(
        "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body) + draw.choice((0,) * 20 + (1, -1))}"
    )
    lines += draw.sample(ODD_HEADERS, draw.choice((0, 0, 1, 2)))
    if draw.random() < 0.02:
        lines += [f"X-{number}: {'a' * 1000}" for number in range(100)]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("utf-8", "surrogateescape")
    content = head + (make_chunks(body, draw) if chunked else body)
    return damage(content, draw) if draw.random() < 0.1 else content


def ask(server: Server, seed: int) -> int:
    """The status of the last answer to a request; 0 is none."""
    content, found = make_request(Random(seed)), b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        try:
            connection.sendall(content)
            while part := connection.recv(65536):
                found += part
        except ConnectionError:
            pass  # it has answered before all was sent
    return int(found.rpartition(b"HTTP/1.1 ")[2][:3] or 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, exported: ExportFinder) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("malformed")
    models = f"digits={save_digits(folder / 'digits')}", f"photos={exported('onnx')}"
    with run_server(
        *models, "--max-wait", 60, "--timeout", 60, "--drain", 0, settings=LIMITS, log=folder / "log"
    ) as running:
        yield running


def test_no_malformed_request_is_a_bug(
    server: Server,
    mutations: int,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> None:
    photo = base64.b64encode(encode_test_image("PNG", 9, 9))
    idle = read_memory(server.process.pid)
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(partial(ask, server), range(mutations)))
    counted = Counter(statuses)
    record_property("statuses", dict(sorted(counted.items())))
    assert server.process.poll() is None
    log = next(tmp_path_factory.getbasetemp().glob("malformed*/log")).read_text()
    bugs = [line for line in log.splitlines() if '"bug"' in line or "Traceback" in line]
    assert bugs == []
    assert {status for status in counted if status >= 500} == set()
    assert counted[200] > mutations // 100, "some reach a model"
    assert counted[400] > mutations // 10
    assert server.post("/", b"7").json[0]["score"] == 21
    assert server.post("/models/photos", json.dumps({"inputs": photo.decode()})).status == 200
    assert server.read_metrics("vitrail_in_flight")[""] == 1  # this request
    assert server.read_metrics("vitrail_buffered_bytes")[""] == 0
    assert set(server.read_metrics("vitrail_queue_length").values()) == {0}
    assert read_memory(server.process.pid) - idle < MEMORY
