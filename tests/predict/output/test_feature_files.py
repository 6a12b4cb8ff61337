"""Files of features: each image in its row."""

import csv
import os
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError
from vitrail.predict.output.feature_files import (
    FEATURE_FORMAT_BY_SUFFIX,
    FeatureFile,
    FeatureFormat,
    names_file_path,
    partial_folder_for_features,
)
from vitrail.predict.output.resumable_rows import Row, choose_format

SHAPES = [(6,), (3, 2)]
NAMES = ("1.jpg", "a,\n2.jpg", "bad.jpg", "3.jpg", "4.jpg")


def features(name: str, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    return None if name == "bad.jpg" else np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)


def opened(out: Path, kind: FeatureFormat, *, resume: bool = False) -> FeatureFile:
    partial = partial_folder_for_features(out, kind)
    partial.open_job({"model": "m"}, resume=resume)
    return FeatureFile(partial, kind)


def filled(out: Path, kind: FeatureFormat, shape: tuple[int, ...], *, resume: bool = False) -> FeatureFile:
    sink = opened(out, kind, resume=resume)
    for name in NAMES:
        if name not in sink.done:
            values = features(name, shape)
            sink.write(Row(name, values, DataError("is not an image") if values is None else None))
    return sink


def written(out: Path, kind: FeatureFormat, shape: tuple[int, ...], *, resume: bool = False) -> None:
    sink = filled(out, kind, shape, resume=resume)
    sink.finish()
    sink.close()


def check(out: Path, shape: tuple[int, ...]) -> None:
    array = np.load(out)
    assert (array.shape, array.dtype) == ((4, *shape), np.float32)
    rows = list(csv.DictReader(StringIO(names_file_path(out).read_bytes().decode())))
    assert [row["file"] for row in rows] == list(NAMES)
    assert [row["row"] for row in rows] == ["0", "1", "", "2", "3"]
    assert [row["error"] for row in rows] == ["", "", "is not an image", "", ""]
    for row in rows:
        if row["row"]:
            np.testing.assert_array_equal(array[int(row["row"])], features(row["file"], shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_array_has_a_row_per_image_and_its_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    written(tmp_path / "f.npy", "npy", shape)
    check(tmp_path / "f.npy", shape)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.files.csv", "f.npy"]
    assert np.load(tmp_path / "f.npy", mmap_mode="r").shape == (4, *shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("room", [1, 2**24])
def test_a_parquet_file_has_features_and_names(
    tmp_path: Path, shape: tuple[int, ...], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("vitrail.predict.output.feature_files.GROUP_BYTES", room)
    written(tmp_path / "f.parquet", "parquet", shape)
    assert [path.name for path in tmp_path.iterdir()] == ["f.parquet"]
    file = parquet.ParquetFile(tmp_path / "f.parquet")
    assert file.num_row_groups == (len(NAMES) if room == 1 else 1)
    rows = file.read().to_pylist()
    assert [row["file"] for row in rows] == list(NAMES)
    for row in rows:
        expected = features(row["file"], shape)
        assert (row["features"] is None) == (row["error"] == "is not an image") == (expected is None)
        if expected is not None:
            assert row["error"] is None
            np.testing.assert_array_equal(np.array(row["features"], np.float32), expected)


@pytest.mark.parametrize("room", [1, 2**24])
def test_an_npz_file_has_an_array_per_level(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.predict.output.feature_files.GROUP_BYTES", room)
    out, levels = tmp_path / "m.npz", [(1, 2, 2), (3, 1, 1)]
    partial = partial_folder_for_features(out, "npz")
    partial.open_job({"model": "m"}, resume=False)
    sink = FeatureFile(partial, "npz", levels)
    rows = np.arange(14, dtype=np.float32).reshape(2, 7)
    for name, values in (("1.jpg", rows[0]), ("bad.jpg", None), ("2.jpg", rows[1])):
        sink.write(Row(name, values))
    sink.finish()
    sink.close()
    with np.load(out) as found:
        np.testing.assert_array_equal(found["level1"], rows[:, :4].reshape(2, 1, 2, 2))
        np.testing.assert_array_equal(found["level2"], rows[:, 4:].reshape(2, 3, 1, 1))


def test_a_job_without_readable_images_writes_an_empty_array(tmp_path: Path) -> None:
    for name in ("f.npy", "f.parquet"):
        sink = opened(tmp_path / name, choose_format(tmp_path / name, None, FEATURE_FORMAT_BY_SUFFIX))
        sink.write(Row("bad.jpg", None, DataError("is not an image")))
        sink.finish()
        sink.close()
    assert np.load(tmp_path / "f.npy").size == 0
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(tmp_path / "f.parquet").to_pylist()
    assert rows == [{"file": "bad.jpg", "error": "is not an image", "features": None}]


@pytest.mark.parametrize("cut", ["files.csv", "features.npy"])
def test_a_file_truncated_at_any_byte_is_completed(tmp_path: Path, cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two files is behind."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]  # no disk fails here
    shape, size = (3,), 1
    length = 0
    while length <= size:
        out = tmp_path / "f.npy"
        filled(out, "npy", shape).close()
        place = tmp_path / "f.npy.partial" / cut
        size = place.stat().st_size
        place.write_bytes(place.read_bytes()[:length])
        sink = opened(out, "npy", resume=True)
        assert sink.failed == ("bad.jpg" in sink.done)
        sink.close()
        written(out, "npy", shape, resume=True)
        check(out, shape)
        out.unlink()
        names_file_path(out).unlink()
        length += 1 if cut == "files.csv" else 3  # a number has four bytes


def test_the_format_is_given_or_follows_from_the_suffix() -> None:
    assert choose_format(Path("a.NPY"), None, FEATURE_FORMAT_BY_SUFFIX) == "npy"
    assert choose_format(Path("a.bin"), "parquet", FEATURE_FORMAT_BY_SUFFIX) == "parquet"
    with pytest.raises(ConfigError, match=r"^`out` a.csv has none of the suffixes .npy, .parquet; .* `format`"):
        choose_format(Path("a.csv"), None, FEATURE_FORMAT_BY_SUFFIX)
