"""Tables in every format: numbers in full in CSV and JSON, names that cannot become markup, formulas or columns."""

import csv
import json
import math
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.table import TABLE_SUFFIXES, TEXT_WIDTH, Cell, Column, Mean, Shown, Table, get_value

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**12), 10**12)
MEANS = st.builds(Mean, NUMBERS, st.none() | NUMBERS)
CELLS: st.SearchStrategy[Cell] = (
    st.none() | st.text(max_size=12) | NUMBERS | MEANS | st.builds(Shown, NUMBERS, st.text(max_size=5))
)
EXAMPLE = Table(
    columns=(
        Column(name="model", max_length=8),
        Column(name="top-1", unit="%", digits=2),
        Column(name="gain", digits=1, signed=True),
        Column(name="images"),
    ),
    rows=[
        ("vit_tiny_patch16", Mean(0.8641, 0.0012), None, 10_000),
        ("=1+1|<b>&_$", Mean(0.5), 2.0, Shown(0, "none")),
    ],
    title="100% of a_b",
    notes=("one seed",),
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=4, unique=True))
    rows = draw(st.lists(st.tuples(*[CELLS] * len(names)), max_size=4))
    return Table(
        columns=tuple(
            Column(name=name, unit=draw(st.sampled_from(("", "%", "ms"))), digits=draw(st.none() | st.integers(0, 4)))
            for name in names
        ),
        rows=rows,
        title=draw(st.text(max_size=8)),
        notes=tuple(draw(st.lists(st.text(max_size=8), max_size=2))),
    )


