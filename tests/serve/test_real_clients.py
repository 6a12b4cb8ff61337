"""Clients as people use them, on a model of photos: each has the classes of `Predictor`, alone and under load."""

import base64
import json
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from support.encoded_images import encode_test_image
from support.server_process import Server, run_server
from support.service_load import ask_at_once
from support.toy_exports import ExportFinder

from vitrail import Predictor

Scores = dict[str, float]
PHOTOS = [encode_test_image("JPEG", 60 + number, 90 - number) for number in range(8)]


@pytest.fixture(scope="module")
def server(exported: ExportFinder) -> Generator[Server]:
    with run_server(f"fp32={exported('onnx')}", f"int8={exported('int8')}", "--max-wait", 60, "--drain", 0) as running:
        yield running


@pytest.fixture(scope="module")
def expected(exported: ExportFinder) -> list[Scores]:
    """What `vitrail predict` has for each photo."""
    predictor = Predictor(str(exported("onnx")), threads=1)
    return [{str(each.label): each.probability for each in predictor.predict(photo).top} for photo in PHOTOS]


def read_scores(answer: Any) -> Scores:
    return {each["label"]: each["score"] for each in answer}


def ask_with_requests(server: Server, photo: Path) -> list[Scores]:
    """The file itself, a form, and JSON."""
    address, content = f"{server.address}/", photo.read_bytes()
    encoded = {"inputs": base64.b64encode(content).decode(), "parameters": {"top_k": 5}}
    answers = (
        requests.post(address, data=content, timeout=30),
        requests.post(address, files={"image": ("photo.jpg", content)}, timeout=30),
        requests.post(f"{address}models/fp32", json=encoded, timeout=30),
    )
    return [read_scores(each.json()) for each in answers]


def ask_with_curl(server: Server, photo: Path) -> list[Scores]:
    found = list[Scores]()
    for words in (["-F", f"image=@{photo}"], ["--data-binary", f"@{photo}"], ["-T", f"{photo}", "-X", "POST"]):
        try:
            done = subprocess.run(["curl", "-sS", *words, f"{server.address}/predict"], capture_output=True, check=True)
        except FileNotFoundError:
            pytest.skip("needs curl")
        found.append(read_scores(json.loads(done.stdout)))
    return found


def ask_with_hugging_face(server: Server, photo: Path) -> list[Scores]:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=server.address)
    answers = [client.image_classification(given) for given in (photo, photo.read_bytes(), str(photo))]
    answers.append(client.image_classification(photo, top_k=5))
    return [{each.label: each.score for each in answer} for answer in answers]


def softmax(labels: list[str], logits: Any) -> Scores:
    """Of a client that has read logits."""
    powers = np.exp(logits - np.max(logits))
    return dict(zip(labels, (powers / powers.sum()).tolist(), strict=True))


def ask_with_triton(server: Server, photo: Path) -> list[Scores]:
    triton = pytest.importorskip("tritonclient.http", reason="needs the extra `test`")
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}")
    image = triton.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([photo.read_bytes()], object))
    wanted = triton.InferRequestedOutput("logits", class_count=5)
    classes = client.infer("fp32", [image], outputs=[wanted]).as_numpy("logits")[0]
    labels = {int(each.decode().split(":")[1]): each.decode().split(":", 2)[2] for each in classes}
    logits = client.infer("fp32", [image]).as_numpy("logits")[0]
    return [softmax([labels[index] for index in range(5)], logits)]


def ask_with_kserve(server: Server, photo: Path) -> list[Scores]:
    kserve = pytest.importorskip("kserve", reason="needs kserve")
    import asyncio

    image = kserve.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([photo.read_bytes()], object), binary_data=True)
    request = kserve.InferRequest(model_name="fp32", infer_inputs=[image])

    async def ask() -> Any:
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        assert await client.is_server_ready(server.address)
        assert await client.is_server_live(server.address)
        return await client.infer(server.address, request, model_name="fp32")

    logits = asyncio.run(ask()).outputs[0].as_numpy()[0]
    return [softmax(list(read_labels(server)), logits)]


def read_labels(server: Server) -> list[str]:
    """By index, from the classes that the protocol names."""
    body = {
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(PHOTOS[0]).decode()]}]
    }
    outputs = [{"name": "logits", "parameters": {"classification": 5}}]
    answer = server.post("/v2/models/fp32/infer", json.dumps({**body, "outputs": outputs})).json
    names = [each.split(":", 2) for each in answer["outputs"][0]["data"]]
    return [label for _, _, label in sorted(names, key=lambda name: int(name[1]))]


CLIENTS = (ask_with_requests, ask_with_curl, ask_with_hugging_face, ask_with_triton, ask_with_kserve)


@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__.removeprefix("ask_with_"))
def test_every_client_has_the_classes_of_predict(
    ask: Callable[[Server, Path], list[Scores]],
    server: Server,
    expected: list[Scores],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it forbids even this machine
    for number, content in enumerate(PHOTOS[:3]):
        (tmp_path / "photo.jpg").write_bytes(content)
        for found in ask(server, tmp_path / "photo.jpg"):
            assert max(found, key=lambda label: found[label]) == max(expected[number], key=expected[number].__getitem__)
            for label, score in expected[number].items():
                assert found[label] == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_answers_under_load_are_bit_identical_to_those_alone(server: Server, name: str) -> None:
    """int8 computes its range over what it is given: in a batch it would be that of the others."""
    path = f"/models/{name}?top_k=5&function_to_apply=none"
    alone = [server.post(path, photo).body for photo in PHOTOS]
    assert len(set(alone)) == len(PHOTOS)
    found = ask_at_once(server, PHOTOS * 6, path)
    assert [each.body for each in found] == alone * 6


def test_exported_models_are_served_without_torch(server: Server) -> None:
    loaded = Path(f"/proc/{server.process.pid}/maps")
    if not loaded.exists():
        pytest.skip("needs Linux")
    assert "libtorch" not in loaded.read_text()
    reasons = [each["reason"] for each in server.get("/explore").json["models"]]
    assert all("is an exported model, whose layers cannot be accessed" in reason for reason in reasons)
