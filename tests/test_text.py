"""Tables and names as plain text."""

from vitrail.text import escape_unprintable, format_table, make_printable, pluralize


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


def test_nouns_agree_with_their_number() -> None:
    assert [pluralize(number, "epoch") for number in (0, 0.5, 1, 1.0, 2)] == [
        "epochs",
        "epochs",
        "epoch",
        "epoch",
        "epochs",
    ]
    assert pluralize(3, "class") == "classes"
