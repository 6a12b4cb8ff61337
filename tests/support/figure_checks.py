"""Checks for every figure: it is drawn completely, as PNG and SVG, with labelled axes."""

from io import BytesIO
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from vitrail.figures import CaptionedFigure


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
        assert label in drawn
    around, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(around.x0, around.y0) > -0.01, "cut off at the left or the bottom"
    assert around.x1 < width + 0.01, "cut off at the right"
    assert around.y1 < height + 0.01, "cut off at the top"
    assert captioned.title
    assert captioned.caption.endswith(".")
    assert "nan" not in captioned.caption
    assert captioned.arrays
