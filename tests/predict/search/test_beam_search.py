"""Decoding, checked by brute force on a model whose logits are a random function of the whole text so far."""

import math
from typing import Any

import pytest
import torch
from support.table_text_model import (
    END,
    PAD,
    START,
    TableTextModel,
    extend,
    list_texts,
    make_memory,
    read_text,
    score_text,
)
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.models.base.text_contract import Memory
from vitrail.predict.search.beam_search import BeamRecord, Stop, beam_search
from vitrail.predict.search.greedy_and_sampling import greedy, sample
from vitrail.predict.search.hypothesis import Penalty, close_gaps, compute_penalty, select_largest

IDS: Any = {"start": START, "end": END}
ROWS = [5, 2, 9, 4]
PENALTIES: list[tuple[Penalty, float]] = [
    *(("length", alpha) for alpha in (0.0, 0.6, 1.0, 2.0)),
    *(("gnmt", alpha) for alpha in (0.6, 1.0, 3.0)),
]


def rank_all_texts(
    model: TableTextModel, row: int, limit: int, penalty: Penalty, alpha: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Every text with its score, the best first."""
    scored = [
        (score_text(model, row, text) / compute_penalty(penalty, len(text), alpha), text) for text in list_texts(limit)
    ]
    return sorted(scored, reverse=True)


def test_penalties_are_the_published_ones() -> None:
    assert compute_penalty("length", 10, 0.6) == pytest.approx(10**0.6)
    assert [compute_penalty("gnmt", n, 0.6) for n in (1, 10, 20)] == pytest.approx([1.0, 1.7329, 2.3544], abs=1e-4)
    assert compute_penalty("length", 7, 0.0) == compute_penalty("gnmt", 7, 0.0) == 1.0


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_texts_in_order(seed: int, penalty: Penalty, alpha: float) -> None:
    model = TableTextModel(seed=seed)
    found = beam_search(
        model, make_memory(model, ROWS), **IDS, length=4, beam=5**3, penalty=penalty, alpha=alpha, n_best=20
    )
    for row, hypotheses in zip(ROWS, found, strict=True):
        expected = rank_all_texts(model, row, 4, penalty, alpha)
        assert len(expected) == 1 + 4 + 16 + 64 + 4**4  # those of 1, …, 4 tokens that end, and those that are cut
        assert [read_text(each) for each in hypotheses] == [text for _, text in expected[:20]]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected[:20]], abs=1e-5)


def search_without_stopping(
    model: TableTextModel, row: int, limit: int, beam: int, penalty: Penalty, alpha: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search in a few lines, which continues to the maximum length: hypotheses, the best first."""
    live, found = [(0.0, ())], list[tuple[float, tuple[int, ...]]]()
    for length in range(1, limit + 1):
        made = [(total + part, (*text, token)) for total, text in live for token, part in extend(model, row, text)]
        made = sorted(made, reverse=True)[: 2 * beam]
        ended = [each for each in made[:beam] if each[1][-1] == END or length == limit]
        found += [(total / compute_penalty(penalty, length, alpha), text) for total, text in ended]
        live = [each for each in made if each[1][-1] != END][:beam]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("beam", [2, 3, 6])
@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_the_exact_stop_changes_nothing(penalty: Penalty, alpha: float, beam: int) -> None:
    """A search that runs to the maximum length finds nothing better, but takes more steps; at α = 2 it has to."""
    model, rows = TableTextModel(seed=3, spread=2.0), list(range(12))
    options: Any = {**IDS, "length": 9, "beam": beam, "penalty": penalty, "alpha": alpha}
    for n_best in (1, 2):
        found = beam_search(model, make_memory(model, rows), **options, n_best=n_best)
        for row, hypotheses in zip(rows, found, strict=True):
            expected = search_without_stopping(model, row, 9, beam, penalty, alpha)[:n_best]
            assert [read_text(each) for each in hypotheses] == [text for _, text in expected]
    assert sum(model.stepped) < 12 * (1 + 8 * beam) or alpha == 2.0


@pytest.mark.parametrize("stop", ["exact", "transformers", "first"])
def test_the_score_is_that_of_the_text(stop: Stop) -> None:
    model = TableTextModel(seed=1)
    for penalty, alpha in PENALTIES:
        options: Any = {**IDS, "length": 6, "penalty": penalty, "alpha": alpha}
        memory = make_memory(model, ROWS)
        found = beam_search(model, memory, **options, beam=4, n_best=4, stop=stop)
        drawn = sample(model, memory, **options, count=2, temperature=1.5)
        alone = [[each] for each in greedy(model, memory, **options)]
        for row, hypotheses in [
            *zip(ROWS, found, strict=True),
            *zip(ROWS, drawn, strict=True),
            *zip(ROWS, alone, strict=True),
        ]:
            for each in hypotheses:
                text = read_text(each)
                assert each.log_probability == pytest.approx(score_text(model, row, text), abs=1e-5)
                assert each.score == pytest.approx(each.log_probability / compute_penalty(penalty, len(text), alpha))
                assert len(each.token_log_probabilities) == len(text)
                assert sum(each.token_log_probabilities) == pytest.approx(each.log_probability, abs=1e-5)
                assert each.finished or len(text) == 6


@pytest.mark.parametrize("stop", ["exact", "transformers", "first"])
@pytest.mark.parametrize("decimals", [None, 0], ids=["", "ties"])
def test_a_beam_of_1_is_greedy_search(stop: Stop, decimals: int | None) -> None:
    model, rows = TableTextModel(seed=2, decimals=decimals), list(range(30))
    memory = make_memory(model, rows)
    options: Any = {**IDS, "length": 8, "alpha": 1.0, "penalty": "length"}
    found = beam_search(model, memory, **options, beam=1, stop=stop)
    for (searched,), expected in zip(found, greedy(model, memory, **options), strict=True):
        assert searched.tokens == expected.tokens
        assert searched.score == pytest.approx(expected.score, abs=1e-6)


def test_greedy_search_takes_the_most_probable_token() -> None:
    model = TableTextModel(seed=4)
    for row, hypothesis in zip(ROWS, greedy(model, make_memory(model, ROWS), **IDS, length=6), strict=True):
        text = list[int]()
        while len(text) < 6 and END not in text:
            text.append(max(extend(model, row, tuple(text)), key=lambda each: each[1])[0])
        assert read_text(hypothesis) == tuple(text)


def decode_all_ways(model: TableTextModel, memory: Memory, rows: list[int], length: int | Tensor = 7) -> list[object]:
    """What each row gets from every method."""
    options: Any = {**IDS, "length": length}
    best = greedy(model, memory, **options)
    drawn = sample(model, memory, **options, seed=3, count=2, numbers=rows, top_p=0.9)
    beams = [beam_search(model, memory, **options, beam=3, n_best=2, stop=stop) for stop in ("exact", "transformers")]
    return list(zip(best, drawn, *beams, strict=True))


@pytest.mark.parametrize("decimals", [None, 0], ids=["", "ties"])
def test_a_row_gets_the_same_text_in_any_batch(decimals: int | None) -> None:
    model, rows = TableTextModel(seed=5, decimals=decimals), list(range(10))
    together = decode_all_ways(model, make_memory(model, rows), rows)
    alone = [decode_all_ways(model, make_memory(model, [row]), [row])[0] for row in rows]
    assert together == alone
    backwards = decode_all_ways(model, make_memory(model, rows[::-1]), rows[::-1])
    assert backwards[::-1] == together


def test_each_row_has_its_own_maximum_length() -> None:
    model, limits = TableTextModel(seed=5, spread=0.5), [3, 1, 6, 2]
    together = decode_all_ways(model, make_memory(model, ROWS), ROWS, torch.tensor(limits))
    for row, limit, found in zip(ROWS, limits, together, strict=True):
        assert found == decode_all_ways(model, make_memory(model, [row]), [row], limit)[0]
    for (hypothesis,), limit in zip(
        beam_search(model, make_memory(model, ROWS), **IDS, length=torch.tensor(limits)), limits, strict=True
    ):
        assert len(read_text(hypothesis)) <= limit


def test_finished_rows_leave_the_batch() -> None:
    model, rows = TableTextModel(seed=6), list(range(20))
    texts = [read_text(each) for each in greedy(model, make_memory(model, rows), **IDS, length=12)]
    assert model.stepped == [sum(len(text) > step for text in texts) for step in range(max(map(len, texts)))]
    assert model.stepped[0] == 20
    assert len(set(model.stepped)) > 3

    drawn = sample(model, make_memory(model, rows), **IDS, length=12, count=3)
    lengths = [len(read_text(each)) for texts in drawn for each in texts]
    assert model.stepped == [20, *(sum(length > step for length in lengths) for step in range(1, max(lengths)))]


def test_rows_whose_search_is_over_leave_the_batch() -> None:
    model, rows = TableTextModel(seed=6), list(range(20))
    memory, alone = make_memory(model, rows), list[int]()
    for row in rows:
        beam_search(model, make_memory(model, [row]), **IDS, length=12, beam=3)
        assert model.stepped == [1, *[3] * (len(model.stepped) - 1)]  # the memory is read once, by one beam
        alone.append(len(model.stepped))
    beam_search(model, memory, **IDS, length=12, beam=3)
    assert model.stepped == [20, *(3 * sum(steps > step for steps in alone) for step in range(1, max(alone)))]
    assert len(set(model.stepped)) > 3


def test_a_state_that_is_in_order_is_not_reordered_and_few_rows_move() -> None:
    model = TableTextModel(seed=7)
    greedy(model, make_memory(model, [1]), **IDS, length=12)
    assert model.last_state is not None
    assert not model.last_state.reorders
    beam_search(model, make_memory(model, list(range(8))), **IDS, length=12, beam=4)
    moved = [sum(i != row for i, row in enumerate(order)) for order in model.last_state.reorders[1:]]
    kept = [len(order) for order in model.last_state.reorders[1:]]
    assert sum(moved) < 0.6 * sum(kept)


def test_padding_and_start_are_never_written() -> None:
    model = TableTextModel(seed=8, vocabulary=5)
    memory = make_memory(model, list(range(10)))
    original = model.make_logits
    model.make_logits = lambda row, prefix: original(row, prefix) + torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0])  # type: ignore[method-assign]
    options: Any = {**IDS, "length": 5}
    texts = [each.tokens for each in greedy(model, memory, **options)]
    texts += [each.tokens for drawn in sample(model, memory, **options, count=3) for each in drawn]
    texts += [each.tokens for found in beam_search(model, memory, **options, n_best=4) for each in found]
    assert not {PAD, START, END} & {token for text in texts for token in text}


