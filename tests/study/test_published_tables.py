"""The published tables against what they repeat of each other, printed means and parameter counts of our presets."""

import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from vitrail.base.errors import ConfigError
from vitrail.models.catalog.preset_costs import list_presets, resolve_alias
from vitrail.study.published_tables import TRUST_NOTES, find_published_table, read_published_tables

PUBLISHED = Path(__file__).parents[2].parent / "shared/published/published.yaml"


def get(table: str, row: str, column: str) -> float:
    value = find_published_table(table).find_row(row)[column]
    assert isinstance(value, int | float)
    return value


def test_tables_are_complete() -> None:
    tables = read_published_tables()
    assert len(tables) == 58
    for each in tables.values():
        assert each.rows
        assert all(len(row) == len(each.columns) for row in each.rows), each.id
        assert each.trust == "printed" or each.trust in TRUST_NOTES
        assert each.arxiv == "" or re.fullmatch(r"\d{4}\.\d{5}", each.arxiv)
        assert str(each.to_table()).startswith(each.shows)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/published/published.yaml")
def test_rows_are_those_of_the_extraction_without_what_is_known_from_memory() -> None:
    extracted: Any = yaml.safe_load(PUBLISHED.read_text("utf-8"))["tables"]
    rows = {each["id"]: [tuple(row) for row in each["rows"]] for each in extracted if each["trust"] != "memory"}
    del rows["vit.params.others"]  # counts of others, not of the paper
    ours = {name: [tuple(row) for row in each.rows] for name, each in read_published_tables().items()}
    assert {name: numbers(found) for name, found in ours.items()} == {
        name: numbers(each) for name, each in rows.items()
    }


def numbers(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [[cell for cell in row if not isinstance(cell, str)] for row in rows]


@pytest.mark.parametrize(
    ("table", "row", "column", "preset"),
    [
        ("deit.table1", "DeiT-Ti", "params", "deit_tiny_patch16_224"),
        ("deit.table1", "DeiT-S", "params", "deit_small_patch16_224"),
        ("deit.table1", "DeiT-B", "params", "deit_base_patch16_224"),
        ("cait.zoo", "M48", "params", "cait_m48_448"),
        ("cait.zoo", "S36", "params", "cait_s36_384"),
        ("t2t.table2", "T2T-ViT-14", "params", "t2t_vit_14"),
        ("t2t.table2", "T2T-ViT-24", "params", "t2t_vit_24"),
    ],
)
def test_parameters_are_those_of_the_presets(table: str, row: str, column: str, preset: str) -> None:
    """In millions, to the printed digit; DeiT's are truncated."""
    found = find_published_table(table)
    printed = get(table, row, column)
    digits = next(each.digits for each in found.columns if each.name == column)
    ours = list_presets()[resolve_alias(preset) or preset]["parameters"] / 1e6
    assert abs(ours - printed) <= 10.0 ** -(digits or 0), (ours, printed)


def test_printed_means() -> None:
    """VTAB's mean of 19 tasks; disagreement with the ground truth is 1 - accuracy."""
    tasks = find_published_table("vit.table9")
    for row in tasks.rows:
        values = [cell for cell in row[1:] if isinstance(cell, int | float)]
        assert len(values) == 20
        assert mean(values[:-1]) == pytest.approx(values[-1], abs=0.06)
    for name in ("ViT-H/14 (JFT)", "ViT-L/16 (JFT)", "ViT-L/16 (I21k)"):
        assert get("vit.table9", name, "Mean") == pytest.approx(get("vit.table2", name, "VTAB-19"), abs=0.06)
    assert get("deit.table4", "ground truth", "DeiT") == pytest.approx(
        1 - get("deit.table2", "DeiT-B", "teacher accuracy") / 100
    )


def test_tables_that_repeat_each_other() -> None:
    assert get("deit.table8", "default", "224") == get("deit.table3", "no distillation", "DeiT-B 224")
    sizes = {row[0]: row[2] for row in find_published_table("deit.table10").rows}
    assert (sizes[224], sizes[384]) == (81.8, 83.1)
    both = find_published_table("deit.table3").find_row("distillation token: class + distillation")
    assert (both["DeiT-B 224"], both["DeiT-B fine-tuned 384"]) == (83.4, 84.5)
    figure = {row[0]: row[4:] for row in find_published_table("deit.figure3").rows}
    assert figure[300] == (both["DeiT-B 224"], both["DeiT-B fine-tuned 384"])
    base = find_published_table("transformer.table3").rows[0]
    assert 25.8 in base


def test_what_a_figure_only_draws_is_marked() -> None:
    assert "These numbers were read off the plot, so they are approximate." in str(
        find_published_table("deit.figure3").to_table()
    )


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"'deit.tabel8' is not a published table; did you mean 'deit.table8'\?"):
        find_published_table("deit.tabel8")
    with pytest.raises(ConfigError, match=r"deit.table2 has no row 'x'; expected one of DeiT-B, RegNetY-4GF"):
        find_published_table("deit.table2").find_row("x")


def test_the_package_names_papers_only() -> None:
    folder = Path(find_published_table.__code__.co_filename).with_name("published")
    text = "".join(path.read_text("utf-8") for path in folder.glob("*.yaml"))
    assert not re.search(r"notes\d|source material|library id|from memory", text)
