"""Rows in files and on streams: whole, once each, in order, whatever ended the job before."""

import csv
import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prediction_rows import make_prediction_row, open_prediction_file

from vitrail.base.errors import ConfigError
from vitrail.base.locks import InUseError
from vitrail.base.text import format_csv_line
from vitrail.predict.image_rows import (
    PredictionFormat,
    choose_prediction_format,
    format_class_table,
    make_prediction_layout,
)
from vitrail.predict.output.partial_folder import PartialFolder, WritingError
from vitrail.predict.output.resumable_rows import CompletedItems, format_json_line, hash_to_integer
from vitrail.predict.output.row_files import RowFile, RowPrinter
from vitrail.predict.predictions import ClassProbability

FORMATS: tuple[PredictionFormat, ...] = ("csv", "jsonl", "json", "parquet")
TOP = (ClassProbability(7, "a cat, sitting", 0.75), ClassProbability(0, None, 1 / 3))
ROWS = (
    make_prediction_row("photos/1.jpg", TOP),
    make_prediction_row('with "quotes", and\nline\rends.jpg', TOP),
    make_prediction_row("bad.jpg", error="'bad.jpg' is not an image; expected one"),
    make_prediction_row(os.fsdecode(b"no \xff text.jpg"), TOP[::-1]),
    make_prediction_row("ünïcödé.jpg", TOP),
)
JOB = {"model": "m", "top": 2}


def opened(out: Path, kind: PredictionFormat, *, resume: bool = False, job: dict[str, Any] = JOB) -> RowFile:
    return open_prediction_file(out, kind, 2, job, resume=resume)


def written(out: Path, kind: PredictionFormat, *, resume: bool = False) -> int:
    """Run a job to the end; returns the number of rows that it found."""
    sink = opened(out, kind, resume=resume)
    before = len(sink.done)
    for row in ROWS:
        if row.name not in sink.done:
            sink.write(row)
    sink.finish()
    sink.close()
    return before


def rows_of(path: Path, kind: PredictionFormat) -> list[dict[str, Any]]:
    """The rows as another reader sees them."""
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(path).to_pylist()
    text = path.read_text("utf-8", "surrogateescape")
    if kind == "csv":
        return list(csv.DictReader(StringIO(path.read_bytes().decode("utf-8", "surrogateescape"))))
    return json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_has_the_same_rows(tmp_path: Path, kind: PredictionFormat) -> None:
    out = tmp_path / f"out.{kind}"
    assert written(out, kind) == 0
    assert list(tmp_path.iterdir()) == [out]
    rows = rows_of(out, kind)
    names = [row.name for row in ROWS]
    if kind == "parquet":  # whose strings are UTF-8
        names[3] = "no \\udcff text.jpg"
    assert [row["file"] for row in rows] == names
    assert [row.get("error") or None for row in rows] == [row.value.get("error") for row in ROWS]
    first, failed, swapped = rows[0], rows[2], rows[3]
    if kind in ("json", "jsonl"):
        assert first["top"] == [
            {"index": 7, "label": "a cat, sitting", "probability": 0.75},
            {"index": 0, "label": None, "probability": 0.333333},
        ]
        assert "top" not in failed
    else:
        columns = [f"{name}_{n}" for n in (1, 2) for name in ("label", "index", "probability")]
        assert list(first) == ["file", "error", *columns]
        assert [str(first[name] or "") for name in ("label_1", "index_1", "probability_1")] == [
            "a cat, sitting",
            "7",
            "0.75",
        ]
        assert int(swapped["index_1"]) == 0
        assert float(swapped["probability_1"]) == pytest.approx(1 / 3, abs=1e-6)
        assert not any(failed[name] for name in columns)


@pytest.fixture
def unsynchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no disk fails here, and a thousand calls are slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("unsynchronised")
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_truncated_at_any_byte_is_completed(tmp_path: Path, kind: PredictionFormat) -> None:
    written(tmp_path / "whole", kind)
    whole = (tmp_path / "whole").read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == 10]
    found = set[int]()
    for length in sorted({*range(0, len(whole), 9), *(end + by for end in ends for by in (-2, -1, 0, 1))}):
        out = tmp_path / "out"
        rows_of_all(out, kind)
        (out.with_name("out.partial") / f"rows.{kind}").write_bytes(whole[:length])
        found.add(written(out, kind, resume=True))
        assert out.read_bytes() == whole, length
        out.unlink()
    assert found == set(range(len(ROWS) + 1))


