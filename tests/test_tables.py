"""Plain text tables."""

from vitrail.tables import text_table


def test_columns_stand_left_or_right_and_lines_end_in_no_blanks() -> None:
    assert text_table(("name", "count"), [("a", "1,000"), ("longer", "")], "lr") == [
        "name    count",
        "──────  ─────",
        "a       1,000",
        "longer",
    ]


def test_an_empty_table_is_its_heading() -> None:
    assert text_table(("a",), [], "l") == ["a", "─"]
