"""The sections of a report that need no classes: figures of a run, attention per head, nearest neighbours."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitrail.base.errors import DataError, VitrailError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_DPI
from vitrail.checkpoint.run_files import FIGURES_FOLDER
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem
from vitrail.inspection.explain.explain_options import ExplainOptions, default_methods
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.representation.nearest_neighbours import find_neighbours
from vitrail.report.html_page import PageSection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NEIGHBOURS = 5
MAX_BANK_IMAGES = 1000  # of the data, evenly spaced, that neighbours are searched among
MAX_RUN_FIGURES = 50


def build_run_figures_section(run: Path) -> tuple[list[PageSection], list[str]]:
    """The figures that the task of a run has written to its folder, and notes on files that cannot be read."""
    figures, notes = list[CaptionedFigure](), list[str]()
    for path in sorted((run / FIGURES_FOLDER).glob("*.png"))[:MAX_RUN_FIGURES]:
        try:
            figures.append(open_saved_figure(path))
        except DataError as error:
            notes.append(str(error))
    return ([PageSection(title="Figures of the run", figures=figures)] if figures else []), notes


def open_saved_figure(path: Path) -> CaptionedFigure:
    """A figure from its PNG file, with the title and the caption that `CaptionedFigure.save` has written to it."""
    pixels = np.asarray(open_image(path))
    with Image.open(path) as image:
        texts = {str(name): text for name, text in image.info.items() if isinstance(text, str)}
    title, caption = texts.get("Title") or path.stem, texts.get("Description") or f"Written by the run as {path.name}."
    return CaptionedFigure(name=path.stem, title=title, caption=caption, arrays={}, draw=lambda: draw_pixels(pixels))


def draw_pixels(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> "Figure":
    """A figure of these pixels, one to one."""
    figure = new_figure(pixels.shape[1] / FIGURE_DPI, pixels.shape[0] / FIGURE_DPI)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.imshow(pixels, interpolation="nearest", aspect="auto")
    return figure


def build_representation_sections(
    explainer: Explainer, images: Sequence[ImageItem], bank: Sequence[ImageItem]
) -> tuple[list[PageSection], list[str]]:
    """Attention per head and nearest neighbours of images, for a model without a head; notes on what is missing."""
    sections, notes = list[PageSection](), list[str]()
    if "heads" in default_methods(explainer.model, explainer.layers):
        options = explainer.resolve_options(ExplainOptions(method="heads"))
        maps = [explainer.explain_resolved(each.source, options, each.name).figure for each in images]
        text = "What each head of the last layer attends to."
        sections.append(PageSection(title="Attention per head", text=text, figures=maps))
    try:
        count = min(MAX_NEIGHBOURS, len(bank) - 1)
        found = find_neighbours(explainer.loaded, images, list(bank), k=count) if count > 0 else None
    except VitrailError as error:
        notes.append(f"nearest neighbours: {error}")
    else:
        if found is None:
            notes.append("nearest neighbours: 2 images or more are needed")
        else:
            text = f"The most similar of {len(bank):,} images, by the features of the model."
            sections.append(PageSection(title="Nearest neighbours", text=text, figures=found.figures))
    return sections, notes
