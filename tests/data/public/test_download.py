"""Downloads from a local server that is slow, cuts connections, answers 404 and 503 and sends wrong bytes."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from vitrail.base.errors import DataError
from vitrail.data.public import download
from vitrail.data.public.catalog import PublicDataset, PublicFile, find_dataset_folder, is_downloaded
from vitrail.data.public.download import fetch_dataset

CONTENT = os.urandom(300_000)


def pack_tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return packed.getvalue()


def pack_zip(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


@dataclass
class Files:
    """What the server has, and the faults of the next requests: a status, or bytes after which it hangs up."""

    url: str = ""
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])
    faults: list[int] = field(default_factory=list[int])
    requests: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # path, range
    ranges: bool = True
    stop_after: int | None = None  # bytes, after which the server waits until the client is gone


@pytest.fixture
def files() -> Iterator[Files]:
    state = Files()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range", "")
            state.requests.append((name, wanted))
            fault = state.faults.pop(0) if state.faults else None
            status = 404 if name not in state.contents else fault if fault in (403, 404, 500, 503) else 200
            if status != 200:
                self.send_error(status)
                return
            content, start = state.contents[name], 0
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                status = 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            end = len(content) if fault is None else start + fault
            if state.stop_after is not None:
                end = start + state.stop_after
            self.wfile.write(content[start:end])
            if state.stop_after is not None:
                self.connection.recv(1)  # nothing, once the client is gone

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    monkeypatch.setattr(download, "WAIT", 0.001)
    return tmp_path / "data"


@pytest.fixture
def dataset(files: Files) -> PublicDataset:
    """One archive and one plain file."""
    files.contents = {"toy.tar.gz": pack_tar({"toy/a.bin": CONTENT}), "labels.mat": b"labels"}
    return make_dataset(files)


def make_dataset(files: Files) -> PublicDataset:
    rows = tuple(
        PublicFile(url=f"{files.url}/{name}", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in files.contents.items()
    )
    return PublicDataset(name="toy", title="Toy", page=files.url, files=rows, classes=1, parts="all")


def test_a_data_set_is_downloaded_once_and_unpacked(dataset: PublicDataset, files: Files, cache: Path) -> None:
    counts = list[int]()
    assert not is_downloaded(dataset)
    folder = fetch_dataset(dataset, counts.append)
    assert folder == cache / "toy" == find_dataset_folder(dataset)
    assert (folder / "toy/a.bin").read_bytes() == CONTENT
    assert (folder / "labels.mat").read_bytes() == b"labels"
    assert sum(counts) == dataset.size
    assert [path.name for path in cache.iterdir()] == ["toy"]
    assert fetch_dataset(dataset) == folder
    assert len(files.requests) == 2


def test_archives_of_other_kinds(files: Files) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    files.contents = {
        "a.zip": pack_zip({"in/b.txt": b"b"}),
        "v2.tar.gz": plain.getvalue(),
    }  # plain tar in spite of its name
    folder = fetch_dataset(make_dataset(files))
    assert (folder / "in/b.txt").read_bytes() == b"b"
    assert (folder / "empty").exists()


def test_broken_connections_are_resumed_where_they_ended(dataset: PublicDataset, files: Files) -> None:
    files.faults = [100_000, 503, 50_000, 0]
    folder = fetch_dataset(dataset)
    assert (folder / "toy/a.bin").read_bytes() == CONTENT
    assert [wanted for name, wanted in files.requests if name == "toy.tar.gz"] == [
        "",
        "bytes=100000-",
        "bytes=100000-",
        "bytes=150000-",
        "bytes=150000-",
    ]


def test_a_server_without_ranges_starts_at_the_first_byte(dataset: PublicDataset, files: Files) -> None:
    files.faults, files.ranges = [100_000], False
    counts = list[int]()
    assert (fetch_dataset(dataset, counts.append) / "toy/a.bin").read_bytes() == CONTENT
    assert sum(counts) == dataset.size


def test_a_mirror_is_used_if_the_address_is_gone(dataset: PublicDataset, files: Files) -> None:
    first = dataset.files[0]
    moved = replace(first, url=f"{files.url}/moved.tar.gz", mirror=first.url)
    assert (fetch_dataset(replace(dataset, files=(moved,))) / "toy/a.bin").read_bytes() == CONTENT


FAULTS: list[tuple[Callable[[Files], object], str]] = [
    (lambda files: files.contents.pop("toy.tar.gz"), r"127.0.0.1: status 404\); try again, or get http"),
    (lambda files: files.faults.extend([100_000, *[503] * 4]), r"status 503\); try again \(0.1 MB are kept\), or"),
    (lambda files: files.faults.extend([0] * 5), r"the connection ended early\); try again"),
    (
        lambda files: files.contents.update({"toy.tar.gz": bytes(len(files.contents["toy.tar.gz"]))}),
        r"toy.tar.gz is not the published toy.tar.gz: its SHA256 is .*…, expected .*…; try again later$",
    ),
    (
        lambda files: files.contents.update({"toy.tar.gz": files.contents["toy.tar.gz"] + b"more"}),
        r"the file there is longer than the published one\); try again, or",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), FAULTS)
def test_failed_downloads(
    dataset: PublicDataset, files: Files, cache: Path, break_it: Callable[[Files], object], message: str
) -> None:
    """One line, and nothing under the data set's name."""
    whole = files.contents["toy.tar.gz"]
    break_it(files)
    with pytest.raises(DataError, match=message) as caught:
        fetch_dataset(dataset)
    assert "\n" not in str(caught.value)
    assert str(cache) in str(caught.value) or "try again later" in str(caught.value)
    assert not is_downloaded(dataset)
    files.contents["toy.tar.gz"], files.faults = whole, []
    assert (fetch_dataset(dataset) / "toy/a.bin").read_bytes() == CONTENT


