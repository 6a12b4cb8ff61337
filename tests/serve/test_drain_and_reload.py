"""SIGTERM ends without losing a request; SIGHUP and the admin route replace models while they answer."""

import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.encoded_images import encode_test_image
from support.server_process import Server, run_server
from support.service_load import ask_until_refused, read_memory, wait_until
from support.toy_exports import ExportFinder
from support.toy_served import save_digits

ADMIN = "an admin token of the tests"


def start_clients(server: Server, count: int, results: list[Any]) -> list[threading.Thread]:
    clients = [threading.Thread(target=ask_until_refused, args=(server, b"7", results)) for _ in range(count)]
    for client in clients:
        client.start()
    return clients


@pytest.mark.parametrize("round_", [0, 2, *(pytest.param(number, marks=pytest.mark.slow) for number in range(3, 21))])
def test_sigterm_loses_no_request(round_: int, tmp_path: Path) -> None:
    results = list[Any]()
    with run_server(save_digits(tmp_path / "digits", seconds=0.02), "--drain", 0.6, log=tmp_path / "log") as server:
        clients = start_clients(server, 2, results)
        wait_until(lambda: len(results) > 5 * (1 + round_))
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/v2/health/ready").status == 503)
        assert server.get("/v2/health/live").status == 200
        assert server.post("/", b"7").headers["connection"] == "close"
        before = len(results)
        for client in clients:
            client.join(30)
        assert server.process.wait(10) == 0
    assert len(results) > before, "requests are accepted while it drains"
    assert [each for each in results if each[0] != 200] == []


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits"), "--drain", 60) as server:
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health").status == 503)
        server.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("reloads", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_reloading_loses_no_request(reloads: int, tmp_path: Path) -> None:
    """Every answer is of exactly one model, and of a broken one nothing is seen."""
    folder, results = save_digits(tmp_path / "digits"), list[Any]()
    with run_server(folder, "--drain", 0.6, env={"VITRAIL_ADMIN_TOKEN": ADMIN}, log=tmp_path / "log") as server:
        clients, seen, memory = start_clients(server, 2, results), list[float](), 0
        for version in range(2, 2 + reloads):
            save_digits(folder, version=version)
            if version % 2:
                server.send_signal(signal.SIGHUP)
            else:
                path = "/v2/repository/models/digits/load"
                assert server.post(path, b"", authorization=f"Bearer {ADMIN}").status == 200
            wait_until(lambda version=version: server.post("/", b"1").json[0]["score"] == 3 * version)
            seen.append(version)
            if version == 4:
                memory = read_memory(server.process.pid, "VmRSS")
        save_digits(folder, version="broken")  # type: ignore[arg-type]
        answer = server.post("/v2/repository/models/digits/load", b"", authorization=f"Bearer {ADMIN}")
        assert (answer.status, answer.json["error"]) == (
            400,
            "digits was not reloaded, the model before answers: see the log",
        )
        assert server.post("/", b"1").json[0]["score"] == 3 * (1 + reloads)
        assert "is broken; train it again" in (tmp_path / "log").read_text()
        assert read_memory(server.process.pid, "VmRSS") < 1.2 * memory
        server.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(30)
    assert [each for each in results if each[0] != 200] == []
    for _, answer in results:
        versions = {each["score"] / (7 * (3 - place)) for place, each in enumerate(answer)}
        assert len(versions) == 1
        assert versions <= {1, *seen}


def test_reloading_needs_the_admin_token(tmp_path: Path) -> None:
    folder = save_digits(tmp_path / "digits")
    path = "/v2/repository/models/digits/load"
    with run_server(folder, env={"VITRAIL_TOKEN": "a token of the tests", "VITRAIL_ADMIN_TOKEN": ADMIN}) as server:
        for given, status in ((None, 401), ("a token of the tests", 401), (ADMIN, 200)):
            headers = {} if given is None else {"authorization": f"Bearer {given}"}
            assert server.ask("POST", path, b"", headers).status == status
        listed = server.post("/v2/repository/index", b"", authorization=f"Bearer {ADMIN}").json
        assert listed == [{"name": "digits", "version": "1", "state": "READY", "reason": ""}]
    with run_server(folder) as server:
        answer = server.post(path, b"")
        assert (answer.status, answer.json["error"]) == (403, "this server has no admin token; start it with one")


@pytest.mark.slow
def test_reloading_an_exported_model_keeps_the_memory(tmp_path: Path, exported: ExportFinder) -> None:
    """50 times, one of them broken, while photos are classified: every answer is that of the model."""
    folder = shutil.copytree(exported("int8"), tmp_path / "photos")
    photo, path = encode_test_image("JPEG", 60, 90), "/v2/repository/models/photos/load"
    with run_server(folder, "--drain", 0.6, env={"VITRAIL_ADMIN_TOKEN": ADMIN}) as server:
        expected, results, memory = server.post("/", photo).json, list[Any](), 0
        clients = [threading.Thread(target=ask_until_refused, args=(server, photo, results)) for _ in range(2)]
        for client in clients:
            client.start()
        for number in range(50):
            if number == 25:
                (folder / "model.onnx").rename(folder / "hidden")
            status = server.post(path, b"", authorization=f"Bearer {ADMIN}").status
            assert status == (400 if number == 25 else 200)
            if number == 25:
                (folder / "hidden").rename(folder / "model.onnx")
            if number == 10:
                memory = read_memory(server.process.pid, "VmRSS")
        assert read_memory(server.process.pid, "VmRSS") < 1.2 * memory
        server.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(30)
    assert len(results) > 50
    assert [each for each in results if each != (200, expected)] == []
