"""Models of the hub: the needed files are downloaded once, complete and of the given revision; else one error line."""

import builtins
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from support.fake_hub import LOCAL, FakeHub, Files, HubRequest, cut_after, hang, hang_up, respond_with
from timm.models import save_for_hf  # pyright: ignore[reportUnknownVariableType]

import vitrail.checkpoint.hub
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.checkpoint.hub import CONNECT_SECONDS, download_model, is_hub_name

TINY = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
TOY, NAME = "someone/toy", "hf-hub:someone/toy"
CONFIG = b'{"architecture": "vit_tiny_patch16_224"}'


def timm_files(folder: Path) -> tuple[Any, Files]:
    """A toy model in the files that timm uploads to the hub."""
    model: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=3
    )
    save_for_hf(model, str(folder), safe_serialization=True)
    return model, {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def get_error(name: str = NAME) -> str:
    with pytest.raises(CheckpointError) as caught:
        download_model(name)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert len(message) < 400
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_is_hub_name() -> None:
    assert is_hub_name(NAME)
    assert is_hub_name(Path(NAME))
    assert not is_hub_name("someone/toy")


def test_a_model_is_downloaded_once_and_then_cached(hub: FakeHub, tmp_path: Path) -> None:
    model, files = timm_files(tmp_path / "timm")
    commit = hub.add(TOY, files)
    folder = download_model(NAME)
    assert folder == tmp_path / "cache" / "models--someone--toy" / "snapshots" / commit
    assert names(folder) == ["config.json", "model.safetensors"]
    assert (folder / "config.json").read_bytes() == files["config.json"]
    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert len(hub.requests_starting_with("GET /large/")) == 1
    hub.requests.clear()
    assert download_model(NAME) == folder
    assert not hub.requests_starting_with("GET /large/")
    assert not hub.requests_starting_with("GET /someone")


def test_load_by_hub_name(hub: FakeHub, tmp_path: Path) -> None:
    theirs, files = timm_files(tmp_path / "timm")
    hub.add(TOY, files)
    checkpoint = read(NAME, heads=2)
    assert checkpoint.description.provenance["source"]["layout"] == "timm"
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model(images), theirs.eval()(images), rtol=0, atol=1e-6)
    assert len(checkpoint.report.warnings) == 1
    with pytest.warns(UserWarning, match=r"hf-hub:someone/toy: .* \(224, 224\), but its positions are for 32×32"):
        assert vitrail.load(NAME, heads=2, classes=7, image_size=64).config.classes == 7


def test_the_cache_is_used_offline(hub: FakeHub, offline: Callable[[], None]) -> None:
    hub.add(TOY, {"config.json": CONFIG, "model.safetensors": b"weights"})
    folder = download_model(NAME)
    offline()
    hub.requests.clear()
    assert download_model(NAME) == folder
    assert not hub.requests
    assert "not in the cache and HF_HUB_OFFLINE is set" in get_error(NAME + "2")
    assert "not in the cache" in get_error(NAME + "@v2")
    (folder / "model.safetensors").unlink()
    assert "not in the cache" in get_error()


def test_files_cached_by_another_library_are_used_offline(hub: FakeHub, offline: Callable[[], None]) -> None:
    hub.add(TOY, {"config.json": CONFIG, "pytorch_model.bin": b"old", "model.safetensors": b"weights"})
    path = Path(huggingface_hub.hf_hub_download(TOY, "pytorch_model.bin"))
    offline()
    assert download_model(NAME) == path.parent
    assert names(path.parent) == ["pytorch_model.bin"]


@pytest.mark.parametrize("fault", [respond_with(500), respond_with(401, "RepoNotFound"), respond_with(403), hang])
def test_the_cache_is_used_if_the_hub_fails(fault: Any, hub: FakeHub) -> None:
    hub.add(TOY, {"config.json": CONFIG, "model.safetensors": b"weights"})
    folder = download_model(NAME)
    hub.faults[""] = fault
    assert download_model(NAME) == folder


def test_each_revision_has_its_own_files(hub: FakeHub) -> None:
    hub.add(TOY, {"model.safetensors": b"new"})
    commit = hub.add(TOY, {"model.safetensors": b"old"}, "v1")
    hub.add(TOY, {"model.safetensors": b"proposed"}, "refs/pr/1")
    read = {
        at: (download_model(NAME + at) / "model.safetensors").read_bytes()
        for at in ("", "@v1", f"@{commit}", "@refs/pr/1")
    }
    assert read == {"": b"new", "@v1": b"old", f"@{commit}": b"old", "@refs/pr/1": b"proposed"}
    hub.add(TOY, {"model.safetensors": b"newer"})
    assert (download_model(NAME) / "model.safetensors").read_bytes() == b"newer"