def test_a_vocabulary_may_start_with_its_end_token() -> None:
    model = TableTextModel(seed=8)
    assert any(
        each.finished for each in greedy(model, make_memory(model, list(range(30))), start=END, end=END, length=8)
    )


def test_a_search_without_rows_finds_nothing() -> None:
    model = TableTextModel()
    memory = Memory(tokens=torch.zeros(0, 1, 1))
    assert greedy(model, memory, **IDS, length=3) == []
    assert beam_search(model, memory, **IDS, length=3) == []
    assert sample(model, memory, **IDS, length=3) == []


def test_of_equal_values_the_first_is_selected() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0], [0.0, -math.inf, 5.0, 4.0, -math.inf, 1.0]])
    found, places = select_largest(values, 4)
    assert found.tolist() == [[3, 3, 3, 2], [5, 4, 1, 0]]
    assert places.tolist() == [[1, 2, 4, 3], [2, 3, 5, 0]]
    assert select_largest(values[1:], 9)[1][0, :4].tolist() == [2, 3, 5, 0]


def test_gaps_are_closed_with_the_last_rows() -> None:
    assert close_gaps([0, 2, 3, 5]) == [0, 5, 2, 3]
    assert close_gaps([0, 1, 2]) == [0, 1, 2]
    assert close_gaps([4]) == [4]
    assert close_gaps([]) == []


