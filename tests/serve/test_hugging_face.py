"""Bytes, JSON and forms; the bytes decide which it is."""

import base64
import gzip
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.server_process import Server

SEVEN = [
    {"label": "two", "score": 21.0},
    {"label": "one: <script>", "score": 14.0},
    {"label": "zero", "score": 7.0},
]
ENCODED = base64.b64encode(b"7").decode()


def make_form(*fields: tuple[str, str, bytes]) -> bytes:
    """Fields are (name, more of its header, content)."""
    parts = [
        f'--mark\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        for name, more, content in fields
    ]
    return b"".join(parts) + b"--mark--\r\n"


FILE = ("image", '; filename="x.jpg"', b"7")


@pytest.mark.parametrize("path", ["/", "/predict", "/models/digits"])
@pytest.mark.parametrize(
    "body",
    [
        b"7",
        json.dumps({"inputs": ENCODED}).encode(),
        json.dumps({"inputs": f"data:image/jpeg;base64,{ENCODED}"}).encode(),
        make_form(FILE),
    ],
    ids=["bytes", "json", "data url", "form"],
)
@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "image/jpeg", "text/html"])
def test_every_dialect_has_the_same_answer(server: Server, path: str, body: bytes, content_type: str | None) -> None:
    answer = server.ask("POST", path, body, {"content-type": content_type} if content_type else {})
    assert (answer.status, answer.json) == (200, SEVEN)


def test_parameters_come_from_the_address_the_json_and_the_form(server: Server) -> None:
    for answer in (
        server.post("/?top_k=1", b"7"),
        server.post("/", json.dumps({"inputs": ENCODED, "parameters": {"top_k": 1}})),
        server.post("/", make_form(FILE, ("top_k", "", b"1"))),
    ):
        assert answer.json == SEVEN[:1]


def test_several_inputs_have_several_answers(server: Server) -> None:
    encoded = [base64.b64encode(str(number).encode()).decode() for number in range(20)]
    answer = server.post("/", json.dumps({"inputs": encoded, "parameters": {"top_k": 1}}))
    assert [each[0]["score"] for each in answer.json] == [3 * number for number in range(20)]


def test_embeddings_are_json_or_npy(server: Server) -> None:
    assert server.post("/embed", b"7").json == [[7, 7]]
    file = server.post("/models/digits/embed", b"7", accept="application/x-npy")
    assert file.headers["content-type"] == "application/x-npy"
    assert np.array_equal(np.load(io.BytesIO(file.body)), np.array([[7, 7]], np.float32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send the bytes of a file"),
        (b"seven", "the file has 5 bytes; expected 1 to 9 digits"),
        (b"{", "the body is not valid JSON"),
        (b"{}", "inputs is nothing; expected a file in base64"),
        (b'{"inputs": 3}', "inputs is int; expected a file in base64"),
        (b'{"inputs": []}', "0 inputs; expected 1 to 64"),
        (json.dumps({"inputs": [ENCODED] * 65}).encode(), "65 inputs; expected 1 to 64"),
        (b'{"inputs": "a"}', "inputs is not valid base64"),
        (b'{"inputs": "https://example.com/cat.jpg"}', "inputs is a URL, which is not downloaded; send the file"),
        (b'{"inputs": "Nw==", "parameters": [1]}', "parameters is list; expected an object"),
        (b'{"inputs": "Nw==", "parameters": {"top_k": 0}}', "expected top_k from 1 to 3"),
        (b"[" * 100_000, "the file has 100000 bytes"),
        (b'{"inputs": ' + b"[" * 100_000, "the body is not valid JSON"),
        (make_form(FILE)[:-6], "its last boundary is missing"),
        (make_form(FILE, FILE), "the form has 2 files; expected one"),
        (make_form(("image", "", b"7")), "the form has 0 files; expected one"),
        (make_form(FILE, *[("a", "", b"1")] * 16), "the form has 17 fields; expected at most 16"),
    ],
)
def test_a_wrong_body_is_one_line(server: Server, body: bytes, message: str) -> None:
    answer = server.post("/", body)
    assert answer.status == 400
    assert message in answer.json["error"]
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", ["/", "/v2/models/digits/infer"])
def test_json_of_very_many_values_is_not_parsed(server: Server, path: str) -> None:
    """16 MB of empty lists take seconds, in which nobody else would be answered."""
    answer = server.post(path, gzip.compress(b'{"inputs": [' + b"[]," * 500_000 + b"0]}"), content_encoding="gzip")
    assert answer.status == 413
    assert "the JSON has 1,000,004 brackets, commas and quotes; at most 500,000" in answer.json["error"]


def test_unknown_models_and_paths(server: Server) -> None:
    for path in ("/models/digit", "/models/digit/embed", "/models/digit/explain"):
        answer = server.post(path, b"7")
        assert (answer.status, answer.json["error"]) == (404, "no model has the name 'digit'; did you mean digits?")
    assert server.post("/models/x", b"7").json["error"] == "no model has the name 'x'; expected one of digits"
    assert server.get("/nothing").json["error"] == "GET /nothing: Not Found; see /openapi.json"
    assert server.ask("DELETE", "/embed").status == 405


@pytest.mark.parametrize("words", [["-F", "image=@{}"], ["--data-binary", "@{}"], ["-T", "{}", "-X", "POST"]])
def test_curl(server: Server, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"7")
    command = ["curl", "-sS", *(word.format(tmp_path / "photo.jpg") for word in words), server.address + "/predict"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs curl")
    assert (json.loads(done.stdout), done.stderr) == (SEVEN, "")


def test_the_client_of_hugging_face(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import InferenceClient, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it forbids even this machine
    (tmp_path / "photo.jpg").write_bytes(b"7")
    for address in (server.address, f"{server.address}/models/digits"):
        client = InferenceClient(model=address)
        for given in (tmp_path / "photo.jpg", b"7"):
            assert [each.label for each in client.image_classification(given)] == [each["label"] for each in SEVEN]
        assert [each.score for each in client.image_classification(b"7", top_k=2)] == [21, 14]