OTHERS = ("README.md", "modeling.py", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "sub/model.safetensors")
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def index(shards: list[str]) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {str(n): shard for n, shard in enumerate(shards * 2)}}).encode()


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "a.npz"], ["model.safetensors"]),
        (["model.safetensors.index.json", "pytorch_model.bin", *SHARDS], ["model.safetensors.index.json", *SHARDS]),
        (["pytorch_model.bin", "a.pth", "other.safetensors"], ["pytorch_model.bin"]),
        (["pytorch_model.bin.index.json", "x-1.bin", "x-2.bin"], ["pytorch_model.bin.index.json", "x-1.bin"]),
        (["B_16 [old].npz", "sub/a.npz"], ["B_16 [old].npz"]),
        (["deit.pth"], ["deit.pth"]),
    ],
)
def test_only_needed_files_are_downloaded(
    available: list[str], expected: list[str], hub: FakeHub, offline: Callable[[], None]
) -> None:
    files = {name: name.encode() for name in (*available, *OTHERS)}
    files |= {"config.json": CONFIG, "preprocessor_config.json": b"{}"}
    for name in available:
        if name.endswith(".index.json"):
            files[name] = index(expected[1:])
    hub.add(TOY, files)
    folder = download_model(NAME)
    expected = sorted([*expected, "config.json", "preprocessor_config.json"])
    assert names(folder) == expected
    assert all((folder / name).read_bytes() == files[name] for name in expected)
    assert len(hub.requests_starting_with("GET /large/") + hub.requests_starting_with("GET /someone")) == len(expected)
    offline()
    assert download_model(NAME) == folder


@pytest.mark.parametrize(
    "name",
    [
        *("", "toy", "a/b/c", "a b", "a/b c", "a/b@", "a/b@c d", "/a/b", "a/", "../a", "a/..", "a/b@../../x"),
        *("a/b@/etc/x", "a/b@v1\n", "a\\b/c", "a/b@v1@v2", "a/b?x", "é/b", "a--b/c", "a/b.git", "a/" + "b" * 97),
    ],
)
def test_invalid_names_are_refused_without_a_request(name: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match=r"name.*; expected hf-hub:owner/model\[@revision\]$") as caught:
        download_model("hf-hub:" + name)
    assert "\n" not in str(caught.value)
    assert not hub.requests


@pytest.mark.parametrize(
    ("start", "fault", "message"),
    [
        (
            "GET /api",
            respond_with(401, "RepoNotFound"),
            "no such repository, or a private one; check the name, or log in",
        ),
        (
            "GET /api",
            respond_with(404, "RepoNotFound"),
            "no such repository, or a private one; check the name, or log in",
        ),
        (
            "GET /api",
            respond_with(403, "GatedRepo"),
            "gated; accept its terms on its page and log in with `hf auth login`",
        ),
        ("GET /api", respond_with(403), "the hub returned status 403; log in"),
        ("GET /api", respond_with(500), "the hub returned status 500; try again later"),
        ("GET /api", respond_with(200, body=b"<html>Welcome to our hotel"), "the download failed: "),
        ("GET /api", hang, "timed out; check the connection and try again"),
        ("HEAD /", respond_with(403, "GatedRepo"), "gated"),
        ("HEAD /", respond_with(401), "log in"),
        ("HEAD /", respond_with(503), "the hub returned status 503"),
        ("HEAD /", respond_with(404, "EntryNotFound"), "the hub returned status 404"),
        ("HEAD /", respond_with(200), "the download failed: "),
        ("GET /large", respond_with(500), "the hub returned status 500"),
        (
            "GET /large",
            respond_with(200, body=b"few"),
            "Consistency check failed: file should be of size 7 but has size 3",
        ),
        ("GET /large", respond_with(200, body=b"too many bytes"), "file should be of size 7 but has size 14"),
        (
            "GET /large",
            respond_with(200, body=b"WEIGHTS"),
            "model.safetensors was damaged by the download: its SHA-256 differs",
        ),
        ("GET /large", hang_up, "peer closed connection"),
    ],
)
def test_failures_are_one_line_and_leave_no_weights(start: str, fault: Any, message: str, hub: FakeHub) -> None:
    hub.add(TOY, {"config.json": CONFIG, "model.safetensors": b"weights"})
    hub.faults[start] = fault
    assert message in get_error()
    cache = Path(constants.HF_HUB_CACHE)
    assert not [path for path in cache.rglob("*") if path.name == "model.safetensors" or "incomplete" in path.name]
    hub.faults.clear()
    assert (download_model(NAME) / "model.safetensors").read_bytes() == b"weights"


def test_a_missing_revision_is_not_taken_from_the_cache(hub: FakeHub) -> None:
    hub.add(TOY, {"model.safetensors": b"weights"}, "v1")
    download_model(NAME + "@v1")
    assert "no such revision; expected a branch, a tag or a commit" in get_error(NAME + "@v2")
    hub.revisions[TOY].pop("v1")
    assert "no such revision" in get_error(NAME + "@v1"), "a revision deleted by its author is not taken from the cache"


