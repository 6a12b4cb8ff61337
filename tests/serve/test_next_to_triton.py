"""The same requests to a real Triton and to `vitrail serve`: names, shapes, datatypes, values, and what is refused.

The wheel nvidia-pytriton has Triton with its Python backend; without it the test is skipped.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.server_process import Answer, Server, run_server
from support.service_load import wait_until
from support.toy_served import LABELS, save_digits

REQUESTS = 200
MODEL = """
import numpy as np
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = utils.get_input_tensor_by_name(request, "pixels").as_numpy().sum(1, keepdims=True).astype(np.float32)
        values = {"logits": value * np.arange(1, 4, dtype=np.float32), "features": np.repeat(value, 2, 1)}
        wanted = request.requested_output_names()
        return utils.InferenceResponse([utils.Tensor(name, values[name]) for name in values if name in wanted])
"""
CONFIG = """
backend: "python"
max_batch_size: 64
input [{ name: "pixels" data_type: TYPE_UINT8 dims: [2] }]
output [
  { name: "logits" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" },
  { name: "features" data_type: TYPE_FP32 dims: [2] }
]
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A Triton that serves the same model as `digits`."""
    package = find_spec("pytriton")
    if package is None or package.origin is None:
        pytest.skip("needs nvidia-pytriton, which has a real Triton")
    folder = Path(package.origin).parent / "tritonserver"
    repository = tmp_path_factory.mktemp("triton")
    (repository / "digits" / "1").mkdir(parents=True)
    (repository / "digits" / "1" / "model.py").write_text(MODEL)
    (repository / "digits" / "config.pbtxt").write_text(CONFIG)
    (repository / "digits" / "labels.txt").write_text("\n".join(LABELS))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    backends = tmp_path_factory.mktemp("backends")
    shutil.copytree(folder / "backends", backends, dirs_exist_ok=True)
    shutil.copy(folder / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = {"model-repository": repository, "backend-directory": backends, "http-port": port}
    words |= {"http-address": "127.0.0.1", "allow-grpc": "false", "allow-metrics": "false"}
    command = [str(folder / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in words.items())]
    libraries = str(folder.parents[1] / "nvidia_pytriton.libs")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # whose packages the model imports
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "PATH": programs}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    found = Server(process, f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: process.poll() is not None or is_ready(found), 60)
        assert process.poll() is None
        yield found
    finally:
        process.kill()
        process.wait()


def is_ready(server: Server) -> bool:
    try:
        return server.get("/v2/models/digits/ready").status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    with run_server(save_digits(tmp_path_factory.mktemp("ours") / "digits"), "--drain", 0) as running:
        yield running


def make_infer_request(draw: Random) -> tuple[dict[str, Any], bytes]:
    """The JSON, and the bytes after it; about half of them have a fault."""
    count = draw.choice((1, 1, 2, 5))
    pixels = np.array([draw.randrange(256) for _ in range(2 * count)], np.uint8)
    tensor: dict[str, Any] = {"name": "pixels", "datatype": "UINT8", "shape": [count, 2]}
    raw = b""
    if draw.random() < 0.5:
        raw = pixels.tobytes()
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = pixels.tolist() if draw.random() < 0.5 else pixels.reshape(count, 2).tolist()
    found: dict[str, Any] = {"inputs": [tensor]}
    if draw.random() < 0.3:
        found["id"] = f"request-{draw.randrange(100)}"
    if draw.random() < 0.6:
        names = draw.sample(("logits", "features"), draw.choice((1, 2)))
        outputs: list[dict[str, Any]] = [{"name": name} for name in names]
        found["outputs"] = outputs
        if draw.random() < 0.4:
            outputs[0]["parameters"] = {"binary_data": draw.random() < 0.5}
        if draw.random() < 0.3:
            found["outputs"] = [{"name": "logits", "parameters": {"classification": draw.choice((1, 2, 3))}}]
    elif draw.random() < 0.5:  # with outputs, Triton ignores it, against the text of the protocol
        found["parameters"] = {"binary_data_output": draw.random() < 0.5}
    return (draw.choice(FAULTS)(found, tensor), raw) if draw.random() < 0.5 else (found, raw)


def set_key(target: str, key: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    def change(found: dict[str, Any], tensor: dict[str, Any]) -> dict[str, Any]:
        changed = found if target == "request" else tensor
        changed[key] = value
        return found

    return change


FAULTS = (
    *(set_key("tensor", "name", value) for value in ("pixel", "", 7)),
    *(set_key("tensor", "datatype", value) for value in ("FP32", "uint8", None)),
    *(set_key("tensor", "shape", value) for value in ([2], [1, 3], [3, 2], [-1, 2], [65, 2], "1,2", [1, 1, 2])),
    *(set_key("request", "inputs", value) for value in ([], None, {}, [7], "pixels")),
    *(set_key("request", "outputs", value) for value in ([{"name": "logit"}], "logits", [{}])),
)


def send(server: Server, request: dict[str, Any], raw: bytes) -> Answer:
    body = json.dumps(request).encode()
    headers = {"inference_header_content_length": str(len(body))} if raw else {}
    return server.post("/v2/models/digits/infer", body + raw, **headers)


def read_outputs(answer: Answer) -> dict[str, Any]:
    """Name, datatype, shape and values of each output, of JSON or of the bytes after it; the rest of the answer."""
    length = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    head, raw = json.loads(answer.body[:length]), answer.body[length:]
    found = dict[str, Any]()
    for each in head["outputs"]:
        size = each.get("parameters", {}).get("binary_data_size")
        values = each.get("data")
        if size is not None:
            part, raw = raw[:size], raw[size:]
            values = split_texts(part) if each["datatype"] == "BYTES" else np.frombuffer(part, "<f4").tolist()
        found[each["name"]] = each["datatype"], each["shape"], size is not None, values
    return {"outputs": found, "id": head.get("id", ""), "model": head["model_name"], "version": head["model_version"]}


def split_texts(raw: bytes) -> list[str]:
    found = list[str]()
    while raw:
        end = 4 + int.from_bytes(raw[:4], "little")
        found.append(raw[4:end].decode())
        raw = raw[end:]
    return found


@pytest.mark.slow
def test_answers_are_those_of_triton(triton: Server, ours: Server) -> None:
    answered = 0
    for seed in range(REQUESTS):
        request, raw = make_infer_request(Random(seed))
        expected, found = send(triton, request, raw), send(ours, request, raw)
        assert (found.status == 200) == (expected.status == 200), (request, expected.body, found.body)
        if expected.status == 200:
            answered += 1
            assert read_outputs(found) == read_outputs(expected), request
        else:
            assert 400 <= found.status < 500  # Triton has 500 for some
            assert set(found.json) == set(json.loads(expected.body)) == {"error"}
    assert REQUESTS // 4 < answered < REQUESTS


@pytest.mark.slow
def test_what_is_said_about_a_model_is_as_in_triton(triton: Server, ours: Server) -> None:
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/digits/ready",
        "/v2/models/digits/versions/1/ready",
    ):
        assert ours.get(path).status == triton.get(path).status == 200
    for path in ("/v2/models/digit", "/v2/models/digits/versions/2", "/v2/models/digit/ready"):
        assert 400 <= ours.get(path).status < 500
        assert 400 <= triton.get(path).status < 500
    expected, found = (server.get("/v2/models/digits").json for server in (triton, ours))
    assert {key: found[key] for key in ("name", "versions", "outputs")} == {
        key: expected[key] for key in ("name", "versions", "outputs")
    }
    assert [each for each in found["inputs"] if each["name"] == "pixels"] == expected["inputs"]
