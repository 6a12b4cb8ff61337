"""OUT.partial has one owner, and nothing is written or deleted in a folder with files of others."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.prediction_rows import make_prediction_row, open_prediction_file

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.predict.image_rows import make_prediction_layout
from vitrail.predict.output.partial_folder import PARTIAL_FOLDER_FILES, PartialFolder, is_job_file
from vitrail.predict.output.row_files import RowFile
from vitrail.predict.predictions import ClassProbability

ROW = make_prediction_row("1.jpg", (ClassProbability(1, "a", 0.5),))
LAYOUT = make_prediction_layout("csv", 1)


def begin(out: Path, *, resume: bool = False, overwrite: bool = False) -> PartialFolder:
    partial = LAYOUT.partial_folder(out)
    try:
        partial.start(resume=resume, overwrite=overwrite)
    finally:
        partial.close()
    return partial


def unfinished(out: Path) -> Path:
    sink = open_prediction_file(out, "csv", 1, {"model": "m"}, resume=False)
    sink.write(ROW)
    sink.close()
    return out.with_name(f"{out.name}.partial")


def state(folder: Path) -> dict[str, object]:
    """Mode, inode and contents of everything below, without following links."""
    found = dict[str, object]()
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        found[str(path)] = (path.lstat().st_mode, path.lstat().st_ino, path.read_bytes() if regular else None)
    return found


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("mine")


def a_link(path: Path) -> None:
    (path.parent.parent / "precious").write_text("precious")
    path.symlink_to(path.parent.parent / "precious")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def a_loop(path: Path) -> None:
    path.symlink_to(path)


KINDS = (a_folder, a_link, a_pipe, a_socket, a_loop)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_changed_if_one_of_our_names_is_not_a_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    for number, name in enumerate((*PARTIAL_FOLDER_FILES, "notes.txt", ".hidden")):
        out = Path(str(number)) / "a.csv"
        out.parent.mkdir()
        folder = unfinished(out)
        (folder / name).unlink(missing_ok=True)
        kind(folder / name)
        before = state(Path())
        for resume, overwrite in ((False, False), (True, False), (False, True), (True, True)):
            with pytest.raises(
                VitrailError, match=r"^[0-9]+/a\.csv\.partial has '.*', which was not written by a vitrail job"
            ):
                begin(out, resume=resume, overwrite=overwrite)
        assert state(Path()) == before, name


def test_files_of_other_programs_are_never_deleted(tmp_path: Path) -> None:
    out, folder = tmp_path / "a.csv", tmp_path / "a.csv.partial"
    for names in (["x"], ["rows.csv"], ["job.json"], ["job.json", "rows.csv"], ["whole", "rows.csv"], ["whole"]):
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"model": "of another program"}')
        before = state(tmp_path)
        for resume, overwrite in ((False, False), (True, False), (False, True)):
            with pytest.raises(ConfigError, match="nothing in it is changed"):
                begin(out, resume=resume, overwrite=overwrite)
        with pytest.raises(ConfigError, match="nothing in it is changed"):
            open_prediction_file(out, "csv", 1, {"model": "m"}, resume=False)
        assert state(tmp_path) == before
        for name in names:
            (folder / name).unlink()
        folder.rmdir()


def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    target = unfinished(tmp_path / "other.csv")
    (tmp_path / "a.csv.partial").symlink_to(target)
    (tmp_path / "b.csv.partial").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.csv.partial").write_text("mine")
    os.mkfifo(tmp_path / "d.csv.partial")
    before = state(tmp_path)
    for name in "abcd":
        with pytest.raises(ConfigError, match=rf"{name}.csv.partial is (a symbolic link|not a folder); nothing in it"):
            begin(tmp_path / f"{name}.csv", overwrite=True)
    assert state(tmp_path) == before


def test_links_and_devices_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.csv").symlink_to(tmp_path / "precious")
    (tmp_path / "b.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.csv").symlink_to(tmp_path / "c.csv")
    os.mkfifo(tmp_path / "d.csv")
    (tmp_path / "e.csv").mkdir()
    before = state(tmp_path)
    for name in "abcde":
        with pytest.raises(ConfigError, match=rf"{name}.csv is (a symbolic link|a named pipe|a folder); expected the"):
            begin(tmp_path / f"{name}.csv", overwrite=True)
    assert state(tmp_path) == before
    for out in ("", ".", "..", "/"):
        with pytest.raises(ConfigError, match="is a folder; expected the name of a file"):
            LAYOUT.partial_folder(Path(out))


def test_a_file_created_while_the_job_runs_is_not_replaced(tmp_path: Path) -> None:
    partial = LAYOUT.partial_folder(tmp_path / "a.csv")
    partial.start(resume=False, overwrite=False)
    partial.open_job({"model": "m"}, resume=False)
    sink = RowFile(partial, LAYOUT)
    sink.write(ROW)
    (tmp_path / "a.csv").write_text("somebody's")
    with pytest.raises(ConfigError, match=r"a.csv already exists; use `overwrite` together with `resume`"):
        sink.finish()
    sink.close()
    assert (tmp_path / "a.csv").read_text() == "somebody's"
    begin(tmp_path / "a.csv", resume=True, overwrite=True)
    assert "1.jpg" in (tmp_path / "a.csv").read_text()


def test_a_folder_of_an_earlier_version_may_be_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "a.csv.partial"
    folder.mkdir()
    about = {"model": "m", "weights": "0123", "format": "csv", "output": "logits"}
    (folder / "job.json").write_text(json.dumps(about))
    (folder / "rows.csv").write_text("file,error\n")
    assert is_job_file(folder / "job.json")
    with pytest.raises(ConfigError, match=r"from an earlier version; use `overwrite` to start over"):
        open_prediction_file(tmp_path / "a.csv", "csv", 1, {"model": "m"}, resume=True)
    begin(tmp_path / "a.csv", overwrite=True)
    unfinished(tmp_path / "a.csv")
