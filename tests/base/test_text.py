"""Tables and names as plain text."""

import pytest

from vitrail.base.text import escape_unprintable, format_count, format_probability, format_table, make_printable


def test_columns_stand_left_or_right_and_lines_end_in_no_blanks() -> None:
    assert format_table(("name", "count"), [("a", "1,000"), ("longer", "")], "lr") == [
        "name    count",
        "──────  ─────",
        "a       1,000",
        "longer",
    ]


def test_an_empty_table_is_its_heading() -> None:
    assert format_table(("a",), [], "l") == ["a", "─"]


def test_unprintable_characters_are_escaped_or_replaced() -> None:
    assert escape_unprintable("Käfer 日本 a\n\x1b\udcff") == r"Käfer 日本 a\n\x1b\udcff"
    assert escape_unprintable("a\n\tb", keep="\n") == "a\n\\tb"
    assert make_printable("a\nb\udcff") == "a?b?"
    assert make_printable("abcdef", 6) == "abcdef"
    assert make_printable("abcdefg", 6) == "abcde…"


def test_counts_have_the_right_plural() -> None:
    assert [format_count(count, "epoch") for count in (1, 1.0, 0.5, 2)] == [
        "1 epoch",
        "1 epoch",
        "0.5 epochs",
        "2 epochs",
    ]
    assert [format_count(count, "class") for count in (1, 1000)] == ["1 class", "1,000 classes"]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, "100.0%"),
        (0.8637, "86.4%"),
        (0.001, "0.1%"),
        (0.000996, "0.1%"),
        (0.00094, "0.094%"),
        (0.000234, "0.023%"),
        (9.96e-5, "0.010%"),
        (1.23e-6, "0.00012%"),
        (9e-7, "<0.0001%"),
        (0.0, "<0.0001%"),
    ],
)
def test_probabilities_below_a_tenth_of_a_percent_keep_two_digits(share: float, expected: str) -> None:
    assert format_probability(share) == expected
