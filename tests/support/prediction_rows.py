"""Rows of predictions, and a file for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.base.errors import DataError
from vitrail.predict.image_rows import (
    PredictionFormat,
    format_class_table,
    make_prediction_layout,
    make_prediction_record,
)
from vitrail.predict.output.resumable_rows import Row
from vitrail.predict.output.row_files import RowFile
from vitrail.predict.predictions import ClassProbability


def make_prediction_row(
    name: str, top: Sequence[ClassProbability] = (), *, error: str | None = None, stamp: int = 0
) -> Row:
    """As a job makes it."""
    if error is not None:
        return Row(name, {"file": name, "error": error}, DataError(error), stamp)
    return Row(name, make_prediction_record(name, top), None, stamp, format_class_table(top, name))


def open_prediction_file(
    out: Path, kind: PredictionFormat, top: int, job: Mapping[str, Any], *, resume: bool = False
) -> RowFile:
    layout = make_prediction_layout(kind, top)
    partial = layout.partial_folder(out)
    partial.open_job(job, resume=resume)
    return RowFile(partial, layout)