@pytest.mark.parametrize("proxy", [False, True])
def test_an_unreachable_hub_or_proxy_is_reported(proxy: bool, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    if proxy:
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "there is no network (127.0.0.1: Connection refused)" in get_error()
    assert not hub.requests


@pytest.mark.parametrize("cached", [False, True])
def test_without_a_route_one_connection_is_tried(cached: bool, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a look-up nor a connection that hangs is waited for, and huggingface_hub does not try again."""
    hub.add(TOY, {"model.safetensors": b"weights"})
    folder = download_model(NAME) if cached else None
    hub.requests.clear()
    tried, released = list[Any](), Event()

    def hang_forever(address: Any, timeout: float) -> Any:
        tried.append((*address, timeout))
        released.wait(60)
        raise OSError("No route to host")

    monkeypatch.setattr(socket, "create_connection", hang_forever)
    monkeypatch.setattr(vitrail.checkpoint.hub, "CONNECT_SECONDS", 0.01)
    if cached:
        assert download_model(NAME) == folder
    else:
        assert "there is no network (no connection to 127.0.0.1 within 0.01 s)" in get_error()
    released.set()
    assert tried == [("127.0.0.1", hub.server_port, 0.01)]
    assert not hub.requests
    assert CONNECT_SECONDS <= 3


def test_an_interrupted_download_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    weights = os.urandom(300_000)
    hub.add(TOY, {"model.safetensors": weights})
    hub.faults["GET /large"] = cut_after(weights, keep=200_000)
    assert (download_model(NAME) / "model.safetensors").read_bytes() == weights
    assert len(hub.requests_starting_with("GET /large")) == 2
    assert hub.requests_starting_with("from byte") == ["from byte 200000"]


def test_a_repository_that_changes_during_the_download_is_refused(hub: FakeHub) -> None:
    hub.add(TOY, {"config.json": CONFIG, "model.safetensors": b"weights"})

    def change(request: HubRequest) -> None:
        hub.faults.clear()
        hub.add(TOY, {"config.json": b"{}", "model.safetensors": b"others"})
        request.do_GET()

    hub.faults["HEAD /someone/toy/resolve/main/model.safetensors"] = change
    assert "it changed while it was downloaded; try again" in get_error()
    folder = download_model(NAME)
    assert [(folder / name).read_bytes() for name in names(folder)] == [b"{}", b"others"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b"", "model.py": b""}, "it has no weights; expected one of model.safetensors, "),
        ({"a.npz": b"", "b.npz": b""}, "or a single .npz or .pth"),
        ({"model.safetensors.index.json": b"not json"}, "index.json cannot be read"),
        ({"model.safetensors.index.json": b"[" * 10**5}, "index.json cannot be read"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "index.json has no weight_map"),
        (
            {"model.safetensors.index.json": index(["../a.safetensors"])},
            "index.json refers to files outside its folder",
        ),
        ({"model.safetensors.index.json": index(["a.py"]), "a.py": b""}, "expected a weight_map to .safetensors files"),
        ({"model.safetensors.index.json": index(["a.safetensors"])}, "refers to 'a.safetensors', which is missing"),
    ],
)
def test_repositories_without_weights_are_refused(files: Files, message: str, hub: FakeHub) -> None:
    hub.add(TOY, files)
    assert message in get_error()
    assert not hub.requests_starting_with("GET /large")


def test_a_full_disk_is_reported(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(TOY, {"model.safetensors": b"weights"})

    def full(*args: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "cannot write the cache: No space left on device; free some space, or set HF_HOME" in get_error()


def test_an_unwritable_cache_is_reported(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(TOY, {"model.safetensors": b"weights"})
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    assert "cannot write the cache: Not a directory" in get_error()


def test_a_missing_huggingface_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=f"^{NAME} needs huggingface_hub, .* pip install huggingface_hub$"):
        download_model(NAME)


def test_real_weights_are_downloaded_by_a_new_process(
    shared: Callable[[str], Path], hub: FakeHub, tmp_path: Path
) -> None:
    weights = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors").read_bytes()
    hub.add(TINY, {"config.json": CONFIG, "model.safetensors": weights, "pytorch_model.bin": b"the same again"})
    home = tmp_path / "home"
    here = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "NO_PROXY": LOCAL}
    here |= {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "TQDM_POSITION": "-1"}  # progress bars also without a terminal
    program = f"""
import warnings, vitrail
from vitrail.checkpoint.hub import download_model
warnings.simplefilter("ignore")
assert len(vitrail.load("hf-hub:{TINY}").blocks) == 12
print(download_model("hf-hub:{TINY}"))
"""
    outputs: list[str] = []
    for offline in ("0", "1"):
        environment = os.environ | here | {"HF_HUB_OFFLINE": offline}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        folder = Path(done.stdout.strip())
        outputs.append(done.stderr)
        assert done.returncode == 0, done.stderr
        assert folder.is_relative_to(home / "hub")
        assert (folder / "model.safetensors").read_bytes() == weights
    assert "100%" in outputs[0], "a progress bar"
    assert len(hub.requests_starting_with("GET /large")) == 1
    assert names(tmp_path) == ["home"]
