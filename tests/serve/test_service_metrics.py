"""The counters add up to what was sent, in text that Prometheus reads, with labels of fixed sets."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.server_process import run_server
from support.toy_served import save_digits

from vitrail.serve.request_errors import REASONS


def test_counters_add_up(tmp_path: Path) -> None:
    with run_server(save_digits(tmp_path / "digits"), "--max-body", 0.001, "--drain", 0) as server:
        statuses = [server.post("/", b"%d" % number).status for number in range(10)]
        statuses += [server.post("/", body).status for body in (b"seven", b"", b"7" * 1001, b"{")]
        statuses += [server.post(f"/models/{name}", b"7").status for name in ("digits", "x", "y" * 50)]
        statuses += [server.get(path).status for path in ("/", "/nothing/1", "/nothing/2", "/health")]
        statuses.append(server.ask("GET", "/", None, {"Host": "evil.example"}).status)
        with server.connect() as connection:
            connection.sendall(b"this is not HTTP\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
            statuses.append(400)
        families = {each.name: each for each in text_string_to_metric_families(server.get("/metrics").body.decode())}
    requests = families["vitrail_requests"].samples
    by_status = dict[int, float]()
    for sample in requests:
        status = int(sample.labels["status"])
        by_status[status] = by_status.get(status, 0) + sample.value
    assert by_status == {status: statuses.count(status) for status in set(statuses)}
    refused = {each.labels["reason"]: each.value for each in families["vitrail_rejected"].samples}
    assert set(refused) == set(REASONS)
    assert sum(refused.values()) == sum(status >= 400 for status in statuses)
    assert (refused["large"], refused["auth"]) == (1, 1)
    assert {each.labels["model"] for each in requests} == {"", "digits"}
    assert {each.labels["route"] for each in requests} <= {
        *("predict", "show_page", "ready", "unknown", "connection", "metrics"),
    }
    assert families["vitrail_items"].samples[0].value == 11
    seconds = {
        each.name: each.value for each in families["vitrail_inference_seconds"].samples if not each.labels.get("le")
    }
    assert seconds["vitrail_inference_seconds_count"] == 11
    (info,) = families["vitrail_model_info"].samples
    assert info.labels == {"model": "digits", "digest": "1", "engine": "", "precision": ""}
    assert families["vitrail_ready"].samples[0].value == 1
    assert families["process_resident_memory_bytes"].samples[0].value > 0