def test_equal_scores_are_ranked_by_beam_and_token() -> None:
    """All words are equally probable, so that the first ones are found, and the shorter of equal texts comes first."""
    model = TableTextModel(vocabulary=6, spread=0.0)
    found = beam_search(model, make_memory(model, [0]), **IDS, length=3, beam=3, n_best=3, alpha=0.0)
    assert [read_text(each) for each in found[0]] == [(END,), (3, END), (3, 3, END)]


def test_the_record_is_the_tree_of_the_search() -> None:
    model, record = TableTextModel(seed=9), BeamRecord()
    options: Any = {**IDS, "length": 7, "beam": 3, "record": record}
    found = beam_search(model, make_memory(model, ROWS[:2]), **options, n_best=3)
    found += beam_search(model, make_memory(model, ROWS[2:]), **options, n_best=3)
    assert len(record.trees) == len(ROWS)
    for row, tree, hypotheses in zip(ROWS, record.trees, found, strict=True):
        assert [node.number for node in tree.nodes] == list(range(len(tree.nodes)))
        for node in tree.nodes:
            path = node.list_path()
            assert path[0].parent is None
            assert len(path) == node.length
            text = tuple(each.token for each in path)
            assert node.log_probability == pytest.approx(score_text(model, row, text), abs=1e-5)
        ended = sorted((node for node in tree.nodes if node.score is not None), key=lambda node: -(node.score or 0))
        assert [node.score for node in ended[:3]] == [each.score for each in hypotheses]
        assert tree.best is ended[0]
        assert tuple(each.token for each in tree.best.list_path()) == read_text(hypotheses[0])
        live = [sum(node.length == length and node.score is None for node in tree.nodes) for length in range(1, 8)]
        assert max(live) == 3


