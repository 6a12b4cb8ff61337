"""Whatever goes wrong while a checkpoint is written, the previous files stay unchanged, in every layout."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

pytestmark = pytest.mark.filterwarnings("ignore:.* cannot store")  # some layouts have readers with another activation

OUTPUT_PATHS = {  # path of each layout below the folder of the test
    "vitrail": "folder",
    "timm": "folder",
    "timm file": "weights.safetensors",
    "timm pickle": "weights.pth",
    "hf": "folder",
    "torchvision": "weights.pth",
    "google": "weights.npz",
    "deit": "weights.pth",
    "dino": "weights.pth",
    "mae": "weights.pth",
}
FIELDS: dict[str, Any] = {"image_size": 16, "patch_size": 8, "depth": 1, "width": 16, "heads": 2, "classes": 3}
WRITE_TO_FULL_DISK = """
import resource, sys, warnings
import torch, vitrail
from vitrail.checkpoint import write
warnings.simplefilter("ignore")
fields = dict(image_size=16, patch_size=8, depth=2, width=64, heads=2, classes=3)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, -1))
for name, place in zip(sys.argv[1::2], sys.argv[2::2]):
    model = vitrail.create("ViT-Ti/16", **{**fields, "classes": 0 if name == "dino" else 3})
    try:
        write(model, place, name.split()[0])
    except vitrail.CheckpointError as error:
        print(error)
    else:
        print("written", place)
"""


def toy(layout: str, **changes: Any) -> Any:
    return add_weight_noise(
        vitrail.create("ViT-Ti/16", **{**FIELDS, "classes": 0 if layout == "dino" else 3, **changes})
    )


def write_toy(layout: str, folder: Path) -> Path:
    folder.mkdir()
    path = folder / OUTPUT_PATHS[layout]
    write(toy(layout), path, layout.split()[0], preprocessing=vitrail.Preprocessing(image_size=16))
    return path


def read_all_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_full_disk_leaves_the_old_files(tmp_path: Path) -> None:
    places = {layout: write_toy(layout, tmp_path / layout) for layout in OUTPUT_PATHS}
    before = read_all_files(tmp_path)
    words = [str(word) for pair in places.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", WRITE_TO_FULL_DISK, *words], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(OUTPUT_PATHS), done.stderr
    for line, place in zip(lines, places.values(), strict=True):
        assert line.startswith(f"cannot write {place}")
        assert line.endswith("; the previous file is unchanged")
    assert read_all_files(tmp_path) == before
    for place in places.values():
        assert read(place, heads=2).model.config.width == 16


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


def fail_halfway(error: BaseException) -> Callable[..., Any]:
    """A writer that leaves half a file behind; one of its arguments is the path or an open file."""

    def write_half(first: Any, second: Any = None, *_: Any, **__: Any) -> None:
        file = first if hasattr(first, "write") else second
        file.write(b"half") if hasattr(file, "write") else Path(file).write_bytes(b"half")
        raise error

    return write_half


@pytest.mark.parametrize(
    ("module", "name", "broken", "message"),
    [
        (os, "open", read_only, "Read-only file system"),
        (os, "fsync", no_space, "No space left on device"),
        (Path, "replace", read_only, "Read-only file system"),
        (Path, "chmod", read_only, "Read-only file system"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("layout", OUTPUT_PATHS)
def test_a_failing_disk_leaves_the_old_files(
    layout: str, module: Any, name: str, broken: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_toy(layout, tmp_path / "place")
    before = read_all_files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, broken)
        with pytest.raises(CheckpointError, match=f"cannot write .*: {message}; ") as caught:
            write(toy(layout, depth=2), path, layout.split()[0])
    assert len(str(caught.value).splitlines()) == 1
    assert read_all_files(tmp_path) == before
    assert read(path, heads=2).model.config.depth == 1


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError("too much"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("layout", OUTPUT_PATHS)
def test_an_interrupted_write_leaves_the_old_files(
    layout: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_toy(layout, tmp_path / "place")
    before = read_all_files(tmp_path)
    with monkeypatch.context() as patch:
        for module in ("layouts.vitrail", "layout"):
            patch.setattr(f"vitrail.checkpoint.{module}.save_file", fail_halfway(error))
        patch.setattr(torch, "save", fail_halfway(error))
        patch.setattr(np, "savez", fail_halfway(error))
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError):
            write(toy(layout, depth=2), path, layout.split()[0])
    assert read_all_files(tmp_path) == before
    assert read(path, heads=2).model.config.depth == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("layout", OUTPUT_PATHS)
def test_a_read_only_folder_stays_unchanged(layout: str, tmp_path: Path) -> None:
    path = write_toy(layout, tmp_path / "place")
    before = read_all_files(tmp_path)
    closed = path if path.is_dir() else path.parent
    closed.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot write .*: Permission denied"):
        write(toy(layout, depth=2), path, layout.split()[0])
    closed.chmod(0o700)
    assert read_all_files(tmp_path) == before


@pytest.mark.parametrize("layout", OUTPUT_PATHS)
def test_a_path_below_a_file_is_refused(layout: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot (write|make the folder) .*: Not a directory") as caught:
        write(toy(layout), tmp_path / "file" / OUTPUT_PATHS[layout], layout.split()[0])
    assert len(str(caught.value).splitlines()) == 1
    assert read_all_files(tmp_path) == {tmp_path / "file": b"mine"}


def test_a_model_can_be_written_over_the_file_it_was_read_from(tmp_path: Path) -> None:
    for layout in OUTPUT_PATHS:
        path = write_toy(layout, tmp_path / layout)
        model = read(path, heads=2).model
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        write(add_weight_noise(model), path, layout.split()[0])  # over the file that it was read from
        again = read(path, heads=2).model.state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
        assert any(not torch.equal(again[name], tensor) for name, tensor in tensors.items())
