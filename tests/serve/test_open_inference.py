"""The Open Inference Protocol, by the client of Triton and by hand."""

import json
from typing import Any

import numpy as np
import pytest
from support.server_process import Answer, Server
from support.toy_served import LABELS

triton: Any = pytest.importorskip("tritonclient.http")


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return triton.InferenceServerClient(f"127.0.0.1:{server.port}")


def make_input(name: str, values: Any, *, binary: bool = True) -> Any:
    kind = "UINT8" if name == "pixels" else "BYTES"
    array = np.array(values, np.uint8 if name == "pixels" else object)
    found = triton.InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def test_what_the_server_says_about_itself(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert client.get_server_metadata()["name"] == "vitrail"
    about = client.get_model_metadata("digits")
    assert about["inputs"] == [
        {"name": "file", "datatype": "BYTES", "shape": [-1]},
        {"name": "pixels", "datatype": "UINT8", "shape": [-1, 2]},
    ]
    assert [each["name"] for each in about["outputs"]] == ["logits", "features"]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_arrays(client: Any, binary: bool, compression: str | None) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("features", "logits")]
    given = [make_input("pixels", [[3, 4], [5, 6]], binary=binary)]
    found = client.infer("digits", given, outputs=outputs, request_id="mine", request_compression_algorithm=compression)
    assert found.as_numpy("logits").tolist() == [[7, 14, 21], [11, 22, 33]]
    assert found.as_numpy("features").tolist() == [[7, 7], [11, 11]]
    assert found.get_response()["id"] == "mine"


def test_files_of_any_size_and_classes(client: Any) -> None:
    found = client.infer("digits", [make_input("file", [b"7", b"80"])])  # all outputs, in binary
    assert found.as_numpy("features").tolist() == [[7, 7], [80, 80]]
    outputs = [triton.InferRequestedOutput("logits", class_count=2)]
    classes = client.infer("digits", [make_input("file", [[b"7"]])], outputs=outputs).as_numpy("logits")
    assert [each.decode().split(":", 2) for each in classes[0]] == [
        ["21.000000", "2", LABELS[2]],
        ["14.000000", "1", LABELS[1]],
    ]


def test_errors_reach_the_client(client: Any) -> None:
    with pytest.raises(triton.InferenceServerException, match="no model has the name 'digit'; did you mean digits"):
        client.infer("digit", [make_input("file", [b"7"])])
    with pytest.raises(triton.InferenceServerException, match="the file has 5 bytes; expected 1 to 9 digits"):
        client.infer("digits", [make_input("file", [b"seven"])])
    with pytest.raises(triton.InferenceServerException, match="digits has no version '2'; expected 1"):
        client.get_model_metadata("digits", "2")


PIXELS = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2], "data": [3, 4]}
FILE = {"name": "file", "datatype": "BYTES", "shape": [1], "data": ["Nw=="]}


def infer(server: Server, request: Any, raw: bytes = b"", **headers: str) -> Answer:
    body = json.dumps(request).encode()
    if raw:
        headers = {"inference_header_content_length": str(len(body)), **headers}
    return server.post("/v2/models/digits/infer", body + raw, **headers)


@pytest.mark.parametrize("data", [[3, 4], [[3, 4]]])
def test_lists_may_be_nested_or_flat(server: Server, data: Any) -> None:
    answer = infer(server, {"inputs": [{**PIXELS, "data": data}], "outputs": [{"name": "features"}]})
    assert answer.json == {
        "model_name": "digits",
        "model_version": "1",
        "outputs": [{"name": "features", "datatype": "FP32", "shape": [1, 2], "data": [7, 7]}],
    }
    assert infer(server, {"inputs": [FILE]}).json["outputs"][0]["data"] == [7, 14, 21]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "0 inputs; expected one of file, pixels"),
        ({"inputs": [PIXELS, FILE]}, "2 inputs; expected one of"),
        ({"inputs": ["pixels"]}, "1 inputs; expected one of"),
        ({"inputs": [{**PIXELS, "name": "pixel"}]}, "unknown input 'pixel'; expected one of file, pixels"),
        ({"inputs": [{**PIXELS, "datatype": "FP32"}]}, "pixels is 'FP32'; expected the datatype UINT8"),
        ({"inputs": [{**PIXELS, "shape": [2]}]}, "pixels has the shape [2]; expected [-1, 2]"),
        ({"inputs": [{**PIXELS, "shape": [0, 2]}]}, "expected [-1, 2]"),
        ({"inputs": [{**PIXELS, "shape": [True, 2]}]}, "expected [-1, 2]"),
        ({"inputs": [{**PIXELS, "shape": [65, 2]}]}, "65 items; expected at most 64"),
        ({"inputs": [{**PIXELS, "data": [1, 2, 3]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [1, 256]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [1, -1]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [1, 0.5]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [1, 10**40]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [[1], [2, 3]]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": [1, "a"]}]}, "pixels does not hold 2 values of UINT8"),
        ({"inputs": [{**PIXELS, "data": None}]}, "pixels has no data"),
        ({"inputs": [{**FILE, "data": ["a"]}]}, "the data is not valid base64"),
        ({"inputs": [{**FILE, "data": [7]}]}, "file is not a list of 1 texts"),
        ({"inputs": [PIXELS], "outputs": [{"name": "logit"}]}, "unknown output 'logit'; expected one of logits"),
        ({"inputs": [PIXELS], "outputs": "logits"}, "outputs is logits; expected a list of objects"),
        ({"inputs": [PIXELS], "parameters": {"timeout": "1"}}, "timeout is 1; expected microseconds"),
        ({"inputs": [PIXELS], "parameters": {"top": 1}}, "expected top_k from 1 to 3"),
        ({"inputs": [PIXELS], "id": 7}, "id is '7'; expected a text"),
    ],
)
def test_a_wrong_request_is_one_line(server: Server, request_: Any, message: str) -> None:
    answer = infer(server, request_)
    assert answer.status == 400
    assert message in answer.json["error"]


def test_wrong_lengths(server: Server) -> None:
    binary = {"name": "pixels", "datatype": "UINT8", "shape": [1, 2]}
    for raw, size, message in (
        (b"123", 3, "pixels has 3 bytes; expected 2"),
        (b"12", 3, "binary_data_size is 3; 2 bytes follow the JSON"),
        (b"12", None, "2 bytes after the JSON; expected binary_data_size"),
    ):
        answer = infer(server, {"inputs": [{**binary, "parameters": {"binary_data_size": size}}]}, raw)
        assert (answer.status, message in answer.json["error"]) == (400, True)
    for length in ("x", "-1", "9" * 30, "100000"):
        answer = infer(server, {"inputs": [PIXELS]}, inference_header_content_length=length)
        assert answer.json["error"].startswith("Inference-Header-Content-Length is ")
    file = {"name": "file", "datatype": "BYTES", "shape": [1]}
    for raw in (b"\x05\0\0\0007", b"\xff\xff\xff\xff7", b"\x01\0\0\00077", b"\x01\0"):
        answer = infer(server, {"inputs": [{**file, "parameters": {"binary_data_size": len(raw)}}]}, raw)
        assert answer.json["error"].startswith("the bytes do not hold 1 elements")