def test_stopping_at_the_first_hypotheses_is_not_exact() -> None:
    """With a large α long texts win, and the other rules stop before they are found."""
    model, memory = TableTextModel(seed=10), make_memory(TableTextModel(), list(range(20)))
    options: Any = {**IDS, "length": 10, "beam": 2, "penalty": "length", "alpha": 2.0}
    steps, scores = list[int](), list[list[float]]()
    for stop in ("exact", "transformers", "first"):
        scores.append([found[0].score for found in beam_search(model, memory, **options, stop=stop)])
        steps.append(sum(model.stepped))
    assert steps[0] > steps[1] >= steps[2]
    assert all(exact >= other for exact, *others in zip(*scores, strict=True) for other in others)
    assert sum(scores[0]) > sum(scores[2])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (beam_search, {"beam": 0}, "`beam` is 0; expected 1 or more"),
        (beam_search, {"n_best": 0}, "`n_best` is 0; expected 1 or more"),
        (beam_search, {"beam": 2, "n_best": 3}, "`n_best` is 3; expected at most `beam`, 2: use a larger `beam`"),
        (beam_search, {"alpha": -0.5}, "`alpha` is -0.5; expected a number of at least 0"),
        (beam_search, {"alpha": math.nan}, "`alpha` is nan; expected a number of at least 0"),
        (beam_search, {"alpha": 1e308}, r"`alpha` is 1e\+308; expected a number of at least 0 and at most 10"),
        (beam_search, {"penalty": "lenght"}, "unknown `penalty` 'lenght'; did you mean 'length'?"),
        (beam_search, {"stop": "never"}, "unknown `stop` 'never'; expected one of exact, transformers, first"),
        (beam_search, {"length": 0}, "`length` is 0; expected 1 or more"),
        (greedy, {"length": torch.tensor([3, 0])}, "`length` is 0; expected 1 or more"),
        (
            greedy,
            {"length": torch.tensor([3, 2, 1])},
            r"`length` has shape \(3,\); expected a number, or one for each of 2",
        ),
        (greedy, {"length": torch.tensor([3.0, 2.0])}, "`length` is 3.0; expected 1 or more"),
        (greedy, {"penalty": "none"}, "unknown `penalty` 'none'; expected one of length, gnmt"),
        (sample, {"temperature": 0.0}, "`temperature` is 0.0; expected more than 0; use greedy search"),
        (sample, {"temperature": math.inf}, "`temperature` is inf; expected more than 0"),
        (sample, {"top_k": 0}, "`top_k` is 0; expected 1 or more"),
        (sample, {"top_p": 0.0}, "`top_p` is 0.0; expected more than 0 and at most 1"),
        (sample, {"top_p": 1.1}, "`top_p` is 1.1; expected more than 0 and at most 1"),
        (sample, {"count": 0}, "`count` is 0; expected 1 or more"),
        (sample, {"numbers": [1]}, "`numbers` has 1 entries; expected one for each of 2 rows"),
    ],
)
def test_bad_values_are_reported_in_one_line(method: Any, options: dict[str, Any], message: str) -> None:
    model = TableTextModel()
    with pytest.raises(ConfigError, match=message) as caught:
        method(model, make_memory(model, [0, 1]), **{**IDS, "length": 3, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", [greedy, beam_search, sample])
def test_logits_that_are_not_numbers_are_reported(method: Any) -> None:
    model = TableTextModel(spread=math.nan)
    with pytest.raises(ConfigError, match="the logits of the model are not numbers"):
        method(model, make_memory(model, [0]), **IDS, length=3)
