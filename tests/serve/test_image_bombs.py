"""Small files that are large when they are decoded: memory stays within its documented bound, others are answered."""

import threading

import pytest
from PIL import Image
from support import hostile_images
from support.encoded_images import encode_test_image
from support.server_process import Server, run_server
from support.service_load import ask_at_once, read_memory
from support.toy_exports import ExportFinder

MEGABYTE = 10**6
PER_STREAM, BUFFERED, STREAMS = 350 * MEGABYTE, 128 * MEGABYTE, 2  # of docs/serving.md


def make_bombs() -> list[bytes]:
    """At the limits of 25 megapixels, or of 100 for a JPEG, and beyond."""
    black = Image.new("L", (10_000, 10_000))
    return [
        hostile_images.png(5000, 5000),
        hostile_images.png(5000, 5000, color=6),
        hostile_images.png(5000, 5000, bits=16),
        hostile_images.png(5000, 5000, bits=16, color=6),
        hostile_images.png(5000, 5001),
        hostile_images.png(20_000, 20_000),
        hostile_images.encode_image(black, "JPEG"),
        hostile_images.encode_image(black, "JPEG", progressive=True),
    ]


@pytest.mark.slow
def test_32_bombs_at_once_stay_within_the_memory(exported: ExportFinder) -> None:
    bombs, photo = make_bombs(), encode_test_image("JPEG", 60, 90)
    words = ("--streams", STREAMS, "--max-wait", 600, "--timeout", 600, "--drain", 0)
    with run_server(exported("onnx"), *words) as server:
        idle = read_memory(server.process.pid)
        results = ask_with_others(server, bombs * 4, photo)
        peak = read_memory(server.process.pid)
        assert server.post("/", photo).status == 200
    assert set(results) == {200, 400}
    assert results.count(200) >= 4 * 4
    assert peak < idle + STREAMS * PER_STREAM + BUFFERED, f"{(peak - idle) / MEGABYTE:.0f} MB"


def ask_with_others(server: Server, bombs: list[bytes], photo: bytes) -> list[int]:
    """The statuses of the bombs; a client that sends photos meanwhile is answered."""
    done, others = threading.Event(), list[int]()

    def ask() -> None:
        while not done.is_set():
            others.append(server.post("/", photo).status)

    client = threading.Thread(target=ask)
    client.start()
    found = [each.status for each in ask_at_once(server, bombs)]
    done.set()
    client.join()
    assert set(others) == {200}
    return found