class Reader(HTMLParser):
    """Collects the cells of a table, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.tags = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th") and data != "\n":
            self.cells[-1] += data


def test_text_rounds_numbers_and_aligns_them_to_the_right() -> None:
    assert str(EXAMPLE).splitlines() == [
        "100% of a_b",
        "",
        "model            top-1  gain  images",
        "────────  ────────────  ────  ──────",
        "vit_tin…  86.41 ± 0.12        10,000",
        "=1+1|<b…         50.00  +2.0    none",
        "",
        "one seed",
    ]


def test_three_significant_digits_by_default() -> None:
    column = Column(name="ms")
    assert [column.format_number(each) for each in (0.01234, 1.234, 12.34, 123.4, 1234.5, 12345, 0.0, math.nan)] == [
        "0.0123",
        "1.23",
        "12.3",
        "123",
        "1,234",
        "12,345",
        "0",
        "nan",
    ]


def test_markdown_latex_and_csv() -> None:
    assert EXAMPLE.to_markdown().splitlines() == [
        "100% of a_b",
        "",
        "| model | top-1 (%) | gain | images |",
        "| --- | ---: | ---: | ---: |",
        "| vit_tiny_patch16 | 86.41 ± 0.12 |  | 10,000 |",
        r"| =1+1\|\<b>\&\_$ | 50.00 | +2.0 | none |",
        "",
        "- one seed",
    ]
    assert r"vit\_tiny\_patch16 & 86.41 $\pm$ 0.12 &  & 10,000 \\" in EXAMPLE.to_latex()
    assert r"\caption{100\% of a\_b}" in EXAMPLE.to_latex()
    assert r"\begin{tabular}{lrrr}" in EXAMPLE.to_latex()
    assert EXAMPLE.to_csv().splitlines() == [
        "model,top-1,top-1 std,gain,images",
        "vit_tiny_patch16,0.8641,0.0012,,10000",
        '"\'=1+1|<b>&_$",0.5,,2.0,0',
    ]


@given(tables())
def test_json_and_csv_have_every_value(table: Table) -> None:
    read = json.loads(table.render(".json"))
    lines = list(csv.reader(StringIO(table.to_csv()), strict=True))
    assert len(lines) == 1 + len(table.rows) == 1 + len(read["rows"])
    assert [each["name"] for each in read["columns"]] == [each.name for each in table.columns]
    for line, row, record in zip(lines[1:], table.rows, read["rows"], strict=True):
        assert len(line) == len(lines[0])
        fields = dict(zip(record, line, strict=True))
        for column, cell in zip(table.columns, row, strict=True):
            value = get_value(cell)
            assert record[column.name] == value
            if isinstance(value, str):  # an apostrophe protects formulas
                assert not fields[column.name].startswith(("=", "+", "-", "@", "\t", "\r"))
            else:
                assert (float(fields[column.name]) if fields[column.name] else None) == value


@given(tables())
def test_every_format_has_one_line_per_row(table: Table) -> None:
    """Whatever the cells are: no character of a name ends a row or a cell."""
    body = table.format_rows().split("\n")
    assert len(body) == 2 + len(table.rows)
    assert all(line.replace("\n", "").isprintable() for line in body)
    markdown = [line for line in table.to_markdown().splitlines() if line.startswith("| ")]
    assert len(markdown) == 2 + len(table.rows)
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 1 + len(table.columns) for line in markdown)
    latex = [line for line in table.to_latex().splitlines() if line.endswith(r" \\")]
    assert len(latex) == 1 + len(table.rows)
    assert all(len(re.findall(r"(?<!\\)&", line)) == len(table.columns) - 1 for line in latex)
    for suffix in TABLE_SUFFIXES:
        table.render(suffix).encode()


@given(tables())
def test_names_cannot_add_tags(table: Table) -> None:
    reader = Reader()
    reader.feed(table.to_html())
    assert {*reader.tags} <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}
    assert len(reader.cells) == len(table.columns) * (1 + len(table.rows))
    assert [each for row in table.format_cells() for each in row] == reader.cells[len(table.columns) :]


def test_alignment_follows_the_cells_unless_the_column_has_its_own() -> None:
    columns = (Column(name="a"), Column(name="b"), Column(name="c", align="r"), Column(name="d"))
    table = Table(columns=columns, rows=[("x", "failed", "1/2", None), ("y", 1.5, "2/2", None)])
    assert table.alignments == "lrrl"
    assert table.drop_empty_columns().alignments == "lrr"
    assert table.with_labels(model="vit").list_records()[0] == {
        "model": "vit",
        "a": "x",
        "b": "failed",
        "c": "1/2",
        "d": None,
    }


def test_wide_text_repeats_its_first_columns() -> None:
    columns = (Column(name="model"), *(Column(name=f"column {n}", digits=2) for n in range(20)))
    parts = str(Table(columns=columns, rows=[("a", *map(float, range(20)))], repeated=1)).split("\n\n")
    assert len(parts) > 1
    assert all(part.startswith("model  column") for part in parts)
    assert all(len(line) <= TEXT_WIDTH for part in parts for line in part.splitlines())
    assert sum(part.count("column") for part in parts) == 20


def test_numbers_that_are_not_finite() -> None:
    table = Table(columns=(Column(name="loss", digits=2),), rows=[(math.nan,), (math.inf,)])
    assert [row["loss"] for row in json.loads(table.render(".json"))["rows"]] == [None, None]
    assert table.to_csv() == "loss\nnan\ninf\n"
    assert str(table).split()[2:] == ["nan", "inf"]


def test_columns_need_different_names_and_rows_all_cells() -> None:
    with pytest.raises(ValueError, match="expected different names"):
        Table(columns=(Column(name="a"), Column(name="a")), rows=[])
    with pytest.raises(ValueError, match="a cell of each per row"):
        Table(columns=(Column(name="a"),), rows=[(1, 2)])


@pytest.mark.parametrize("suffix", TABLE_SUFFIXES)
def test_write(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"new/table{suffix}"
    EXAMPLE.write(path)
    assert path.read_text("utf-8") == EXAMPLE.render(suffix)
    with pytest.raises(ValueError, match="expected one of"):
        EXAMPLE.write(tmp_path / "table.xls")
