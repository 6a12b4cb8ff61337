"""Generated pairs: rows of digits and the same digits in reverse, for which the right attention is known."""

import numpy as np

from vitrail.data.rng import make_view_keys, uniform_randoms

REVERSAL_LANGUAGES = ("digits", "reversed")
MIN_DIGITS, MAX_DIGITS = 4, 12
REVERSAL_TRAIN, REVERSAL_VAL = 8000, 500  # pairs


def make_reversal() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Different pairs for training and validation, such as ("3 1 4 1", "1 4 1 3"): always the same ones."""
    needed = REVERSAL_TRAIN + REVERSAL_VAL
    numbers = uniform_randoms(make_view_keys(0, 0, np.arange(2 * needed), 0), 1 + MAX_DIGITS)
    lengths = MIN_DIGITS + (numbers[:, 0] * (MAX_DIGITS + 1 - MIN_DIGITS)).astype(np.int64)
    digits = (numbers[:, 1:] * 10).astype(np.int64)
    rows = [tuple(map(str, row[:length])) for row, length in zip(digits.tolist(), lengths.tolist(), strict=True)]
    pairs = [(" ".join(row), " ".join(reversed(row))) for row in dict.fromkeys(rows)][:needed]
    return pairs[REVERSAL_VAL:], pairs[:REVERSAL_VAL]
