"""Plain text tables."""

from vitrail.text import format_table


def test_columns_stand_left_or_right_and_lines_end_in_no_blanks() -> None:
    assert format_table(("name", "count"), [("a", "1,000"), ("longer", "")], "lr") == [
        "name    count",
        "──────  ─────",
        "a       1,000",
        "longer",
    ]


def test_an_empty_table_is_its_heading() -> None:
    assert format_table(("a",), [], "l") == ["a", "─"]
