"""Flipped bits in OUT.partial: refused in one line, computed again or without effect; never a wrong row."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prediction_rows import make_prediction_row, open_prediction_file

from vitrail.base.errors import DataError, VitrailError
from vitrail.predict.output.feature_files import FeatureFile, names_file_path, partial_folder_for_features
from vitrail.predict.output.resumable_rows import Row
from vitrail.predict.predictions import ClassProbability

JOB = {"model": "m"}
NAMES = [f"{n}.jpg" for n in range(6)]


@pytest.fixture(autouse=True)
def unsynchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync: no disk fails here, and a thousand calls are slow."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]


def fill(sink: Any) -> None:
    for n, name in enumerate(NAMES):
        if name not in sink.done:
            error = "no image" if n == 3 else None
            if isinstance(sink, FeatureFile):
                failed = None if error is None else DataError(error)
                sink.write(Row(name, None if error else np.full(4, n, np.float32), failed, n))
            else:
                sink.write(make_prediction_row(name, (ClassProbability(n, "a", 0.5),), error=error, stamp=n))


def flips(path: Path, count: int, chance: random.Random) -> Iterator[bytes]:
    """The file with one bit flipped, at every byte or at `count` of them."""
    whole = path.read_bytes()
    places = range(len(whole)) if len(whole) <= count else sorted(chance.sample(range(len(whole)), count))
    for place in places:
        yield whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]


def is_line_about_job(name: str, error: Exception) -> bool:
    assert (name, "\n" in str(error)) == ("job.json", False)
    return True


@pytest.mark.parametrize("kind", ["csv", "jsonl", "npy"])
def test_flipped_bits_never_change_a_result(tmp_path: Path, kind: Any, mutations: int) -> None:
    """At 20 places of each file by default; with --mutations at a hundredth as many."""

    def sink_for(out: Path, *, resume: bool) -> Any:
        if kind == "npy":
            partial = partial_folder_for_features(out, kind)
            partial.open_job(JOB, resume=resume)
            return FeatureFile(partial, kind)
        return open_prediction_file(out, kind, 1, JOB, resume=resume)

    def finals(out: Path) -> list[bytes]:
        return [path.read_bytes() for path in (out, *([names_file_path(out)] if kind == "npy" else []))]

    sink = sink_for(tmp_path / f"whole.{kind}", resume=False)
    fill(sink)
    sink.finish()
    whole = finals(tmp_path / f"whole.{kind}")
    out, chance, refused = tmp_path / f"out.{kind}", random.Random(0), 0
    folder = out.with_name(f"{out.name}.partial")
    sink = sink_for(out, resume=False)
    fill(sink)
    sink.close()
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) >= 3
    for name in kept:
        for damaged in flips(folder / name, max(1, mutations // 100), chance):
            folder.mkdir(exist_ok=True)
            for other, data in kept.items():
                (folder / other).write_bytes(damaged if other == name else data)
            try:
                sink = sink_for(out, resume=True)
            except VitrailError as error:
                refused += is_line_about_job(name, error)
                continue
            fill(sink)
            sink.finish()
            assert finals(out) == whole, name
            out.unlink()
        (folder / name).unlink(missing_ok=True)
        for other, data in kept.items():
            folder.mkdir(exist_ok=True)
            (folder / other).write_bytes(data)
    assert refused
