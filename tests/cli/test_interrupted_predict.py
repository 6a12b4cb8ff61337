"""Jobs that are killed, interrupted or out of disk space, and --resume, in new processes."""

import csv
import io
import json
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_processes import drop_engine_notes, kill_process, start_command, wait_for_exit, wait_until
from support.saved_models import write_model_folder
from support.toy_datasets import write_image
from support.unreadable_images import add_unreadable_images

Run = Callable[..., Any]
# nothing is measured first, and results are bit-identical wherever the job is killed
PLAIN = ("--engine", "eager", "--batch", "1", "--streams", "1", "--threads", "1")


NAMES = ["photos/a/1.png", "photos/a/2.png", "photos/b/1.png", "photos/b/c/3.jpg"]


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def write_photos(folder: Path, count: int) -> list[str]:
    first = write_image(folder / "00000.png").read_bytes()
    for number in range(1, count):
        (folder / f"{number:05}.png").write_bytes(first)
    return [str(folder / f"{number:05}.png") for number in range(count)]


def kill_repeatedly(words: list[str], watched: Path, out: Path, kills: int) -> int:
    """Kill the job at random moments, mostly after new rows; returns how often it was killed before its end."""
    chance, killed = random.Random(0), 0
    for attempt in range(kills):
        before, process = file_size(watched), start_command(words)
        if attempt % 5:
            wait_until(process, lambda before=before: file_size(watched) > before or out.exists())
        killed += kill_process(process, chance.uniform(0, 0.02))
    assert wait_for_exit(start_command(words)) == 0
    return killed


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_killed_job_is_complete_after_resuming(
    vitrail_: Run, model: Path, photos: Path, tmp_path: Path, kills: int, kind: str
) -> None:
    """As many kills as --kills says."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        kills = kills // 4
    names, out = write_photos(tmp_path / "many", 40 * kills), tmp_path / f"out.{kind}"
    words = ["predict", str(model), str(tmp_path / "many"), "-o", str(out), "--resume", "--top", "1", *PLAIN]
    rows = tmp_path / f"{out.name}.partial" / ("rows.csv" if kind == "csv" else "rows.jsonl")
    assert kill_repeatedly(words, rows, out, kills) > kills / 2, "the job finished before it could be killed"
    assert not list(tmp_path.glob("*.partial"))
    uninterrupted = vitrail_("predict", model, tmp_path / "many", "-o", f"uninterrupted.{kind}", "--top", 1, *PLAIN)
    assert uninterrupted.code == 0
    if kind == "csv":
        rows = rows_of(out.read_text())
        assert out.read_bytes() == Path("uninterrupted.csv").read_bytes()
    else:
        from pyarrow.parquet import read_table

        table: Any = read_table(out)
        rows = table.to_pylist()
    assert [row["file"] for row in rows] == names


def test_an_interrupted_job_says_how_to_resume(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    names, words = write_photos(tmp_path / "many", 2500), ["--top", "1", *PLAIN]
    process = start_command(
        ["predict", model, "many", "-o", "out.csv", *words], stdout=Path("stdout"), stderr=Path("stderr")
    )
    wait_until(process, lambda: file_size(tmp_path / "out.csv.partial" / "rows.csv") >= 1000)
    os.kill(process.pid or 0, signal.SIGINT)
    assert (wait_for_exit(process), Path("stdout").read_text()) == (130, "")
    line = "vitrail: note: stopped; finished rows are in out.csv.partial: run it again with --resume to continue\n"
    assert drop_engine_notes(Path("stderr")) == line
    done = len((tmp_path / "out.csv.partial" / "rows.csv").read_text().splitlines()) - 1
    result = vitrail_("predict", model, "many", "-o", "out.csv", "--resume", *words)
    assert result.code == 0
    assert re.fullmatch(rf"out\.csv: 2,500 images, {2500 - done:,} of them now in \d+\.\d s\n", result.out)
    assert drop_engine_notes(result.err) == (
        f"vitrail: note: resuming: {done} images done, of which 0 could not be read\n"
    )
    assert [row["file"] for row in rows_of(Path("out.csv").read_text())] == [
        f"many/{Path(name).name}" for name in names
    ]


def test_only_the_same_job_is_resumed(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    add_unreadable_images(photos)
    assert vitrail_("predict", model, photos, "-o", "uninterrupted.csv", *PLAIN).code == 2
    words = ("predict", model, photos, "-o", "out.csv", *PLAIN, "--resume")
    uninterrupted = Path("uninterrupted.csv").read_bytes()
    write_half_of_the_rows(vitrail_, words, uninterrupted[: len(uninterrupted) // 2])
    result = vitrail_(*words, "--top", 1)
    assert (result.code, result.out) == (2, "")
    assert drop_engine_notes(result.err).startswith(
        "vitrail: cannot resume out.csv.partial: it was started with top 3, not 1"
    )
    other = write_model_folder(tmp_path / "other")
    for changed, what in (((other, photos), "model"), ((model, Path.cwd() / "photos"), "started in")):
        result = vitrail_("predict", *changed, "-o", "out.csv", "--resume")
        assert (result.code, f"was started with {what} " in drop_engine_notes(result.err)) == (2, True), (
            drop_engine_notes(result.err)
        )
    result = vitrail_(*words)
    assert result.code == 2
    assert "7 of 11 images could not be read; the results of the others are in out.csv\n" in result.err
    assert Path("out.csv").read_bytes() == uninterrupted
    assert vitrail_(*words) == (
        0,
        "out.csv: complete\n",
        "vitrail: note: out.csv is already complete; use --overwrite to start over\n",
    )
    assert vitrail_(*words[:-1], "--overwrite", "--top", 1).code == 2
    assert Path("out.csv").read_bytes() != uninterrupted


def write_half_of_the_rows(vitrail_: Run, words: Any, rows: bytes) -> None:
    """Leave the files of a killed job."""
    from vitrail.predict.output import row_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files.RowFile, "finish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))  # pyright: ignore[reportUnknownLambdaType]
        assert vitrail_(*words).code == 130
    Path("out.csv.partial/rows.csv").write_bytes(rows)


def test_images_added_before_resuming_are_processed(vitrail_: Run, model: Path, photos: Path) -> None:
    words = ("predict", model, photos, "-o", "out.csv", "--resume")
    assert vitrail_("predict", model, photos, "-o", "uninterrupted.csv").code == 0
    write_half_of_the_rows(
        vitrail_, words, b"".join(Path("uninterrupted.csv").read_bytes().splitlines(keepends=True)[:3])
    )
    write_image(photos / "a" / "0.png")
    assert vitrail_(*words).code == 0
    names = [row["file"] for row in rows_of(Path("out.csv").read_text())]
    assert names == [*NAMES[:2], "photos/a/0.png", *NAMES[2:]]


def test_full_disk_is_a_one_line_error(model: Path, photos: Path, tmp_path: Path, vitrail_: Run) -> None:
    names = write_photos(tmp_path / "many", 200)
    words = ["predict", model, tmp_path / "many", "-o", "out.csv", *PLAIN]
    process = start_command(words, stdout=Path("stdout"), stderr=Path("stderr"), longest_file=3000)
    assert (wait_for_exit(process), Path("stdout").read_text()) == (2, "")
    assert drop_engine_notes(Path("stderr")) == (
        "vitrail: out.csv cannot be written: File too large; "
        "finished rows are kept: free some space, then run the same command with --resume\n"
    )
    assert file_size(tmp_path / "out.csv.partial" / "rows.csv") == 3000
    assert vitrail_(*words, "--resume").code == 0
    assert [row["file"] for row in rows_of(Path("out.csv").read_text())] == names


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_full_disk_behind_stdout_is_a_one_line_error(model: Path, photos: Path) -> None:
    process = start_command(
        ["predict", model, photos, "--format", "csv"], stdout=Path("/dev/full"), stderr=Path("stderr")
    )
    assert wait_for_exit(process) == 2
    assert drop_engine_notes(Path("stderr")) == "vitrail: the output cannot be written: No space left on device\n"


def test_a_closed_pipe_ends_the_job_quietly(model: Path, photos: Path, tmp_path: Path) -> None:
    """As with `| head -1`: the job ends before its last file, which would be an error, and prints nothing."""
    Path(write_photos(tmp_path / "many", 3000)[-1]).write_bytes(b"not an image")
    os.mkfifo("pipe")
    words = ["predict", model, "many", "--format", "jsonl", "--top", 1, *PLAIN]
    process = start_command(words, stdout=Path("pipe"), stderr=Path("stderr"))
    with Path("pipe").open() as stream:
        first = stream.readline()
    assert (wait_for_exit(process), drop_engine_notes(Path("stderr"))) == (0, "")
    assert json.loads(first)["file"] == "many/00000.png"
