"""The tree of a beam search: every beginning of a text that the search has kept, with its probability and score."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.base.figures import CaptionedFigure, measure_text, new_figure, sanitize_label
from vitrail.base.style import BLUE, GRAY, LABEL_POINTS, NOTE_POINTS, SOFT
from vitrail.base.text import format_count
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.predict.search.beam_search import BeamNode, BeamTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_HEIGHT, COLUMN_GAP, MIN_COLUMN_WIDTH, MIN_WIDTH = 0.36, 0.36, 0.3, 4.0  # inches
MAX_LABEL_LENGTH = 20  # characters
PROBABILITY_POINTS = 6


def place_nodes(tree: BeamTree) -> list[int]:
    """The row of each node in a drawing where its column is its place in the text; the best text is in row 0.

    The best continuation of a node is in its row; the others branch off into the next rows that are free.
    """
    children = group_nodes_by_parent(tree)
    values = rate_nodes(tree)
    rows, taken = [0] * len(tree.nodes), set[tuple[int, int]]()

    def place_chain(first: BeamNode, lowest: int) -> None:
        chain = [first]
        while children[chain[-1].number]:
            chain.append(max(children[chain[-1].number], key=lambda node: values[node.number]))
        columns = range(first.length - 1, chain[-1].length + 1)  # and what is around it
        row = lowest
        while any((row, column) in taken for column in columns):
            row += 1
        taken.update((row, column) for column in columns)
        for node in chain:
            rows[node.number] = row
        for node in reversed(chain):  # late branches near the chain, early ones outside: few lines cross
            others = [each for each in children[node.number] if each not in chain]
            for each in sorted(others, key=lambda node: values[node.number], reverse=True):
                place_chain(each, row + 1)

    roots = [node for node in tree.nodes if node.parent is None]
    for root in sorted(roots, key=lambda node: values[node.number], reverse=True):
        place_chain(root, 0)
    return rows


def group_nodes_by_parent(tree: BeamTree) -> list[list[BeamNode]]:
    children: list[list[BeamNode]] = [[] for _ in tree.nodes]
    for node in tree.nodes:
        if node.parent is not None:
            children[node.parent.number].append(node)
    return children


def rate_nodes(tree: BeamTree) -> list[tuple[float, int, float]]:
    """The score of the best text that continues each node, then its length and log-probability."""
    values = [
        (-math.inf if node.score is None else node.score, node.length, node.log_probability) for node in tree.nodes
    ]
    for node in reversed(tree.nodes):  # a node is added after its parent
        if node.parent is not None:
            number = node.parent.number
            values[number] = max(values[number], values[node.number])
    return values


def compute_step_probability(node: BeamNode) -> float:
    """The probability of the last token of a node, given those before it."""
    before = 0.0 if node.parent is None else node.parent.log_probability
    return math.exp(min(node.log_probability - before, 0.0))


def draw_beam_tree(tree: BeamTree, tokenizer: TextTokenizer, name: str = "beam") -> CaptionedFigure:
    """The figure of a search. Columns are steps; the best text is highlighted, and texts that ended have a score."""
    rows = place_nodes(tree)
    labels = [sanitize_label(tokenizer.show_token(node.token), MAX_LABEL_LENGTH) for node in tree.nodes]
    ended = sum(node.score is not None for node in tree.nodes)
    best = tree.best
    return CaptionedFigure(
        name=name,
        title="The texts that the search has tried",
        caption=(
            f"The {format_count(len(tree.nodes), 'beginning')} that the beam search has kept, one step per column; the "
            "number below a token is its probability after those before it. "
            f"{format_count(ended, 'text')} ended, with the score in bold: the log-probability divided by the length "
            f"penalty. The best, in blue, has {best.score:.3f}; the others were given up."
        ),
        arrays={
            "tokens": np.array([node.token for node in tree.nodes]),
            "parents": np.array([-1 if node.parent is None else node.parent.number for node in tree.nodes]),
            "log_probabilities": np.array([node.log_probability for node in tree.nodes]),
            "scores": np.array([math.nan if node.score is None else node.score for node in tree.nodes]),
        },
        draw=lambda: draw_placed_tree(tree, rows, labels),
    )


def draw_placed_tree(tree: BeamTree, rows: Sequence[int], labels: Sequence[str]) -> "Figure":
    """Draw nodes in their rows; a column is as wide as its widest token, with its score.

    Lines change their row only in the gaps between the columns, where there are no words.
    """
    nodes, depth = tree.nodes, max(node.length for node in tree.nodes)
    scores = ["" if node.score is None else f"{node.score:.2f}".replace("-", "−") for node in nodes]
    widths = [measure_text(label, LABEL_POINTS) for label in labels]
    ends = [
        width + (0.1 + 1.15 * measure_text(score, NOTE_POINTS) if score else 0.0)  # it is bold
        for width, score in zip(widths, scores, strict=True)
    ]
    columns = [max(ends[node.number] for node in nodes if node.length == step) for step in range(1, depth + 1)]
    lefts = np.cumsum([0.0, *(max(width, MIN_COLUMN_WIDTH) + COLUMN_GAP for width in columns)])
    right, bottom = max(MIN_WIDTH, lefts[-1] - COLUMN_GAP), max(rows) * ROW_HEIGHT
    figure = new_figure(right + 0.3, bottom + ROW_HEIGHT + 0.2)
    axes: Any = figure.subplots()
    axes.set(xlim=(-0.05, right + 0.05), ylim=(bottom + 0.25, -0.15))
    axes.set_axis_off()
    on_best_path = {node.number for node in tree.best.list_path()}
    for node in nodes:
        is_best, x, y = node.number in on_best_path, lefts[node.length - 1], rows[node.number] * ROW_HEIGHT
        if node.parent is not None:
            start = lefts[node.parent.length - 1] + ends[node.parent.number] + 0.04
            above = rows[node.parent.number] * ROW_HEIGHT
            line: dict[str, Any] = {"color": BLUE, "linewidth": 1.6} if is_best else {"color": GRAY, "linewidth": 0.8}
            axes.plot((start, x - COLUMN_GAP + 0.05, x - 0.09, x - 0.03), (above, above, y, y), **line)
        style: dict[str, Any] = {
            "color": BLUE if is_best else "black" if node.score is not None else SOFT,
            "va": "center",
        }
        axes.text(x, y, labels[node.number], fontsize=LABEL_POINTS, parse_math=False, **style)
        probability = f"{compute_step_probability(node):.0%}"
        axes.text(x, y + 0.13, probability, fontsize=PROBABILITY_POINTS, color=SOFT, va="center")
        if node.score is not None:
            after = x + widths[node.number] + 0.1
            axes.text(after, y, scores[node.number], fontsize=NOTE_POINTS, weight="bold", **style)
    return figure
