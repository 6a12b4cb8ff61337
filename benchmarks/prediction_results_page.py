"""docs/benchmarks.md: sections between markers; measuring replaces a section and keeps the others."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitrail.base.files import make_folder, write_atomically

INTRODUCTION = """# Benchmarks of prediction

`make bench` measures and writes this page; `benchmarks/prediction.py --only cold,folder` measures some of its sections
again and keeps the others. Trust the ratios; the times depend on the machine. In every section all candidates run in
shuffled order, round after round, and ratios are computed within a round. The tables show medians with quartiles.
"""
NOT_MEASURED = "Not measured yet."


def read_sections(page: Path) -> dict[str, str]:
    """The text between the markers, by section."""
    text = page.read_text("utf-8") if page.exists() else ""
    return dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)\n<!-- end \1 -->", text, re.DOTALL))


def write_page(page: Path, titles: Mapping[str, str], measured: Mapping[str, str]) -> None:
    """Write the page atomically; sections that were not measured keep their text."""
    texts = {**read_sections(page), **measured}
    parts = [
        f"## {title}\n\n<!-- begin {name} -->\n{texts.get(name, NOT_MEASURED).strip()}\n<!-- end {name} -->\n"
        for name, title in titles.items()
    ]
    make_folder(page.parent)
    write_atomically(page, lambda place: place.write_text("\n".join((INTRODUCTION, *parts)), "utf-8"))


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rows))