def test_files_of_the_user_are_used_and_checked(dataset: PublicDataset, files: Files, cache: Path) -> None:
    cache.mkdir(parents=True)
    own = cache / "toy.tar.gz"
    own.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"toy.tar.gz is not the toy.tar.gz of toy: .*; delete it to download it"):
        fetch_dataset(dataset)
    own.write_bytes(files.contents["toy.tar.gz"])
    assert (fetch_dataset(dataset) / "toy/a.bin").read_bytes() == CONTENT
    assert [name for name, _ in files.requests] == ["labels.mat"]
    assert own.exists()


def test_an_md5_where_no_sha256_is_known(dataset: PublicDataset, files: Files) -> None:
    content = files.contents["toy.tar.gz"]
    known = replace(dataset.files[0], sha256="", md5=hashlib.md5(content).hexdigest())
    assert (fetch_dataset(replace(dataset, files=(known,))) / "toy/a.bin").exists()


def test_a_disk_without_room_is_found_before_the_download(
    dataset: PublicDataset, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = download.shutil.disk_usage("/")

    def find_usage(_: Path) -> Any:
        return usage._replace(free=dataset.size)

    monkeypatch.setattr(download.shutil, "disk_usage", find_usage)
    with pytest.raises(DataError, match=r"toy needs 0\.7 MB in .*, which has 0\.3 MB free; free some space"):
        fetch_dataset(dataset)
    assert files.requests == []


def test_an_archive_cannot_write_outside_its_folder(files: Files, cache: Path) -> None:
    files.contents = {"toy.tar.gz": pack_tar({"../outside": b"x"})}
    with pytest.raises(DataError, match="toy cannot be unpacked into"):
        fetch_dataset(make_dataset(files))
    assert not (cache / "outside").exists()
    assert not is_downloaded(make_dataset(files))


CHILD = """
import sys
from vitrail.data.public.catalog import PublicDataset, PublicFile, find_dataset_folder, is_downloaded
from vitrail.data.public.download import fetch_dataset
url, size, digest = sys.argv[1:]
file = PublicFile(url=url, size=int(size), sha256=digest)
print(fetch_dataset(PublicDataset(name="toy", title="", page="", files=(file,), classes=1, parts="")))
"""


def start_child(dataset: PublicDataset, cache: Path) -> "subprocess.Popen[str]":
    file = dataset.files[0]
    command = [sys.executable, "-c", CHILD, file.url, str(file.size), file.sha256]
    environment = {**os.environ, "VITRAIL_HOME": str(cache.parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_kill_and_two_processes(files: Files, dataset: PublicDataset, cache: Path) -> None:
    """A killed download is resumed; two processes download once."""
    files.stop_after = 100_000
    killed = start_child(dataset, cache)
    part = cache / ".toy.download/toy.tar.gz.part"
    while not part.exists() or part.stat().st_size < files.stop_after:
        assert killed.poll() is None
        sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done, before = part.stat().st_size, len(files.requests)
    assert not is_downloaded(dataset)
    files.stop_after = None
    both = [start_child(dataset, cache) for _ in range(2)]
    assert [child.communicate()[0].strip() for child in both] == [str(cache / "toy")] * 2
    assert [wanted for _, wanted in files.requests[before:]] == [f"bytes={done}-"]
    assert (cache / "toy/toy/a.bin").read_bytes() == CONTENT
