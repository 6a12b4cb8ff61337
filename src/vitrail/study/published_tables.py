"""Tables and figures of the papers as data, one file per paper in published/, printed as the paper prints them.

Numbers that a figure only draws are marked as approximate. What is known from memory alone is not in the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vitrail.base.errors import ConfigError, find_nearest_name
from vitrail.base.files import read_text
from vitrail.base.json_yaml import parse_yaml
from vitrail.base.table import Cell, Column, Table

FOLDER = Path(__file__).with_name("published")
PRINTED = "printed"
TRUST_NOTES = {  # of numbers that are not printed in the paper
    "read off the plot by a third party": "These numbers were read off the plot, so they are approximate.",
    "quoted by a third party": "These numbers are as other papers quote them.",
    "as stated by the repository": "These numbers are those of the README of the authors' code.",
    "rerun by timm": "Measured by the author of timm with converted weights.",
    "measured by timm": "Measured by the author of timm.",
}


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table, a figure or the numbers of a section; `rows` are in the order of `columns`, None is not printed."""

    id: str  # paper.table: deit.table8
    paper: str
    arxiv: str  # empty for what is not in a paper
    where: str
    shows: str
    trust: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    protocol: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: Sequence[str] = ()

    def find_row(self, name: str) -> Mapping[str, Cell]:
        """The first row that begins with this name, by column."""
        row = next((row for row in self.rows if row[0] == name), None)
        if row is None:
            names = ", ".join(str(each[0]) for each in self.rows)
            raise ConfigError(f"{self.id} has no row {name!r}; expected one of {names}")
        return {column.name: cell for column, cell in zip(self.columns, row, strict=True)}

    @property
    def source(self) -> str:
        arxiv = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.paper}{arxiv}, {self.where}"

    def to_table(self) -> Table:
        """The table with its source, and below it what the numbers hold for."""
        trust = [] if self.trust == PRINTED else [TRUST_NOTES[self.trust]]
        protocol = [f"{name}: {text}" for name, text in self.protocol.items()]
        return Table(
            columns=self.columns,
            rows=self.rows,
            title=f"{self.shows} ({self.source})",
            notes=(*trust, *protocol, *self.notes),
            repeated=1,
        )


@cache
def read_published_tables() -> Mapping[str, PublishedTable]:
    """All tables by id."""
    found = dict[str, PublishedTable]()
    for path in sorted(FOLDER.glob("*.yaml")):
        content: Any = parse_yaml(read_text(path))
        for each in content["tables"]:
            columns = tuple(make_column(**column) for column in each.pop("columns"))
            rows = tuple(tuple(row) for row in each.pop("rows"))
            table = PublishedTable(
                paper=content["paper"], arxiv=content.get("arxiv", ""), columns=columns, rows=rows, **each
            )
            found[table.id] = table
    return found


def make_column(name: str, unit: str = "", digits: int | None = None) -> Column:
    """Percentages are kept as they are printed, not as shares."""
    return Column(name=name, unit="percent" if unit == "%" else unit, digits=digits)


def find_published_table(name: str) -> PublishedTable:
    tables = read_published_tables()
    if name not in tables:
        nearest = find_nearest_name(name, list(tables))
        hint = f"did you mean {nearest!r}?" if nearest else "for example deit.table8"
        raise ConfigError(f"{name!r} is not a published table; {hint}")
    return tables[name]


def list_published_tables() -> Table:
    """One row per table: its id, the paper, where it is and what it shows."""
    tables = read_published_tables().values()
    return Table(
        columns=(Column(name="id"), Column(name="source", max_length=40), Column(name="shows", max_length=80)),
        rows=[(each.id, f"{each.arxiv or each.paper}, {each.where}", each.shows) for each in tables],
        title="Published tables and figures",
    )
