"""Prediction jobs from Python, without the command line."""

import csv
from pathlib import Path

import numpy as np
import pytest
from support.saved_models import write_model_folder
from support.toy_datasets import write_image

import vitrail
from vitrail.base.errors import ConfigError, DataError
from vitrail.predict.engine_selection import EngineOptions
from vitrail.predict.image_rows import FeatureRows, PredictionRows, format_field
from vitrail.predict.job import Job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(3):
        write_image(tmp_path / "photos" / "below" / f"{number}.png", number)
    return tmp_path / "photos"


def test_predictions_in_a_file(model: str, photos: Path, tmp_path: Path) -> None:
    out, notes, totals = tmp_path / "out.csv", list[str](), list[int]()

    class Progress:
        def __init__(self, total: int) -> None:
            totals.append(total)

        def __enter__(self) -> "Progress":
            return self

        def __exit__(self, *_: object) -> None: ...

        def __call__(self, count: int) -> None:
            totals.append(-count)

    rows = PredictionRows(model=model, inputs=[str(photos)], top=2)
    job = Job(rows=rows, out=out, on_note=notes.append, progress=lambda total: Progress(total))
    result = job.run()
    assert (result.out, result.total, result.failed, result.was_complete) == (out, 3, 0, False)
    result.raise_if_failed()
    assert totals == [3, -1, -1, -1]
    assert notes
    with out.open() as file:
        found = list(csv.DictReader(file))
    expected = list(vitrail.Predictor(model).predict_all(sorted((photos / "below").iterdir()), top=2))
    assert [row["label_1"] for row in found] == [each.top[0].label for each in expected]
    with pytest.raises(ConfigError, match=r"out.csv already exists; use `overwrite`") as caught:
        job.run()
    assert "overwrite" in caught.value.fields


def test_features_in_a_file(model: str, photos: Path, tmp_path: Path) -> None:
    rows = FeatureRows(model=model, inputs=[str(photos)], options=EngineOptions(output="mean"))
    Job(rows=rows, out=tmp_path / "f.npy").run()
    assert np.load(tmp_path / "f.npy").shape == (3, 16)
    with pytest.raises(ConfigError, match="features need a file; set `out`"):
        Job(rows=rows).run()


def test_unreadable_images_are_counted_and_reported(model: str, photos: Path, tmp_path: Path) -> None:
    (photos / "bad.png").write_text("text")
    errors, rows = list[DataError](), list[str]()
    source = PredictionRows(model=model, inputs=[str(photos), str(tmp_path / "no*")], format="jsonl")
    result = Job(rows=source, on_error=errors.append, write_text=rows.append).run()
    assert (result.total, result.failed, len(result.problems)) == (4, 1, 1)
    assert [type(error) for error in errors] == [DataError, DataError]
    assert sum("error" in row for row in rows) == 1
    with pytest.raises(DataError, match="1 of 4 images and 1 of the arguments could not be read"):
        result.raise_if_failed()


def test_fields_are_recorded_as_users_write_them() -> None:
    values = {"heads": 3, "pool": "mean", "stages": [3, 4, 9], "trained_size": (32, 128), "distilled": True}
    assert [format_field(name, value) for name, value in values.items()] == [
        *("heads=3", "pool=mean", "stages=[3,4,9]", "trained_size=32x128", "distilled=true")
    ]
