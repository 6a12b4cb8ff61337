"""Generated rows of digits."""

from vitrail.data.text.pairs import open_pairs
from vitrail.data.text.reversal import MAX_DIGITS, MIN_DIGITS, make_reversal


def test_targets_are_the_digits_in_reverse() -> None:
    train, val = make_reversal()
    assert (len(train), len(val), len({*train, *val})) == (8000, 500, 8500)
    for source, target in (*train, *val):
        assert target.split() == source.split()[::-1]
        assert MIN_DIGITS <= len(source.split()) <= MAX_DIGITS
    lengths = {len(source.split()) for source, _ in val}
    assert lengths == {*range(MIN_DIGITS, MAX_DIGITS + 1)}
    assert {digit for source, _ in val for digit in source.split()} == {*"0123456789"}


def test_they_are_always_the_same() -> None:
    assert make_reversal() == make_reversal()
    pairs = open_pairs("reversal", seed=7)
    assert pairs.languages == ("digits", "reversed")
    assert (pairs.train.source(0), pairs.train.target(0)) == make_reversal()[0][0]
    back = open_pairs("reversal", "reversed-digits")
    assert (back.train.source(0), back.train.target(0)) == make_reversal()[0][0][::-1]
