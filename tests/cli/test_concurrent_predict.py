"""Several processes with one output, and kills; images that change before resuming; special files."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_processes import drop_engine_notes, kill_process, start_command, wait_for_exit, wait_until
from support.toy_datasets import write_image
from support.toy_onnx_graphs import write_graph_folder

Run = Callable[..., Any]
PLAIN = ("--batch", "1", "--streams", "1", "--threads", "1")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_graph_folder(tmp_path / "export")


def images(folder: Path, count: int) -> Path:
    first = write_image(folder / "00000.png").read_bytes()
    for number in range(1, count):
        (folder / f"{number:05}.png").write_bytes(first)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", ["predict", "embed"])
def test_a_second_process_on_the_same_output_is_refused(tmp_path: Path, command: str, photos: Path) -> None:
    """Whether it starts, resumes or overwrites."""
    model = write_graph_folder(tmp_path / "export", "features" if command == "embed" else "good")
    out = f"out.{'npy' if command == 'embed' else 'csv'}"
    many = images(tmp_path / "many", 700)
    words = [command, model, many, "-o", out, *PLAIN]
    first = start_command(words, stdout=Path("stdout"), stderr=Path("first"))
    rows = tmp_path / f"{out}.partial" / "done.bin"
    wait_until(first, lambda: rows.exists() and rows.stat().st_size > 240)
    os.kill(first.pid or 0, 19)  # SIGSTOP: it pauses and keeps the lock
    try:
        before = files_in(tmp_path / f"{out}.partial")
        others = [
            start_command([*words, *more], stderr=Path(f"stderr{number}"))
            for number, more in enumerate(((), ("--resume",), ("--overwrite",), ("--resume", "--overwrite")))
        ]
        assert [wait_for_exit(each) for each in others] == [2] * 4
        for number in range(4):
            assert drop_engine_notes(Path(f"stderr{number}")).startswith(
                f"vitrail: {out}.partial is in use by another process (pid {first.pid})"
            ), drop_engine_notes(Path(f"stderr{number}"))
        assert files_in(tmp_path / f"{out}.partial") == before
        assert not Path(out).exists()
    finally:
        os.kill(first.pid or 0, 18)  # SIGCONT
    assert wait_for_exit(first) == 0
    assert not Path(f"{out}.partial").exists()
    names = Path("out.files.csv" if command == "embed" else out)
    assert len(names.read_text().splitlines()) == 701


@pytest.mark.timeout(3600)
def test_no_row_is_lost_or_repeated_when_one_of_three_is_killed(
    tmp_path: Path, export: Path, photos: Path, kills: int
) -> None:
    """Three processes resume one job and a random one is killed, once per five of --kills."""
    many, chance = images(tmp_path / "many", 50 * kills), random.Random(0)
    words = ["predict", export, many, "-o", "out.csv", "--resume", "--top", "1", *PLAIN]
    for _ in range(max(2, kills // 5)):
        processes = [start_command(words, stderr=Path(f"stderr{n}")) for n in range(3)]
        killed = kill_process(chance.choice(processes), chance.uniform(0, 0.5))
        for number, each in enumerate(processes):
            code, stderr = wait_for_exit(each), Path(f"stderr{number}")
            text = stderr.read_text() if stderr.exists() else ""  # it may be killed before it opens the file
            assert code in (0, 2, -9), text
            assert code != 2 or "is in use by another process" in text, text
        assert killed or Path("out.csv").exists()
    assert wait_for_exit(start_command(words)) == 0
    rows = Path("out.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == sorted(map(str, many.iterdir()))
    assert not Path("out.csv.partial").exists()


def stop_before_renaming(vitrail_: Run, *words: object) -> None:
    """Stop when all rows are written, before the output is renamed."""
    from vitrail.predict.output import row_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files.RowFile, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))  # pyright: ignore[reportUnknownLambdaType]
        assert vitrail_(*words).code == 130


def test_resuming_reports_images_that_changed(vitrail_: Run, export: Path, photos: Path) -> None:
    words = ("predict", export, photos, "-o", "out.csv")
    stop_before_renaming(vitrail_, *words)
    size = Path("photos/a/2.png").stat().st_size
    os.utime("photos/a/2.png", ns=(5, 5))
    write_image(Path("photos/b/1.png").absolute(), 9)
    result = vitrail_(*words, "--resume")
    assert result.code == 0
    assert (
        "vitrail: note: 2 images changed after processing, for example 'photos/a/2.png'; "
        "their rows describe the old contents: use --overwrite to start over\n"
    ) in result.err
    assert Path("photos/a/2.png").stat().st_size == size
    stop_before_renaming(vitrail_, *words, "--overwrite")
    assert "changed after" not in vitrail_(*words, "--resume", "--overwrite").err


def test_a_replaced_model_is_not_resumed(vitrail_: Run, tmp_path: Path, photos: Path) -> None:
    """A file with the same name, size and modification time."""
    export = write_graph_folder(tmp_path / "export")
    other = write_graph_folder(tmp_path / "other", seed=1)
    words = ("predict", export, photos, "-o", "out.csv")
    stop_before_renaming(vitrail_, *words)
    before = (export / "model.onnx").stat()
    for name in ("model.onnx", "config.json"):
        (export / name).write_bytes((other / name).read_bytes())
    os.utime(export / "model.onnx", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (export / "model.onnx").stat().st_size == before.st_size
    result = vitrail_(*words, "--resume")
    assert (result.code, "was started with weights " in result.err) == (2, True), result.err


def test_cells_that_spreadsheets_take_for_formulas_are_escaped(vitrail_: Run, tmp_path: Path, photos: Path) -> None:
    export = write_graph_folder(tmp_path / "export")
    Path("labels.txt").write_text("=1+1\n+b\n-c\n@d\ne;=f\n")
    for name in ("=SUM(A1).png", "+1.png", "@x.png", "-y.png"):
        write_image(tmp_path / name)
    names = ["=SUM(A1).png", "+1.png", "@x.png", "./-y.png", "=none.png"]
    words = ("predict", export, *names, "-o", "out.csv", "--labels", "labels.txt")
    stop_before_renaming(vitrail_, *words)
    result = vitrail_(*words, "--resume")
    assert "5 images done, of which 1 could not be read" in result.err
    cells = [cell for line in Path("out.csv").read_text().splitlines()[1:] for cell in line.split(",")]
    assert not [cell for cell in cells if cell[:1] in tuple("=+-@")]
    assert {"./=SUM(A1).png", "./+1.png", "./@x.png", "./-y.png", "./=none.png"} <= set(cells)
    assert {"'=1+1", "'+b", "'-c", "'@d", '"e;=f"'} <= set(cells)
    assert Path("./=SUM(A1).png").exists(), "it is the same file"


TARGETS = ("labels", "model", "config.json", "model.onnx", "out", "out.partial", "out.partial/job.json", "cache")


@pytest.mark.parametrize("target", TARGETS)
def test_special_files_in_every_place_are_one_line(
    vitrail_: Run, tmp_path: Path, photos: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a pipe would block and reading a device would not end, so neither is opened."""
    for kind in ("pipe", "device", "folder", "loop"):
        here = tmp_path / kind
        here.mkdir()
        monkeypatch.setenv("HOME", str(here / "home"))
        export = write_graph_folder(here / "export")
        at = {
            "labels": here / "labels.txt",
            "model": here / "special.onnx",
            "config.json": export / "config.json",
            "model.onnx": export / "model.onnx",
            "out": here / "out.csv",
            "out.partial": here / "out.csv.partial",
            "out.partial/job.json": here / "out.csv.partial" / "job.json",
            "cache": here / "home" / ".cache" / "vitrail",
        }[target]
        at.parent.mkdir(parents=True, exist_ok=True)
        at.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(at)
        elif kind == "folder":
            at.mkdir()
        else:
            at.symlink_to("/dev/zero" if kind == "device" else at)
        words = ["predict", at if target == "model" else export, photos, "-o", here / "out.csv", "--overwrite"]
        result = vitrail_(
            *words, *(["--labels", at] if target == "labels" else []), *(["--fast"] if target == "cache" else [])
        )
        notes = [line for line in result.err.splitlines() if not line.startswith("vitrail: note: ")]
        harmless = target == "cache" or (target, kind) == ("out.partial", "folder")
        assert (result.code, len(notes)) == ((0, 0) if harmless else (2, 1)), result.err


@pytest.mark.parametrize("target", ["out", "labels"])
def test_special_files_where_an_export_is_to_go(vitrail_: Run, model: Path, photos: Path, target: str) -> None:
    for kind in ("pipe", "device", "folder", "loop", "link"):
        at = Path(kind)
        if kind == "pipe":
            os.mkfifo(at)
        elif kind == "folder":
            at.mkdir()
            (at / "mine").write_text("mine")
        else:
            at.symlink_to({"device": "/dev/zero", "loop": at, "link": photos}[kind])
        words = ("export", model, at if target == "out" else "new", "--overwrite")
        result = vitrail_(*words, *(() if target == "out" else ("--labels", photos if kind == "link" else at)))
        assert (result.code, len(result.err.splitlines())) == (2, 1), result.err
        assert not Path("new").exists()
    assert Path("folder/mine").read_text() == "mine"
    assert len(list(photos.rglob("*.png"))) == 3


def test_a_missing_model_leaves_no_files(vitrail_: Run, photos: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    assert vitrail_("predict", "no_such.onnx", photos, "-o", "out.csv").code == 2
    assert sorted(tmp_path.iterdir()) == before
