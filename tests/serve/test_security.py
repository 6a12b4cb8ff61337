"""Who may ask, what is never done, and the headers of every answer."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest
from support.server_process import Server, run_server
from support.toy_served import LABELS, save_digits

TOKEN = "a token of the tests"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(f"{TOKEN}\n")
    words = ("--token-file", folder / "token", "--proxy", "photos.example.org", "--drain", 0)
    with run_server(save_digits(folder / "digits"), *words, log=folder / "log") as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8001"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "photos.example.org"}, 403),
    ],
)
def test_foreign_hosts_and_origins(server: Server, headers: dict[str, str], status: int) -> None:
    answer = server.ask("POST", "/", b"7", headers)
    assert answer.status == status
    assert status == 200 or answer.json["error"].startswith(("the host is ", "the origin is "))


@pytest.mark.parametrize("name", ["Host", "Origin"])
def test_two_headers_of_one_name_are_refused(server: Server, name: str) -> None:
    """A proxy and this service could read different ones."""
    with server.connect() as connection:
        lines = [
            "GET /health HTTP/1.1",
            *(["Host: localhost"] * (name == "Origin")),
            *[f"{name}: http://localhost"] * 2,
        ]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_proxy_has_a_name(guarded: Server) -> None:
    authorized = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "192.0.2.1"}
    for host, status in (("photos.example.org", 200), ("localhost", 200), ("evil.example", 403)):
        assert guarded.ask("POST", "/", b"7", {**authorized, "Host": host}).status == status


@pytest.mark.parametrize(
    ("given", "status"),
    [(None, 401), ("Bearer wrong", 401), ("Bearer", 401), ("Bearer \xe9", 401), (f"Bearer {TOKEN}", 200)],
)
def test_a_token_is_needed_for_all_but_the_page_and_health(guarded: Server, given: str | None, status: int) -> None:
    headers = {} if given is None else {"Authorization": given}
    for method, path in (("POST", "/"), ("POST", "/models/digits"), ("GET", "/metrics"), ("GET", "/explore")):
        answer = guarded.ask(method, path, b"7" if method == "POST" else None, headers)
        assert answer.status == status
        assert status == 200 or answer.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/v2/health/live", "/v2/health/ready"):
        assert guarded.ask("GET", path, None, headers).status == 200


def test_nothing_secret_is_logged(guarded: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    guarded.post("/", b"123456789", authorization=f"Bearer {TOKEN}")
    log = next(tmp_path_factory.getbasetemp().glob("guarded*/log")).read_text()
    assert '"route": "predict"' in log
    assert TOKEN not in log
    assert "123456789" not in log


@pytest.mark.parametrize(
    "path",
    [
        "/page/../settings.py",
        "/page/..%2fsettings.py",
        "/page//etc/passwd",
        "/examples/..%2f..%2fSOURCES.txt",
        "/models/..%2fdigits",
        "/models/%2e%2e/explain",
        "/v2/models/../../etc/infer",
        "/models/digits%00",
    ],
)
def test_no_path_of_a_request_reaches_the_disk(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        answer = server.ask(method, path, b"7" if method == "POST" else None)
        assert answer.status in (404, 405)
        assert "/root" not in answer.json["error"]
        assert "site-packages" not in answer.json["error"]


def test_script_in_labels_and_names_stays_text(server: Server) -> None:
    assert "<script>" in LABELS[1]
    answer = server.post("/", b"7")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert LABELS[1] in [each["label"] for each in answer.json]
    for path in ("/<script>alert(1)</script>", "/models/<script>", "/examples/<script>"):
        found = server.ask("POST" if "models" in path else "GET", path.replace("<", "%3C").replace(">", "%3E"), b"7")
        assert (found.status, found.headers["content-type"]) == (404, "application/json")


def test_every_answer_has_a_policy_and_an_id(server: Server) -> None:
    for path in ("/", "/health", "/nothing", "/metrics", "/openapi.json"):
        headers = server.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self' 'wasm-unsafe-eval'")
        assert "require-trusted-types-for 'script'" in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    assert server.get("/health", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    for bad in ("a b", "a" * 65, "<script>"):
        assert server.get("/health", x_request_id=bad).headers["x-request-id"] != bad


def test_a_url_is_not_downloaded(server: Server) -> None:
    for url in ("http://127.0.0.1:1/cat.jpg", "HTTPS://example.com/x", "file:///etc/passwd"):
        answer = server.post("/", json.dumps({"inputs": url}))
        assert answer.status == 400


def test_requests_of_other_methods_and_upgrades(server: Server) -> None:
    assert server.ask("OPTIONS", "/", None, {"Origin": "https://evil.example"}).status == 403
    assert server.ask("DELETE", "/").status == 405
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "a", "Sec-WebSocket-Version": "13"}
    assert server.ask("GET", "/health", None, upgrade).status in (200, 400, 426)


def test_the_log_has_a_line_of_json_per_request(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits"), "--drain", 0, log=tmp_path / "log") as server:
        server.post(
            "/", b"7", x_request_id="first", traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        )
        server.post("/", b"seven")
        server.get("/nothing")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    asked = [line for line in lines if "route" in line]
    assert [(each["route"], each["status"], each.get("reason")) for each in asked] == [
        ("predict", 200, None),
        ("predict", 400, "invalid"),
        ("unknown", 404, "invalid"),
    ]
    assert asked[0]["id"] == "first"
    assert asked[0]["trace"].startswith("00-4bf9")
    for name in ("total_ms", "queue_ms", "decode_ms", "inference_ms"):
        assert asked[0][name] >= 0
    assert asked[0]["bytes"] > 0
