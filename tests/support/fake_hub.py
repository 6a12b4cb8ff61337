"""A Hugging Face hub on this machine, with the part of its HTTP API that huggingface_hub needs for downloads."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

LOCAL = "127.0.0.1,localhost"
LARGE_SUFFIXES = (".safetensors", ".bin", ".npz", ".pth")  # stored separately behind a redirect, as on the hub

Files = Mapping[str, bytes]
Fault = Callable[["HubRequest"], None]


class FakeHub(ThreadingHTTPServer):
    """Repositories of files by revision, a list of all requests, and faults by the start of `METHOD /path`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.revisions: dict[str, dict[str, tuple[str, Files]]] = {}  # repository → revision → commit and files
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: dict[str, Fault] = {}
        self.closing = Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repository: str, files: Files, revision: str = "main") -> str:
        """Add files under the name of the revision and of its commit; return the commit."""
        contents = "".join(f"{name}{sha256_digest(content)}" for name, content in files.items())
        commit = hashlib.sha1((repository + revision + contents).encode()).hexdigest()
        known = self.revisions.setdefault(repository, {})
        known[revision] = known[commit] = commit, files
        self.blobs |= {sha256_digest(content): content for content in files.values()}
        return commit

    def requests_starting_with(self, start: str) -> list[str]:
        return [line for line in self.requests if line.startswith(start)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""


class HubRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        line = f"{self.command} {unquote(self.path)}"
        self.server.requests.append(line)
        for start, fault in list(self.server.faults.items()):
            if line.startswith(start):
                return fault(self)
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            return self.describe(match[1], unquote(match[2] or "main"))
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*map(unquote, match.groups()))
        if match := re.fullmatch(r"/large/(\w{64})", path):
            return self.send(self.server.blobs[match[1]])
        return self.respond(404)

    do_HEAD = do_GET  # noqa: N815

    def files(self, repository: str, revision: str) -> tuple[str, Files] | None:
        """The commit and its files; sends an error response if there are none."""
        known = self.server.revisions.get(repository, {})
        if revision in known:
            return known[revision]
        self.respond(404 if known else 401, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
        return None

    def describe(self, repository: str, revision: str) -> None:
        if revision_files := self.files(repository, revision):
            commit, files = revision_files
            siblings = [
                {"rfilename": name, "size": len(content), **describe_blob(name, content)}
                for name, content in files.items()
            ]
            info = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
            self.respond(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def resolve(self, repository: str, revision: str, name: str) -> None:
        if not (revision_files := self.files(repository, revision)):
            return
        commit, files = revision_files
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            self.respond(404, headers | {"X-Error-Code": "EntryNotFound"})
        elif name.endswith(LARGE_SUFFIXES):
            etag = sha256_digest(files[name])
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(files[name]))}
            # another host: huggingface_hub follows redirects to the same host and would miss the headers
            self.respond(302, headers | {"Location": f"http://localhost:{self.server.server_port}/large/{etag}"})
        else:
            self.send(files[name], headers | {"ETag": f'"{git_digest(files[name])}"'})

    def send(self, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send the complete content, or from the byte that the client requests."""
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start is None:
            return self.respond(200, headers, content)
        first, size = int(start[1]), len(content)
        self.server.requests.append(f"from byte {first}")
        return self.respond(206, {"Content-Range": f"bytes {first}-{size - 1}/{size}"}, content[first:])

    def respond(
        self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"", keep: int | None = None
    ) -> None:
        """Send the headers of the complete body, but only the first `keep` bytes of it."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if keep is None else body[:keep])
        self.close_connection = keep is not None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are recorded in `FakeHub.requests`."""


def describe_blob(name: str, content: bytes) -> dict[str, Any]:
    if not name.endswith(LARGE_SUFFIXES):
        return {"blobId": git_digest(content)}
    return {
        "blobId": git_digest(name.encode()),
        "lfs": {"sha256": sha256_digest(content), "size": len(content), "pointerSize": 134},
    }


def sha256_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def respond_with(status: int, code: str = "", body: bytes = b"") -> Fault:
    return lambda request: request.respond(status, {"X-Error-Code": code} if code else None, body)


def hang(request: HubRequest) -> None:
    request.server.closing.wait(20)


def hang_up(request: HubRequest) -> None:
    request.respond(200, None, b"weights", keep=0)


def cut_after(content: bytes, keep: int) -> Fault:
    """Send the first bytes and hang up; the next request succeeds."""

    def fault(request: HubRequest) -> None:
        request.server.faults.clear()
        request.respond(200, None, content, keep=keep)

    return fault


@contextmanager
def run_hub() -> Generator[FakeHub]:
    with FakeHub() as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            hub.shutdown()
            thread.join()


@contextmanager
def run_hub_for_this_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    """Point huggingface_hub, which reads its environment at import, to a hub on this machine."""
    home = constants.HF_HOME
    for name, value in list(vars(constants).items()):  # all paths below its home
        if isinstance(value, str) and value.startswith(home):
            monkeypatch.setattr(constants, name, value.replace(home, str(cache)))
    with run_hub() as hub:
        for name, value in {
            "HF_HUB_OFFLINE": False,
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": True,
            "HF_HUB_ETAG_TIMEOUT": 1,
            "HF_HUB_DOWNLOAD_TIMEOUT": 1,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", LOCAL)
        monkeypatch.setattr(time, "sleep", skip_sleep)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def skip_sleep(seconds: float) -> None:
    """huggingface_hub tries six times and waits up to eight seconds in between."""
