"""Report on one model: architecture, predictions, explanations, figures of its weights and layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitrail import __version__
from vitrail.base.errors import DataError, VitrailError
from vitrail.base.figures import CaptionedFigure, new_figure
from vitrail.base.style import FIGURE_DPI
from vitrail.base.text import TableCells, format_count, format_probability
from vitrail.checkpoint.run_files import FIGURES_FOLDER
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem, spread_over_labels
from vitrail.inspection.attention.capture import list_blocks
from vitrail.inspection.explain.explain_options import ExplainOptions, default_methods
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.explanation import Explanation
from vitrail.inspection.model_figures import look
from vitrail.inspection.representation.nearest_neighbors import find_neighbors
from vitrail.inspection.summary import ModelSummary, format_shape, summarize
from vitrail.layers.block import Block
from vitrail.predict.predictions import ClassProbability
from vitrail.report.evaluation_report import (
    EvaluatedImages,
    build_result_sections,
    build_training_section,
    list_typical_images,
)
from vitrail.report.html_page import PageSection
from vitrail.train.run_list import RunSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NEIGHBORS = 5
MAX_BANK_IMAGES = 1000  # of the data, evenly spaced, that neighbors are searched among
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
    """Attention per head and nearest neighbors of images, for a model without a head; notes on what is missing."""
    sections, notes = list[PageSection](), list[str]()
    if "heads" in default_methods(explainer.model, explainer.layers):
        options = explainer.resolve_options(ExplainOptions(method="heads"))
        maps = [explainer.explain_resolved(each.source, options, each.name).figure for each in images]
        text = "What each head of the last layer attends to."
        sections.append(PageSection(title="Attention per head", text=text, figures=maps))
    try:
        count = min(MAX_NEIGHBORS, len(bank) - 1)
        found = find_neighbors(explainer.loaded, images, list(bank), k=count, progress=False) if count > 0 else None
    except VitrailError as error:
        notes.append(f"nearest neighbors: {error}")
    else:
        if found is None:
            notes.append("nearest neighbors: 2 images or more are needed")
        else:
            text = f"The most similar of {len(bank):,} images, by the features of the model."
            sections.append(PageSection(title="Nearest neighbors", text=text, figures=found.figures))
    return sections, notes


TOP_PREDICTIONS = 3  # in the table of predictions
FIGURE_SECTIONS = (  # title, introduction, figures of `look`
    ("Attention distance", "", ("attention_distance",)),
    (
        "Occlusion check",
        "Patches are removed in the order of the map, and the class is predicted again.",
        ("occlusion",),
    ),
    ("Patch features", "", ("patch_pca",)),
    ("Position embeddings", "", ("position_similarity",)),
    ("First-layer filters", "", ("filters",)),
    ("Tokens by layer", "", ("token_norms", "token_similarity", "alignment")),
)


def build_model_report(
    explainer: Explainer,
    name: str,
    images: Sequence[ImageItem] = (),
    *,
    explained: int = 6,
    batch: int = 4,
    evaluated: EvaluatedImages | None = None,
    run: RunSummary | None = None,
    bank: Sequence[ImageItem] = (),
    notes: Sequence[str] = (),
    progress: Callable[[int], object] | None = None,
) -> tuple[str, str, list[PageSection]]:
    """Build title, lead and sections: maps of `explained` images, and figures over all of them.

    An evaluation adds its results, a run its training curves and the figures of its task. The neighbors of a model
    without a head are searched in the `bank`, by default in the images. `notes` say what could not be included.
    `progress` is called with 1 for each explained image and for each image of the figures.
    """
    skipped, explanations = list[str](), list[tuple[ImageItem, Explanation]]()
    options = explainer.resolve_options(ExplainOptions(method=explainer.default_method))
    for each, truth in choose_explained_images(images, evaluated, explained):
        try:
            explanation = explainer.explain_resolved(each.source, options, each.name)
            explanations.append((each, replace(explanation, truth=truth)))
        except DataError as error:
            skipped.append(str(error))
        if progress is not None:
            progress(1)
    model_figures = look(explainer, (each.source for each in images), batch=batch, progress=progress or False)
    summary = summarize(explainer.model)
    sections = [] if evaluated is None else build_result_sections(evaluated)
    notes = [*notes]
    if run is not None:
        of_task, unreadable = build_run_figures_section(run.folder)
        sections += [build_training_section(run), *of_task]
        notes += unreadable
    sections.append(PageSection(title="Model", table=build_model_table(explainer, summary)))
    if explanations:
        if explainer.loaded.classes:
            sections.append(PageSection(title="Predictions", table=build_prediction_table(explanations)))
        figures = [each.figure for _, each in explanations]
        order = "" if evaluated is None else " The most confident mistakes come first, then typical right predictions."
        text = f"{figures[0].legend}{order}"
        if explainer.no_maps_reason:
            text += f" There are no attention maps: {explainer.no_maps_reason}."
        sections.append(PageSection(title="What the model looked at", text=text, figures=figures))
        if not explainer.loaded.classes:
            readable = [each for each, _ in explanations]
            more, missing = build_representation_sections(explainer, readable, bank or images)
            sections += more
            notes += missing
    by_name = {figure.name: figure for figure in model_figures.figures}
    for title, text, names in FIGURE_SECTIONS:
        if found := [by_name[each] for each in names if each in by_name]:
            sections.append(PageSection(title=title, text=text, figures=found))
    sections.append(PageSection(title="Layers", preformatted=str(summary)))
    if missing := [*notes, *model_figures.notes, *dict.fromkeys([*skipped, *model_figures.skipped])]:
        sections.append(PageSection(title="Not included", text="\n\n".join(missing)))
    return Path(name).name or name, format_lead(explainer, summary, model_figures.images, evaluated), sections


def choose_explained_images(
    images: Sequence[ImageItem], evaluated: EvaluatedImages | None, count: int
) -> list[tuple[ImageItem, ClassProbability | None]]:
    """Images of different classes; of evaluated ones, half are the most confident mistakes, with the true classes."""
    if evaluated is None:
        return [(images[n], None) for n in spread_over_labels([image.label for image in images], count)]
    right, wrong = list_typical_images(evaluated), [each.index for each in evaluated.result.wrong]
    mistakes = wrong[: max(-(-count // 2), count - len(right))]
    chosen = [*mistakes, *right[: count - len(mistakes)]]
    truths = [
        ClassProbability(label, evaluated.result.labels[label], evaluated.label_probabilities[index].item())
        for index, label in zip(chosen, evaluated.labels[chosen].tolist(), strict=True)
    ]
    return list(zip(evaluated.found.take(chosen), truths, strict=True))


def format_lead(explainer: Explainer, summary: ModelSummary, images: int, evaluated: EvaluatedImages | None) -> str:
    size = format_shape(summary.input[2:])
    sample = f" Figures use {format_count(images, 'image')}." if images else ""
    classes = f", {explainer.loaded.classes:,} classes" if explainer.loaded.classes else ", without a head"
    accuracy = ""
    if evaluated is not None:
        count = format_count(evaluated.result.images, "validation image")
        accuracy = f" Top-1 accuracy {evaluated.result.top1:.2%} on {count} of {evaluated.found.name}."
    return (
        f"{summary.model}, {summary.parameters / 1e6:.1f} million parameters, images of {size} pixels{classes}."
        f"{accuracy}{sample}"
    )


def build_model_table(explainer: Explainer, summary: ModelSummary) -> TableCells:
    preprocessing = explainer.loaded.preprocessing
    blocks = list_blocks(explainer.model)
    layers: list[Any] = explainer.layers or [block.attn for block in blocks if isinstance(block, Block)]
    rows = [
        ("architecture", summary.model),
        ("parameters", f"{summary.parameters:,}"),
        ("multiply-adds per image", f"{summary.macs / 1e9:.3f} billion"),
        ("attention layers and heads", describe_attention_layers([each.heads for each in layers])),
        (
            "preprocessing",
            f"{preprocessing.fit.replace('_', ' ')}, crop {preprocessing.crop:.0%}, {preprocessing.interpolation}",
        ),
        ("mean and std per channel", f"{format_numbers(preprocessing.mean)}; {format_numbers(preprocessing.std)}"),
        ("created with", f"vitrail {__version__}"),
    ]
    return ("", ""), rows, "ll"


def describe_attention_layers(heads: Sequence[int]) -> str:
    if not heads:
        return "none"
    span = f"{min(heads)} to {max(heads)}" if min(heads) < max(heads) else f"{heads[0]}"
    return f"{len(heads)}, {span} each"


def format_numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def build_prediction_table(explanations: Sequence[tuple[ImageItem, Explanation]]) -> TableCells:
    rows = list[tuple[str, ...]]()
    for each, explanation in explanations:
        top: list[Any] = [] if explanation.prediction is None else list(explanation.prediction.top[:TOP_PREDICTIONS])
        cells = [f"{one.name} {format_probability(one.probability)}" for one in top]
        rows.append(
            (Path(each.name).name, each.label or "", *cells, *("" for _ in range(TOP_PREDICTIONS - len(cells))))
        )
    return ("image", "label", "top 1", "top 2", "top 3"), rows, "lllll"
