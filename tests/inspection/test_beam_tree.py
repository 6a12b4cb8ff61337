"""The tree of a beam search is drawn without two tokens in one place."""

import pytest
from support.figure_checks import check_figure
from support.toy_translators import make_translator

from vitrail.inspection.beam_tree import compute_step_probability, draw_beam_tree, place_nodes
from vitrail.inspection.sentence_attention import read_sentence


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