def rows_of_all(out: Path, kind: PredictionFormat) -> None:
    """The state after a kill before the end."""
    sink = opened(out, kind)
    for row in ROWS:
        sink.write(row)
    sink.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_earlier_failures_are_counted_when_resuming(tmp_path: Path, kind: PredictionFormat) -> None:
    rows_of_all(tmp_path / "out", kind)
    again = opened(tmp_path / "out", kind, resume=True)
    assert (again.failed, len(again.done)) == (1, 5)
    assert all(row.name in again.done for row in ROWS)
    assert "another.jpg" not in again.done
    again.close()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_after_a_damaged_one_are_computed_again(tmp_path: Path, kind: PredictionFormat) -> None:
    """Zeros, as after a power cut."""
    written(tmp_path / "whole", kind)
    whole = (tmp_path / "whole").read_bytes()
    rows_of_all(tmp_path / "out", kind)
    rows = tmp_path / "out.partial" / f"rows.{kind}"
    rows.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]) + bytes(50) + b"\n" + bytes(20))
    assert written(tmp_path / "out", kind, resume=True) == (1 if kind == "csv" else 2)
    assert (tmp_path / "out").read_bytes() == whole


class KilledError(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.mark.usefixtures("unsynchronised")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_job_killed_while_renaming_is_completed_by_resuming(
    tmp_path: Path, kind: PredictionFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of renaming: resuming finds the job complete, or completes it."""
    written(tmp_path / "whole", kind)
    whole, moments = (tmp_path / "whole").read_bytes(), 0
    while True:
        out = tmp_path / f"out{moments}"
        sink, left = opened(out, kind), [moments]
        for row in ROWS:
            sink.write(row)
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "rmdir", "touch"):
                patch.setattr(Path, name, dying(getattr(Path, name), left))
            try:
                sink.finish()
            except KilledError:
                moments += 1
            else:
                break
        sink.close()
        partial = make_prediction_layout(kind, 2).partial_folder(out)
        if not partial.start(resume=True, overwrite=False):
            partial.close()
            written(out, kind, resume=True)
        partial.close()
        assert out.read_bytes() == whole
        assert not partial.folder.exists()
        assert partial.start(resume=True, overwrite=False)
    assert moments >= 4


def dying(step: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def step_or_die(*given: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        return step(*given, **named)

    return step_or_die


def is_complete(out: Path, *, resume: bool, overwrite: bool) -> bool:
    partial = make_prediction_layout("csv", 2).partial_folder(out)
    with closing(partial):
        return partial.start(resume=resume, overwrite=overwrite)


def test_existing_results_are_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert not is_complete(out, resume=False, overwrite=False)
    assert not is_complete(out, resume=True, overwrite=False)  # nothing to resume yet: the job starts
    opened(out, "csv").close()
    with pytest.raises(ConfigError, match=r"out.csv.partial is an unfinished job; use `resume` .* or `overwrite`"):
        is_complete(out, resume=False, overwrite=False)
    assert not is_complete(out, resume=True, overwrite=False)
    assert not is_complete(out, resume=False, overwrite=True)
    out.write_text("dear")
    with pytest.raises(ConfigError, match=r"out.csv already exists; use `overwrite` together with `resume`"):
        is_complete(out, resume=True, overwrite=False)
    assert not is_complete(out, resume=True, overwrite=True)
    written(out, "csv", resume=True)
    with pytest.raises(ConfigError, match=r"out.csv already exists; use `overwrite` to replace it"):
        is_complete(out, resume=False, overwrite=False)
    assert is_complete(out, resume=True, overwrite=False)
    assert not is_complete(out, resume=False, overwrite=True)


def test_starting_over_deletes_earlier_rows(tmp_path: Path) -> None:
    sink = opened(tmp_path / "out", "csv")
    sink.write(make_prediction_row("old.jpg", TOP))
    sink.close()
    assert written(tmp_path / "out", "csv") == 0
    assert "old.jpg" not in (tmp_path / "out").read_text("utf-8", "surrogateescape")


@pytest.mark.parametrize("other", [{"model": "n"}, {"top": 3}, {"top": None}, {"new": 1}])
def test_another_job_is_not_resumed_and_the_lock_is_released(tmp_path: Path, other: dict[str, Any]) -> None:
    opened(tmp_path / "out", "csv").close()
    (name,) = other
    with pytest.raises(ConfigError, match=rf"was started with {name} .*, not .*Use the same settings"):
        opened(tmp_path / "out", "csv", resume=True, job={**JOB, **other})
    job = tmp_path / "out.partial" / "job.json"
    job.write_text(job.read_text()[:-3])
    with pytest.raises(ConfigError, match=r"job.json cannot be read: .*; use `overwrite` to start over"):
        opened(tmp_path / "out", "csv", resume=True)
    with ThreadPoolExecutor(1) as thread:  # the failures above have released the lock
        thread.submit(opened, tmp_path / "out", "csv").result().close()


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    sink = opened(tmp_path / "out", "csv")
    with ThreadPoolExecutor(1) as other, pytest.raises(InUseError, match=r"out.partial is in use by another thread"):
        other.submit(opened, tmp_path / "out", "csv", resume=True).result()
    sink.close()
    opened(tmp_path / "out", "csv", resume=True).close()


@pytest.mark.parametrize("place", ["/dev/null", "folder"])
def test_devices_and_folders_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(ConfigError, match=rf"^{place} is (a device|a folder); expected the name of a file"):
        PartialFolder(Path(place), {"rows.csv": Path(place)}).start(resume=False, overwrite=True)


def test_a_full_disk_keeps_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, write = opened(tmp_path / "out", "csv"), os.write
    sink.write(ROWS[0])

    def full(handle: int, data: bytes) -> int:
        """Half a record still fits."""
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[:-15])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(WritingError, match=r"out cannot be written: No space .*: free some space, .* `resume`"):
            sink.write(ROWS[1])
    sink.close()
    assert written(tmp_path / "out", "csv", resume=True) == 1
    written(tmp_path / "whole", "csv")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def printed(kind: PredictionFormat, rows: Any = ROWS) -> str:
    parts = list[str]()
    sink = RowPrinter(make_prediction_layout(kind, 2), parts.append)
    for row in rows:
        sink.write(row)
    sink.finish()
    sink.close()
    return "".join(parts)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_printed_rows_equal_those_of_a_file(tmp_path: Path, kind: PredictionFormat) -> None:
    written(tmp_path / "out", kind)
    assert printed(kind).encode("utf-8", "surrogateescape") == (tmp_path / "out").read_bytes()
    assert printed("json", ()) == "[]\n"


def test_a_table_escapes_names_and_skips_failures() -> None:
    assert format_class_table(TOP, "a\nb.jpg") == "a\\nb.jpg\n  75.0%  a cat\n  33.3%  class 0\n"
    assert format_class_table(TOP) == "75.0%  a cat\n33.3%  class 0\n"
    lines = printed("table", ROWS[:4]).splitlines()
    assert lines[0] == "photos/1.jpg"
    assert lines[3:5] == ["", 'with "quotes", and\\nline\\rends.jpg']
    assert lines[7:9] == ["", "no \\udcff text.jpg"]  # a table has no rows for failures


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=2))
def test_any_text_survives_csv(fields: list[str]) -> None:
    line = format_csv_line(fields)
    (read,) = csv.reader([line])
    assert read == fields
    assert line.count('"') % 2 == 0


@given(st.text())
def test_any_name_survives_json(name: str) -> None:
    line = format_json_line({"file": name})
    line.encode()
    assert (line.count("\n"), json.loads(line)) == (1, {"file": name})


def names(count: int) -> Iterator[str]:
    return (f"photos/{n}.jpg" for n in range(count))


def test_completed_items_take_16_bytes_each() -> None:
    digests = [hash_to_integer(name.encode()) for name in names(10_000)]
    done = CompletedItems(digests, range(10_000))
    assert all(name in done for name in names(10_000))
    assert not any(f"{name}g" in done for name in names(1_000))
    assert done.digests.nbytes + done.stamps.nbytes == 160_000
    assert [done.has_changed("photos/7.jpg", stamp) for stamp in (7, 8)] == [False, True]
    assert not done.has_changed("photos/7.png", 8)
    assert "a" not in CompletedItems((), ())


@pytest.mark.parametrize(
    ("out", "kind", "found"),
    [
        (None, None, "table"),
        (None, "csv", "csv"),
        ("a.CSV", None, "csv"),
        ("a.ndjson", None, "jsonl"),
        ("a.parquet", "csv", "csv"),
        ("a", "json", "json"),
        ("a.txt", None, "`out` a.txt has none of the suffixes .csv, .jsonl"),
        ("a.csv", "table", "`format` table is for terminals; expected csv, jsonl, json or parquet"),
        (None, "parquet", "`format` parquet needs a file: set"),
    ],
)
def test_the_format_is_given_or_follows_from_the_suffix(
    out: str | None, kind: PredictionFormat | None, found: str
) -> None:
    place = None if out is None else Path(out)
    if "`" not in found:
        assert choose_prediction_format(place, kind) == found
    else:
        with pytest.raises(ConfigError, match=f"^{found}"):
            choose_prediction_format(place, kind)
