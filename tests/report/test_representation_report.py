"""What a report shows of a run without labels: the figures of its task, with their captions, in the browser too."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.browser_pages import find_page_faults, open_in_browser

from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_WIDTH
from vitrail.report.html_page import render_page, write_page
from vitrail.report.model_report import build_run_figures_section, draw_pixels, open_saved_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from playwright.sync_api import Browser

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

EVIL = "<script>alert(1)</script>"


def draw() -> "Figure":
    figure = new_figure(FIGURE_WIDTH, 2)
    figure.subplots().imshow(np.random.default_rng(0).random((30, 90, 3)))
    return figure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the figure of a task, a file without a caption and a damaged one."""
    folder = tmp_path_factory.mktemp("run")
    title, caption = "Reconstructions", f"Input, mask, prediction × 3 {EVIL}."
    CaptionedFigure(name="mae", title=title, caption=caption, arrays={}, draw=draw).save(folder / "figures")
    draw().savefig(folder / "figures" / "plain.png")
    (folder / "figures" / "broken.png").write_bytes(b"not an image")
    return folder


def test_titles_and_captions_survive(run: Path) -> None:
    (section,), notes = build_run_figures_section(run)
    assert [(each.name, each.title) for each in section.figures] == [("mae", "Reconstructions"), ("plain", "plain")]
    assert section.figures[0].caption == f"Input, mask, prediction × 3 {EVIL}."
    assert len(notes) == 1
    assert "broken.png" in notes[0]
    assert build_run_figures_section(run / "figures") == ([], [])


def test_pixels_are_those_of_the_file(run: Path) -> None:
    figure = open_saved_figure(run / "figures" / "mae.png").draw()
    assert figure.get_size_inches().tolist() == [FIGURE_WIDTH, 2]
    pixels = np.random.default_rng(0).integers(0, 256, (26, 39, 3), dtype=np.uint8)
    drawn = draw_pixels(pixels)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    np.testing.assert_array_equal(np.asarray(canvas.buffer_rgba())[..., :3], pixels)


def test_figures_of_a_run_in_a_browser(browser: "Browser", run: Path, tmp_path: Path) -> None:
    sections, _ = build_run_figures_section(run)
    write_page(render_page("run", "A run.", sections), tmp_path / "report.html")
    rendered = open_in_browser(browser, tmp_path / "report.html", width=360, scheme="dark")
    assert find_page_faults(rendered, figures=2) == []
    assert [each.kind for each in rendered.figures] == ["img", "img"]
    assert rendered.figures[0].alt == f"Reconstructions. Input, mask, prediction × 3 {EVIL}."
