"""More requests than can be computed: who is refused, who is never computed, and what the counters say."""

import json
import time
from pathlib import Path

import pytest
from support.server_process import Server, run_server
from support.service_load import ask_at_once, wait_until
from support.toy_served import save_digits

WARM_UP, STREAMS = 2, 2  # of the toy model
DIGITS = 'model="digits"'


def count_computed(server: Server) -> int:
    return server.post(f"/explain?at={time.monotonic()}", b"1").json["computed"]  # answers are remembered


def test_what_would_wait_too_long_is_refused_at_once(tmp_path: Path) -> None:
    """64 requests at once to a model that computes 20 per second, with room for about ten."""
    with run_server(save_digits(tmp_path / "digits", seconds=0.1), "--drain", 0, log=tmp_path / "log") as server:
        answers = ask_at_once(server, [b"%d" % number for number in range(64)])
        accepted = [each for each in answers if each.status == 200]
        refused = [each for each in answers if each.status == 429]
        assert len(accepted) + len(refused) == 64
        assert min(len(accepted), len(refused)) > 2
        for number, answer in enumerate(answers):
            if answer.status == 200:
                assert answer.json[0]["score"] == 3 * number
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert "at most 0.5 s are accepted; try again in 1 s" in answer.json["error"]
        assert server.post("/", b"7").status == 200, "back to normal"
        counted = server.read_metrics("vitrail_requests_total")
        assert counted['model="digits",route="predict",status="429"'] == len(refused)
        assert counted['model="digits",route="predict",status="200"'] == len(accepted) + 1
        assert server.read_metrics("vitrail_rejected_total")['reason="full"'] == len(refused)
        assert server.read_metrics("vitrail_items_total")[DIGITS] == len(accepted) + 1
        assert count_computed(server) == len(accepted) + 1 + WARM_UP


def test_a_full_service_refuses_before_the_body_is_sent(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits", seconds=1.5), "--max-wait", 0.01, "--drain", 0) as server:
        held = [server.connect() for _ in range(STREAMS + 1)]
        for number, connection in enumerate(held):
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n7")
            waiting = number - STREAMS + 1  # the others are being computed
            wait_until(lambda asked=number + 2: server.read_metrics("vitrail_in_flight")[""] == asked)
            wait_until(lambda waiting=waiting: server.read_metrics("vitrail_queue_length")[DIGITS] == max(0, waiting))
        with server.connect() as connection:
            connection.sendall(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\nExpect: 100-continue\r\n\r\n"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 429 ")
        for connection in held:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            connection.close()


def test_requests_of_clients_that_left_are_not_computed(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits", seconds=0.5), "--max-wait", 1000, "--timeout", 60) as server:
        connections = [server.connect() for _ in range(100)]
        for connection in connections:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n7")
        for connection in connections:
            connection.close()
        wait_until(lambda: server.read_metrics("vitrail_in_flight")[""] == 1)  # this request
        assert server.read_metrics("vitrail_queue_length")[DIGITS] == 0
        wait_until(lambda: server.post("/", b"1").status == 200)
        assert count_computed(server) <= STREAMS + 1 + 1 + WARM_UP
        assert server.read_metrics("vitrail_rejected_total")['reason="gone"'] >= 100 - STREAMS - 1


def test_what_is_late_is_not_computed(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits", seconds=0.4), "--max-wait", 1000, "--timeout", 0.7) as server:
        answers = ask_at_once(server, [b"7"] * 12)
        statuses = [each.status for each in answers]
        assert set(statuses) == {200, 504}
        late = next(each for each in answers if each.status == 504)
        assert late.json["error"].startswith("not computed within 0.7 s; try again")
        wait_until(lambda: server.read_metrics("vitrail_queue_length")[DIGITS] == 0)
        assert count_computed(server) <= statuses.count(200) + STREAMS + WARM_UP


def test_the_time_limit_of_the_protocol_holds(tmp_path: Path) -> None:
    body = {"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1], "data": ["Nw=="]}]}
    with run_server(save_digits(tmp_path / "digits", seconds=0.5)) as server:
        for microseconds, status in ((50_000, 504), (4_000_000, 200)):
            sent = json.dumps({**body, "parameters": {"timeout": microseconds}})
            assert server.post("/v2/models/digits/infer", sent).status == status


def test_explanations_do_not_hold_up_predictions(tmp_path: Path) -> None:
    """Four explanations wait for their one thread while predictions are computed."""
    with run_server(save_digits(tmp_path / "digits", seconds=0.5), "--drain", 0) as server:
        held = [server.connect() for _ in range(4)]
        for number, connection in enumerate(held):
            line = f"POST /models/digits/explain?n={number} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n7"
            connection.sendall(line.encode())
        wait_until(lambda: server.read_metrics("vitrail_queue_length")[DIGITS] == 3)
        assert server.post("/", b"7").status == 200
        assert server.read_metrics("vitrail_queue_length")[DIGITS] >= 1
        for connection in held:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            connection.close()


def test_other_models_and_kinds_are_refused_alone(tmp_path: Path) -> None:
    """The queue of a slow model does not refuse requests of another one, which waits for one item only."""
    slow, quick = (save_digits(tmp_path / name, seconds=seconds) for name, seconds in (("slow", 0.3), ("quick", 0.0)))
    with run_server(slow, quick, "--drain", 0) as server:
        held = [server.connect() for _ in range(8)]
        for connection in held:
            connection.sendall(b"POST /models/slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n7")
        wait_until(lambda: server.read_metrics("vitrail_queue_length")['model="slow"'] > 0)
        assert server.post("/models/quick", b"7").status == 200
        for connection in held:
            assert connection.recv(4096)[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 429")
            connection.close()


@pytest.mark.parametrize("seconds", [0.05])
def test_a_request_of_many_items_is_all_or_nothing(tmp_path: Path, seconds: float) -> None:
    """It runs out of time: its items that are left are not computed."""
    with run_server(save_digits(tmp_path / "digits", seconds=seconds), "--timeout", 0.5) as server:
        answer = server.post("/", json.dumps({"inputs": ["Nw=="] * 64}))
        assert answer.status == 504
        wait_until(lambda: server.read_metrics("vitrail_queue_length")[DIGITS] == 0)
        assert count_computed(server) < 64
