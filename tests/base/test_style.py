"""One table of colors and sizes: pages get all of it, its text is legible, and its maps have the right middle."""

import re
from pathlib import Path

import pytest

from vitrail.base.style import DIVERGING_MAP, PAGE_COLORS, TEXT_COLORS, TEXT_SIZES, css_variables

PACKAGE = Path(__file__).parents[2] / "src" / "vitrail"


def compute_luminance(color: str) -> float:
    shares = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def compute_contrast(one: str, other: str) -> float:
    """As in WCAG 2, from 1 to 21."""
    low, high = sorted(map(compute_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", TEXT_COLORS)
def test_text_is_legible_on_light_and_dark_pages_and_in_figures(name: str) -> None:
    assert compute_contrast("#000000", "#ffffff") == pytest.approx(21)
    for theme in (0, 1):
        for behind in ("paper", "shade"):
            assert compute_contrast(PAGE_COLORS[name][theme], PAGE_COLORS[behind][theme]) >= 4.5
    assert compute_contrast(PAGE_COLORS[name][0], "#ffffff") >= 4.5


def test_pages_use_variables_of_the_table_alone() -> None:
    """A page names no color but that of a figure, which is white in dark pages too, and of paper in print."""
    from vitrail.report.html_page import STYLESHEET

    style = STYLESHEET + (PACKAGE / "serve" / "page" / "word_lines.css").read_text("utf-8")
    assert set(re.findall(r"#[0-9a-fA-F]{3,6}\b", style)) == {"#fff", "#000"}
    known = set(re.findall(r"--([a-z]+):", css_variables()))
    used = set(re.findall(r"var\(--([a-z]+)", style))
    assert used - known == {"own", "least", "stroke", "share"}, "set where they are used"
    assert not re.findall(r"font(?:-size)?:[.\d]+(?:rem|px)", style)
    assert [f"{pixels / 16:g}rem" in css_variables() for pixels in TEXT_SIZES.values()] == [True] * 4


def test_no_other_file_names_a_color() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name != "style.py" and re.search(r"[\"']#[0-9a-fA-F]{6}[\"']", path.read_text("utf-8"))
    ]
    assert found == []


def test_middle_of_signed_maps_is_neutral() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    from matplotlib import colormaps

    red, green, blue, _ = colormaps[DIVERGING_MAP](0.5)
    assert min(red, green, blue) > 0.9
    assert max(red, green, blue) - min(red, green, blue) < 0.02
