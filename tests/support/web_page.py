"""A static host for tests, and the npm package onnxruntime-web, which is not downloaded."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from vitrail.base.errors import ConfigError
from vitrail.export.targets.web import DEFAULT_RUNTIME, find_runtime

ROOT = Path(__file__).parents[2]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def host_folder(folder: Path) -> Generator[str]:
    """Serve the files of a folder on this machine, as any static host does."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def require_runtime() -> Path:
    """onnxruntime-web in this folder, or in that of the variable ONNXRUNTIME_WEB."""
    given = Path(os.environ.get("ONNXRUNTIME_WEB") or ROOT / DEFAULT_RUNTIME)
    try:
        return find_runtime(given)
    except ConfigError:
        pytest.skip("needs onnxruntime-web: npm install --no-save onnxruntime-web")
