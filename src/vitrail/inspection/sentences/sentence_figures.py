"""Figures of what a model reads while it translates a sentence: attention next to occlusion, heads, self-attention."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.base.figures import CaptionedFigure, new_figure, sanitize_label
from vitrail.base.style import FIGURE_WIDTH, LABEL_POINTS, NOTE_POINTS, PALE, SECOND_SHARE_MAP, SHARE_MAP
from vitrail.base.text import format_count
from vitrail.inspection.attention.capture import resolve_index
from vitrail.inspection.sentences.sentence_attention import MapKind, SentenceAttention
from vitrail.inspection.sentences.word_occlusion import WordOcclusion, compare_with_occlusion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MapHead = int | Literal["mean"]
MAX_WORD_LENGTH = 14  # characters of a label
CELL_SIDE, MIN_CELL_SIDE, SMALL_CELL_SIDE = 0.36, 0.13, 0.09  # inches; the last in the grid of all heads
LABEL_ROOM, BAR_ROOM = 1.0, 0.8  # inches
MIN_CELL_SIDE_WITH_NUMBERS, MIN_BAR_HEIGHT, MIN_TITLE_WIDTH = 0.3, 1.6, 2.4  # inches
KIND_NAMES: dict[MapKind, str] = {
    "cross": "cross-attention",
    "encoder": "self-attention of the encoder",
    "decoder": "self-attention of the decoder",
}


class WordMap(NamedTuple):
    """A panel of a figure."""

    title: str
    values: NDArray[Any]  # (rows, columns)
    rows: Sequence[str]
    columns: Sequence[str]
    colors: str = SHARE_MAP
    unit: str = "attention"
    outlined: Sequence[int] = ()  # a column of each row


def describe_map(read: SentenceAttention, layer: int, head: MapHead, kind: MapKind = "cross") -> str:
    """The layer and head of a map, from 0: layer 2, mean of 4 heads."""
    maps = read.find_maps(kind)
    layers, heads = (0, 0) if maps is None else (maps.shape[0], maps.shape[1])
    number = resolve_index(layer, layers, "`layer`")
    if head == "mean":
        return f"layer {number}, mean of {heads} heads" if heads > 1 else f"layer {number}"
    return f"layer {number}, head {resolve_index(head, heads, '`head`')}"


def clamp_layer(layer: int, layers: int) -> int:
    """The same layer of another stack, which may have fewer: the last one then."""
    return max(min(layer, layers - 1), -layers)


def draw_cross_attention(
    read: SentenceAttention, occlusion: WordOcclusion, layer: int = -1, head: MapHead = "mean", name: str = "attention"
) -> CaptionedFigure:
    """The words that each target word reads, next to those that it depends on; without attention, these only."""
    rows, source = read.target.words, read.source.words
    important = occlusion.losses.argmax(1)[: len(read.target_words)].tolist()
    panels = [
        WordMap(
            title="occlusion: loss without the word",
            values=np.pad(occlusion.losses, ((0, 0), (0, 1)), constant_values=np.nan),  # the end is never left out
            rows=rows,
            columns=source,
            colors=SECOND_SHARE_MAP,
            unit="fall of the log-probability",
            outlined=important,
        )
    ]
    text = (
        "Occlusion: how much the log-probability of each target word falls if a source word is left "
        f"out; boxes mark the largest of each row. {capitalise(str(occlusion))}."
    )
    arrays = {"occlusion": occlusion.losses, "log_probabilities": occlusion.log_probabilities}
    attention = read.select_map("cross", layer, head)
    if attention is None:
        text = f"There is no attention map: {read.no_maps_reason}. {text}"
    else:
        which = describe_map(read, layer, head)
        panels.insert(0, WordMap(f"attention: {which}", attention, rows, source, outlined=important))
        agreement = compare_with_occlusion(attention, occlusion, read)
        end = attention[: len(read.target_words), -1]
        text = (
            f"Attention from target words (rows) to source words (columns), {which}; {format_mean(end)} is "
            f"on the end of the sentence. {text} {capitalise(str(agreement))}."
        )
        arrays |= {"attention": attention}
    return CaptionedFigure(
        name=name,
        title="Which source words each target word uses",
        caption=text,
        arrays={**arrays, "source": np.array(source), "target": np.array(rows)},
        draw=lambda: draw_panels(panels, "boxes: the source word that a target word depends on most, by occlusion"),
    )


def format_mean(values: NDArray[Any]) -> str:
    return f"{values.mean() if values.size else 0:.0%}"


def capitalise(text: str) -> str:
    """The text as a sentence; str.capitalize would change words in it."""
    return f"{text[:1].upper()}{text[1:]}"


def draw_self_attention(
    read: SentenceAttention, layer: int = -1, head: MapHead = "mean", name: str = "self-attention"
) -> CaptionedFigure | None:
    """What each word reads of its own sentence, in the encoder and in the decoder; None if there is none."""
    panels, arrays = list[WordMap](), dict[str, NDArray[Any]]()
    kinds: tuple[MapKind, ...] = ("encoder", "decoder")
    for kind in kinds:
        maps = read.find_maps(kind)
        if maps is None:
            continue
        own = clamp_layer(layer, len(maps))
        values = read.select_map(kind, own, head)
        assert values is not None
        rows, columns = (each.words for each in read.find_sides(kind))
        panels.append(WordMap(f"{kind}: {describe_map(read, own, head, kind)}", values, rows, columns))
        arrays[kind] = maps
    if not panels:
        return None
    return CaptionedFigure(
        name=name,
        title="Which words of its own sentence each word uses",
        caption=(
            "Self-attention from each word (rows) to its own sentence (columns). In the decoder, a row is the word "
            "that is written, and it reads only what was written before it."
        ),
        arrays=arrays,
        draw=lambda: draw_panels(panels),
    )


def draw_cross_attention_heads(
    read: SentenceAttention, occlusion: WordOcclusion, name: str = "heads"
) -> CaptionedFigure | None:
    """The cross-attention of every layer and head, with its agreement with the occlusion; None if there is none."""
    maps = read.merge_words("cross")
    layers, heads = read.layers_and_heads
    if maps is None or read.cross is None or layers * heads == 1:  # a single head is in the figure of the attention
        return None
    found = [[compare_with_occlusion(each, occlusion, read) for each in layer] for layer in maps]
    titles = [
        [f"layer {layer}, head {head}: {each.hits} of {each.words}" for head, each in enumerate(row)]
        for layer, row in enumerate(found)
    ]
    hits = np.array([[each.hits for each in row] for row in found])
    best = np.unravel_index(hits.argmax(), hits.shape)
    return CaptionedFigure(
        name=name,
        title="Which source words each head uses",
        caption=(
            "Cross-attention from target words (rows) to source words (columns), in "
            f"{format_count(layers, 'layer')} of {format_count(heads, 'head')} each, with the number of target words "
            "for which attention names the most important word, by occlusion. "
            f"Layer {best[0]}, head {best[1]} does so most often: for {hits[best]} of "
            f"{format_count(len(read.target_words), 'target word')}."
        ),
        arrays={"cross": read.cross, "words": maps, "hits": hits},
        draw=lambda: draw_grid(maps, titles, read),
    )


def draw_panels(panels: Sequence[WordMap], note: str = "") -> "Figure":
    """Draw one or two maps, next to each other if there is room, else one above the other, and a note below them."""
    columns = max(len(each.columns) for each in panels)
    rows = max(len(each.rows) for each in panels)
    room = FIGURE_WIDTH / len(panels) - LABEL_ROOM - BAR_ROOM
    too_wide, too_narrow = room / columns < CELL_SIDE * 0.75, columns * CELL_SIDE < MIN_TITLE_WIDTH
    below = len(panels) > 1 and (too_wide or too_narrow)
    room = FIGURE_WIDTH - LABEL_ROOM - BAR_ROOM if below else room
    side = min(max(room / columns, MIN_CELL_SIDE), CELL_SIDE)
    across, down = (1, len(panels)) if below else (len(panels), 1)
    width = across * (columns * side + LABEL_ROOM + BAR_ROOM)
    height = down * (rows * side + LABEL_ROOM + 0.3) + 0.2 * bool(note)
    figure = new_figure(max(width, 4.6), height, layout="compressed")
    if note:
        figure.supxlabel(note, fontsize=NOTE_POINTS, x=0.01, ha="left")
    grid: list[Any] = np.asarray(figure.subplots(down, across, squeeze=False)).ravel().tolist()
    for axes, panel in zip(grid, panels, strict=True):
        drawn = plot_word_map(axes, panel, side)
        if rows * side < MIN_BAR_HEIGHT:  # the cells have numbers
            continue
        bar = figure.colorbar(drawn, ax=axes, shrink=min(1.0, 2.2 / (rows * side)), aspect=18, pad=0.02)
        bar.set_label(panel.unit, fontsize=NOTE_POINTS)
        bar.ax.tick_params(labelsize=7)
    return figure


def plot_word_map(axes: Any, panel: WordMap, side: float) -> Any:
    """Draw a map with its words, and its numbers if there is room for them."""
    highest = float(np.nanmax(panel.values, initial=0))
    limits = (0.0, highest if highest > 0 else 1.0)
    axes.set_facecolor(PALE)  # where there is no value
    drawn = axes.imshow(panel.values, cmap=panel.colors, vmin=limits[0], vmax=limits[1])
    points = min(9.0, 62 * side / 2.6)
    label_words(axes, panel.rows, panel.columns, points)
    axes.set_title(panel.title, fontsize=LABEL_POINTS, loc="left", pad=6)
    if side >= MIN_CELL_SIDE_WITH_NUMBERS:
        for (row, column), value in np.ndenumerate(panel.values):
            text = f"{value:.2f}".removeprefix("0") if limits[1] <= 1 else f"{value:.1f}"
            text = text.replace("-", "−") if abs(value) >= 0.05 else ""  # the rest is white
            dark = value > 0.6 * limits[1]
            axes.text(column, row, text, fontsize=6, ha="center", va="center", color="white" if dark else "black")
    for row, column in enumerate(panel.outlined):
        box = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)]) * 0.94
        axes.plot(column + box[:, 0], row + box[:, 1], color="black", linewidth=1)
    return drawn


def label_words(axes: Any, rows: Sequence[str], columns: Sequence[str], points: float) -> None:
    """Write the words at the left and at the top, where they are read first."""
    axes.tick_params(length=0, pad=2, top=False, labeltop=True, bottom=False, labelbottom=False)
    for axis, words in ((axes.yaxis, rows), (axes.xaxis, columns)):
        axis.set_ticks(range(len(words)), [sanitize_label(each, MAX_WORD_LENGTH) for each in words], fontsize=points)
        for label in axis.get_ticklabels():
            label.set_parse_math(False)
    for label in axes.get_xticklabels():
        label.set(rotation=50, ha="left", rotation_mode="anchor")
    axes.spines[:].set(color=PALE, linewidth=0.8)


def draw_grid(maps: NDArray[Any], titles: Sequence[Sequence[str]], read: SentenceAttention) -> "Figure":
    """Draw all heads, a row of panels for each layer; words at the first panels only."""
    layers, heads, rows, columns = maps.shape
    side = min(max((FIGURE_WIDTH - LABEL_ROOM) / heads / (columns + 1), SMALL_CELL_SIDE), 0.2)
    width = max(heads * (columns + 1) * side + LABEL_ROOM, 4.0)
    figure = new_figure(width, layers * (rows * side + 0.35) + LABEL_ROOM * 0.8)
    grid = np.asarray(figure.subplots(layers, heads, squeeze=False))
    points = min(8.0, 62 * side / 1.6)
    for place, axes in np.ndenumerate(grid):
        layer, head = place
        axes.imshow(maps[layer, head], cmap=SHARE_MAP, vmin=0, vmax=1)
        axes.set_title(titles[layer][head], fontsize=7, loc="left", pad=4)
        label_words(axes, read.target.words, read.source.words, points)
        axes.tick_params(labelleft=head == 0, labeltop=layer == 0)
    return figure
