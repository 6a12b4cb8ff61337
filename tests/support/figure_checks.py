"""Checks for every figure: it is drawn completely, as PNG and SVG, with labeled axes."""

from io import BytesIO
from itertools import combinations
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from vitrail.base.figures import CaptionedFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text


def check_figure(captioned: CaptionedFigure, *labels: str) -> None:
    """Check a figure; `labels` are required labels of its axes or of the figure."""
    png = captioned.to_png()
    assert png.startswith(b"\x89PNG")
    pixels = np.asarray(Image.open(BytesIO(png)).convert("RGB"))
    assert len(np.unique(pixels.astype(int) @ (65536, 256, 1))) > 3, "an empty figure"
    assert ElementTree.fromstring(captioned.to_svg()).tag.endswith("svg")

    figure = captioned.draw()
    figure.draw_without_rendering()
    drawn = [text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel())]
    drawn.append(figure.get_supxlabel())
    for label in labels:
        assert any(label in each.split("\n") for each in drawn)
    check_texts(figure)
    around, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(around.x0, around.y0) > -0.01, "cut off at the left or the bottom"
    assert around.x1 < width + 0.01, "cut off at the right"
    assert around.y1 < height + 0.01, "cut off at the top"
    assert captioned.title
    assert captioned.caption.endswith(".")
    assert "nan" not in captioned.caption
    assert captioned.arrays


def list_texts(figure: "Figure") -> "list[Text]":
    """All texts that are drawn, after the layout."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden: set[Any] = {
        text
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for text, place in ((tick.label1, tick.get_loc()), (tick.label2, tick.get_loc()))
        if not axes.axison or not min(axis.get_view_interval()) <= place <= max(axis.get_view_interval())
    }
    found: list[Any] = figure.findobj(Text)
    return [text for text in found if text not in hidden and text.get_visible() and text.get_text().strip()]


def check_texts(figure: "Figure") -> None:
    """No two texts overlap, and none is outside of the figure. The boxes of slanted texts are too large to tell."""
    texts = list_texts(figure)
    for each in texts:
        text, box = each.get_text(), each.get_window_extent()
        assert min(box.x0, box.y0) > -1, text
        assert box.x1 < figure.bbox.x1 + 1, text
        assert box.y1 < figure.bbox.y1 + 1, text
    boxes = [(each.get_text(), each.get_window_extent()) for each in texts if each.get_rotation() % 90 == 0]
    for (text, box), (other, its_box) in combinations(boxes, 2):
        across = min(box.x1, its_box.x1) - max(box.x0, its_box.x0)
        down = min(box.y1, its_box.y1) - max(box.y0, its_box.y0)
        assert min(across, down) < 1.5, f"{text!r} overlaps {other!r}"  # pixels
