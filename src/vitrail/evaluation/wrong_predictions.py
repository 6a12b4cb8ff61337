"""The images that a model predicts wrong, most confident mistakes first, and the list of them as CSV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitrail.base.files import write_atomically
from vitrail.base.text import escape_formula_in_text, format_csv_line
from vitrail.predict.output.resumable_rows import encode_utf8, escape_formula_in_path, round_probability

WRONG_COLUMNS = ("file", "label", "predicted", "probability", "label_probability")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongPrediction:
    """An image whose top class is not its label. Probabilities are from 0 to 1."""

    index: int  # in the data
    name: str  # the path of a file
    label: str  # the true class
    predicted: str
    probability: float  # of the predicted class
    label_probability: float


def list_wrong_predictions(
    rows: Sequence[Tensor], labels: Sequence[str], name_image: Callable[[int], str]
) -> list[WrongPrediction]:
    """The wrong predictions of `MetricAccumulator.wrong`, most confident first; images of equal confidence in order."""
    found: list[list[float]] = torch.cat([*rows, torch.zeros(0, 5, dtype=torch.float64)]).tolist()
    found.sort(key=lambda row: (-row[3], row[0]))
    return [
        WrongPrediction(
            index=int(index),
            name=name_image(int(index)),
            label=labels[int(label)],
            predicted=labels[int(predicted)],
            probability=probability,
            label_probability=label_probability,
        )
        for index, label, predicted, probability, label_probability in found
    ]


def write_wrong_csv(wrong: Sequence[WrongPrediction], path: Path) -> None:
    """Write one row per wrong prediction; without any, the file has only its header."""
    rows = [
        (
            escape_formula_in_path(each.name),
            escape_formula_in_text(each.label),
            escape_formula_in_text(each.predicted),
            str(round_probability(each.probability)),
            str(round_probability(each.label_probability)),
        )
        for each in wrong
    ]
    text = "".join(map(format_csv_line, (WRONG_COLUMNS, *rows)))
    write_atomically(path, lambda place: place.write_bytes(encode_utf8(text)))
