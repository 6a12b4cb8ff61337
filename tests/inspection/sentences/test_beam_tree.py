"""The tree of a beam search is drawn without two tokens in one place."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from support.figure_checks import check_figure, check_texts
from support.toy_translators import make_translator

from vitrail.inspection.sentences.beam_tree import compute_step_probability, draw_beam_tree, place_nodes
from vitrail.inspection.sentences.sentence_attention import read_sentence
from vitrail.predict.search.beam_search import BeamNode, BeamTree


@pytest.mark.parametrize("beam", [1, 2, 5])
def test_every_node_has_its_own_place_and_the_best_text_is_the_first_row(beam: int) -> None:
    loaded = make_translator()
    tree = read_sentence(loaded, "Der Hund läuft.", beam=beam, length=8).tree
    rows = place_nodes(tree)
    places = [(node.length, rows[node.number]) for node in tree.nodes]
    assert len(set(places)) == len(places)
    assert {rows[node.number] for node in tree.best.list_path()} == {0}
    assert max(rows) < len(tree.nodes)
    check_figure(draw_beam_tree(tree, loaded.tokenizer))


def test_lines_do_not_cross_words() -> None:
    """Not even if the tokens of a column differ in length, and texts end at every step."""
    tree = make_bushy_tree()
    figure = draw_beam_tree(tree, WordTokens()).draw()  # pyright: ignore[reportArgumentType]
    check_texts(figure)
    (axes,) = figure.axes
    words = [text.get_window_extent() for text in axes.texts]
    for line in axes.lines:
        points = line.get_transform().transform(line.get_xydata())
        for start, end in pairwise(points):
            dense = start + np.linspace(0, 1, 200)[:, None] * (end - start)
            assert not any(box.contains(x, y) for box in words for x, y in dense)


class WordTokens:
    """Shows tokens as words of different length."""

    def show_token(self, token: int) -> str:
        return ("a", "to", "internationally", "house", ".")[token % 5]


def make_bushy_tree() -> BeamTree:
    """Five beginnings per step, with parents and ends drawn at random."""
    random, nodes = Random(3), list[BeamNode]()
    live: Sequence[BeamNode | None] = [None]
    for length in range(1, 7):
        added = list[BeamNode]()
        for parent in random.choices(live, k=5):
            start = 0.0 if parent is None else parent.log_probability
            node = BeamNode(len(nodes), length, random.randrange(50), parent, start - random.random())
            node.score = node.log_probability if length == 6 or (length > 2 and random.random() < 0.3) else None
            nodes.append(node)
            added.append(node)
        live = [node for node in added if node.score is None] or added[:1]
    return BeamTree(nodes)


def test_the_numbers_are_those_of_the_search() -> None:
    loaded = make_translator()
    read = read_sentence(loaded, "Der Hund läuft.", beam=3, length=8)
    path = read.tree.best.list_path()
    assert tuple(node.token for node in path) == read.target.ids
    product = 1.0
    for node in path:
        product *= compute_step_probability(node)
    assert product == pytest.approx(2.718281828**read.best.log_probability, rel=1e-3)
    arrays = draw_beam_tree(read.tree, loaded.tokenizer).arrays
    assert len({len(each) for each in arrays.values()}) == 1
    assert arrays["scores"][read.tree.best.number] == pytest.approx(read.best.score)
