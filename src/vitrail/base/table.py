"""Tables of results: numbers in named columns, printed as text, JSON, CSV, Markdown, LaTeX or HTML.

A table keeps numbers as numbers. CSV and JSON have them in full; the other formats round them as their column says.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import floor, isfinite, log10
from pathlib import Path
from typing import Any, Literal

from vitrail.base.files import make_folder, write_text
from vitrail.base.text import escape_formula_in_text, escape_unprintable, format_csv_line, format_table, make_printable

TEXT_WIDTH = 100  # characters of a text that is split into parts
TABLE_SUFFIXES = (".txt", ".json", ".csv", ".md", ".tex", ".html")
LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a row it would belong to the line break before it
    **{each: f"\\{each}" for each in "&%$#_{}"},
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "→": r"$\rightarrow$",
    "−": "$-$",
    "√": r"$\surd$",
    "²": "$^2$",
    "–": "--",
    "…": r"\ldots{}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
}
# What Markdown reads as markup; an underscore within a word is not, and names have many.
MARKDOWN_MARKUP = re.compile(r"[\\`*<\[\]|~&#]|(?<![^\W_])_|_(?![^\W_])")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; }}
caption {{ text-align: left; padding-bottom: 0.6em; }}
th, td {{ padding: 0.2em 0.9em; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
{table}
</body>
</html>
"""


@dataclass(frozen=True)
class Mean:
    """A mean and its standard deviation, printed as 86.40 ± 0.12; CSV and JSON have two columns."""

    value: float
    std: float | None = None


@dataclass(frozen=True)
class Shown:
    """A value that is printed in its own way, such as 1.0 as "1" or NaN as "–"."""

    value: float | str | None
    text: str


Cell = float | str | Mean | Shown | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """How the cells of a column are printed; text is printed as it is."""

    name: str
    unit: str = ""  # named in the heading of files; of "%" the cells are shares, printed in percent
    digits: int | None = None  # after the point; None: three significant ones, and all of an integer
    signed: bool = False  # positive numbers have a +
    align: Literal["l", "r"] | None = None  # None: right if there are numbers
    max_length: int | None = None  # of a cell in text

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def format_number(self, number: float) -> str:
        if self.unit == "%":
            number *= 100
        sign = "+" if self.signed else ""
        if self.digits is not None:
            return f"{number:{sign}.{self.digits}f}"
        if isinstance(number, int) or not isfinite(number):
            return f"{number:{sign},}"
        return f"{number:{sign},.{count_decimals(number)}f}"

    def format_cell(self, cell: Cell) -> str:
        """A cell as it is printed; empty for None."""
        if isinstance(cell, Shown):
            return cell.text
        if isinstance(cell, Mean):
            deviation = "" if cell.std is None else f" ± {self.format_number(cell.std)}"
            return self.format_number(cell.value) + deviation
        return "" if cell is None else cell if isinstance(cell, str) else self.format_number(cell)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells under named columns. `str()` is its text, and a notebook displays it."""

    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: tuple[str, ...] = ()
    repeated: int = 0  # columns that begin each part of a text that is too wide; 0: it is never split

    def __post_init__(self) -> None:
        """Columns are the keys of rows."""
        names = [each.name for each in self.columns]
        if len({*names}) < len(names) or any(len(row) != len(names) for row in self.rows):
            raise ValueError(f"a table with the columns {names}; expected different names, and a cell of each per row")

    @property
    def alignments(self) -> str:
        """One of l or r for each column."""
        cells = [[row[place] for row in self.rows] for place in range(len(self.columns))]
        return "".join(
            column.align or ("r" if any(get_number(cell) is not None for cell in own) else "l")
            for column, own in zip(self.columns, cells, strict=True)
        )

    def with_labels(self, **labels: str) -> "Table":
        """The table with columns of the same text in front: model="vit_tiny", data="photos"."""
        columns = (*(Column(name=name) for name in labels), *self.columns)
        return replace(self, columns=columns, rows=[(*labels.values(), *row) for row in self.rows])

    def drop_empty_columns(self) -> "Table":
        """The table without columns in which no cell has a value."""
        places = [n for n in range(len(self.columns)) if any(row[n] not in (None, "") for row in self.rows)]
        rows = [[row[n] for n in places] for row in self.rows]
        return replace(self, columns=tuple(self.columns[n] for n in places), rows=rows)

    def format_cells(self) -> list[list[str]]:
        """The printed cells of each row, without unprintable characters."""
        return [
            [escape_unprintable(column.format_cell(cell)) for column, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def format_rows(self) -> str:
        """The text without title and notes."""
        lines = [
            [make_printable(text, column.max_length) for column, text in zip(self.columns, row, strict=True)]
            for row in ([escape_unprintable(each.name) for each in self.columns], *self.format_cells())
        ]
        heading, *lines = lines
        parts = [
            "\n".join(
                format_table(
                    [heading[n] for n in places],
                    [[line[n] for n in places] for line in lines],
                    "".join(self.alignments[n] for n in places),
                )
            )
            for places in self.split_columns([heading, *lines])
        ]
        return "\n\n".join(parts)

    def split_columns(self, lines: Sequence[Sequence[str]]) -> list[list[int]]:
        """The columns of each part: the repeated ones, and as many of the others as fit."""
        every = [*range(len(self.columns))]
        left, rest = every[: self.repeated], every[self.repeated :]
        if not (left and rest):
            return [every]
        widths = [2 + max(len(line[n]) for line in lines) for n in every]
        parts, room = list[list[int]](), 0
        for n in rest:
            if not parts or widths[n] > room:
                parts.append([*left])
                room = TEXT_WIDTH - sum(widths[each] for each in left)
            parts[-1].append(n)
            room -= widths[n]
        return parts

    def __str__(self) -> str:
        title, *notes = (escape_unprintable(each, keep="\n") for each in (self.title, *self.notes))
        return "\n\n".join(filter(None, (title, self.format_rows(), "\n".join(notes))))

    def list_records(self) -> list[dict[str, float | str | None]]:
        """One mapping from column to value per row; a standard deviation is in NAME std."""
        records = list[dict[str, float | str | None]]()
        for row in self.rows:
            record = dict[str, float | str | None]()
            for place, (column, cell) in enumerate(zip(self.columns, row, strict=True)):
                record[column.name] = get_value(cell)
                if any(get_deviation(other[place]) is not None for other in self.rows):
                    record[f"{column.name} std"] = get_deviation(cell)
            records.append(record)
        return records

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite are None, since JSON has no name for them."""
        rows = [
            {
                name: None if isinstance(value, float) and not isfinite(value) else value
                for name, value in record.items()
            }
            for record in self.list_records()
        ]
        columns = [{"name": each.name, "unit": "share" if each.unit == "%" else each.unit} for each in self.columns]
        return {"title": self.title, "columns": columns, "rows": rows, "notes": list(self.notes)}

    def to_csv(self) -> str:
        """A heading and one line per row; an apostrophe precedes text that a spreadsheet would take for a formula."""
        records = self.list_records()
        names = [*records[0]] if records else [each.name for each in self.columns]
        lines: list[list[float | str | None]] = [[*names], *([*record.values()] for record in records)]
        return "".join(format_csv_line(list(map(format_csv_field, line))) for line in lines)

    def to_markdown(self) -> str:
        rule = ["---:" if each == "r" else "---" for each in self.alignments]
        rows = [[escape_markdown(text) for text in row] for row in self.format_cells()]
        lines = ([escape_markdown(each.heading) for each in self.columns], rule, *rows)
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {escape_markdown(note)}" for note in self.notes)
        return "\n\n".join(filter(None, (escape_markdown(self.title), table, notes))) + "\n"

    def to_latex(self) -> str:
        """A table with the rules of booktabs."""
        rows = [" & ".join(map(escape_latex, row)) + r" \\" for row in self.format_cells()]
        heading = " & ".join(escape_latex(each.heading) for each in self.columns) + r" \\"
        title = [rf"\caption{{{escape_latex(self.title)}}}"] if self.title else []
        notes = [rf"\par\smallskip{{\footnotesize {escape_latex(note)}}}" for note in self.notes]
        body = [rf"\begin{{tabular}}{{{self.alignments}}}", r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
        lines = [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            *title,
            *body,
            r"\end{tabular}",
            *notes,
            r"\end{table}",
        ]
        return "".join(f"{line}\n" for line in lines)

    def to_html(self) -> str:
        """A <table> element, and its notes."""
        headings = [escape_html(each.heading) for each in self.columns]
        rows = [list(map(escape, row)) for row in self.format_cells()]
        title = [f"<caption>{escape_html(self.title)}</caption>"] if self.title else []
        body = [
            f"<thead>{self.format_html_row(headings, 'th')}</thead>",
            "<tbody>",
            *(self.format_html_row(row, "td") for row in rows),
            "</tbody>",
        ]
        notes = (f"<p>{escape_html(each)}</p>" for each in self.notes)
        return "\n".join(["<table>", *title, *body, "</table>", *notes])

    def format_html_row(self, texts: Sequence[str], tag: str) -> str:
        sides = ["right" if each == "r" else "left" for each in self.alignments]
        cells = (f'<{tag} style="text-align: {side}">{text}</{tag}>' for text, side in zip(texts, sides, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    def _repr_html_(self) -> str:
        return self.to_html()

    def render(self, suffix: str) -> str:
        """The table in the format of a file name: .txt, .json, .csv, .md, .tex or .html."""
        match suffix.lower():
            case ".txt":
                return f"{self}\n"
            case ".json":
                return json.dumps(self.to_json(), indent=2) + "\n"
            case ".csv":
                return self.to_csv()
            case ".md":
                return self.to_markdown()
            case ".tex":
                return self.to_latex()
            case ".html":
                return PAGE.format(title=escape_html(self.title or "Table"), table=self.to_html())
            case _:
                raise ValueError(f"{suffix!r}; expected one of {', '.join(TABLE_SUFFIXES)}")

    def write(self, path: Path) -> None:
        """Write the table in the format of the suffix of `path`."""
        make_folder(path.parent)
        write_text(path, self.render(path.suffix))


def get_value(cell: Cell) -> float | str | None:
    return cell.value if isinstance(cell, Mean | Shown) else cell


def get_number(cell: Cell) -> float | None:
    value = get_value(cell)
    return None if isinstance(value, str) else value


def get_deviation(cell: Cell) -> float | None:
    return cell.std if isinstance(cell, Mean) else None


def count_decimals(number: float) -> int:
    """The decimals of three significant digits; none from 100 on."""
    return max(0, 2 - floor(log10(abs(number)))) if 0 < abs(number) < 1000 else 0


def format_csv_field(value: float | str | None) -> str:
    if isinstance(value, str):
        return escape_formula_in_text(escape_unprintable(value))
    return "" if value is None else repr(value)


def escape_markdown(text: str) -> str:
    return MARKDOWN_MARKUP.sub(r"\\\g<0>", escape_unprintable(text))


def escape_latex(text: str) -> str:
    return "".join(LATEX_CHARACTERS.get(each, each) for each in escape_unprintable(text))


def escape_html(text: str) -> str:
    return escape(escape_unprintable(text))
