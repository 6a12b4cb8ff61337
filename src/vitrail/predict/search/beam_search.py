"""Beam search: the best texts that are found if only the most probable beginnings of each row are continued.

As in transformers and CTranslate2, the 2·beam best continuations of a row are looked at, so that those that end cannot
starve the others; those that end among the first `beam` are hypotheses. B rows, W beams of each, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.hypothesis import (
    Hypothesis,
    Penalty,
    check_numbers,
    check_penalty,
    close_gaps,
    compute_log_probabilities,
    compute_penalty,
    list_forbidden,
    read_limits,
    select_largest,
)

Stop = Literal["exact", "transformers", "first"]


@dataclass(slots=True, eq=False)
class BeamNode:
    """A beginning of a text: its last token, and the beginning before it."""

    number: int  # its place in the tree
    length: int  # tokens up to this one
    token: int
    parent: "BeamNode | None"  # None for the first token
    log_probability: float  # of all tokens up to this one
    score: float | None = None  # of the hypothesis that ends here; None: it was continued, or given up

    def list_path(self) -> list["BeamNode"]:
        """The nodes from the first token to this one."""
        path = list[BeamNode]()
        node: BeamNode | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


@dataclass
class BeamTree:
    """All beginnings that the search of one row has kept, in the order of their steps."""

    nodes: list[BeamNode] = field(default_factory=list[BeamNode])

    @property
    def best(self) -> BeamNode:
        """The node at which the best hypothesis ends."""
        return max(self.nodes, key=lambda node: -math.inf if node.score is None else node.score)


@dataclass
class BeamRecord:
    """The tree of every row, in order. The searches of several batches can share one record."""

    trees: list[BeamTree] = field(default_factory=list[BeamTree])


@dataclass(frozen=True)
class SearchRules:
    """The settings of a search."""

    end: int
    beam: int
    penalty: Penalty
    alpha: float
    n_best: int
    stop: Stop

    def __post_init__(self) -> None:
        check_penalty(self.penalty, self.alpha)
        check_count("beam", self.beam)
        check_count("n_best", self.n_best)
        if self.n_best > self.beam:
            raise ConfigError(f"`n_best` is {self.n_best}; expected at most `beam`, {self.beam}: use a larger `beam`")
        if self.stop not in get_args(Stop):
            raise unknown_name_error("`stop`", self.stop, get_args(Stop))

    def normalize(self, log_probability: float, length: int) -> float:
        return log_probability / compute_penalty(self.penalty, length, self.alpha)

    def is_over(self, scores: Sequence[float], live: float, length: int, limit: int) -> bool:
        """Whether a row with these hypotheses, best first, ends, if its best beam is `live` with `length` tokens.

        A beam cannot gain probability, but its penalty grows with its length, up to the `limit`: what it has now,
        normalized at the limit, is a bound of all that it can become.
        """
        if self.stop == "exact" and self.beam > 1:
            return len(scores) >= self.n_best and self.normalize(live, limit) <= scores[self.n_best - 1]
        if len(scores) < self.beam:
            return False
        return self.stop == "first" or self.beam == 1 or self.normalize(live, length) <= scores[self.beam - 1]


class RowSearch:
    """The search of one row: its live beams, and its hypotheses so far, best first."""

    def __init__(self, rules: SearchRules, limit: int) -> None:
        self.rules, self.limit = rules, limit
        self.beams: list[BeamNode | None] = [None]  # at first the empty text
        self.hypotheses: list[Hypothesis] = []
        self.tree = BeamTree()

    def advance(self, scores: Iterable[float], continuations: Iterable[int], vocabulary: int) -> list[int]:
        """Take the best continuations, beam·V + token; return the beam of each that stays live, none at the end."""
        first = self.beams[0]
        length = 1 if first is None else first.length + 1
        kept = list[tuple[int, BeamNode]]()
        for rank, (score, continuation) in enumerate(zip(scores, continuations, strict=True)):
            if score == -math.inf:
                break
            parent, token = divmod(continuation, vocabulary)
            ends = token == self.rules.end or length == self.limit
            if ends and rank < self.rules.beam:
                node = self.add_node(token, self.beams[parent], score, length, self.rules.normalize(score, length))
                self.hypotheses.append(self.make_hypothesis(node))
            elif not ends and len(kept) < self.rules.beam:
                kept.append((parent, self.add_node(token, self.beams[parent], score, length)))
        self.hypotheses.sort(key=lambda each: each.score, reverse=True)  # equal ones stay in their order
        if not kept or self.rules.is_over(
            [each.score for each in self.hypotheses], kept[0][1].log_probability, length, self.limit
        ):
            return []
        kept = keep_places(kept)
        self.beams = [node for _, node in kept]
        return [parent for parent, _ in kept]

    def add_node(
        self, token: int, parent: BeamNode | None, log_probability: float, length: int, score: float | None = None
    ) -> BeamNode:
        node = BeamNode(len(self.tree.nodes), length, token, parent, log_probability, score)
        self.tree.nodes.append(node)
        return node

    def make_hypothesis(self, node: BeamNode) -> Hypothesis:
        path = node.list_path()
        tokens, totals = [each.token for each in path], [0.0, *(each.log_probability for each in path)]
        finished = tokens[-1] == self.rules.end
        return check_numbers(
            Hypothesis(
                tokens=tuple(tokens[: len(tokens) - finished]),
                score=self.rules.normalize(node.log_probability, node.length),
                log_probability=node.log_probability,
                finished=finished,
                token_log_probabilities=tuple(after - before for before, after in pairwise(totals)),
            )
        )


def keep_places(kept: list[tuple[int, BeamNode]]) -> list[tuple[int, BeamNode]]:
    """Put the best continuation of each beam into its place, and the others into the gaps: a state copies few rows."""
    placed: dict[int, tuple[int, BeamNode]] = {}
    others = list[tuple[int, BeamNode]]()
    for each in kept:
        if each[0] < len(kept) and each[0] not in placed:
            placed[each[0]] = each
        else:
            others.append(each)
    moved = iter(others)
    return [placed[place] if place in placed else next(moved) for place in range(len(kept))]


@torch.inference_mode()
def beam_search(
    model: TextModel,
    memory: Memory,
    *,
    start: int,
    end: int,
    length: int | Tensor,
    beam: int = 4,
    penalty: Penalty = "gnmt",
    alpha: float = 0.6,
    n_best: int = 1,
    stop: Stop = "exact",
    record: BeamRecord | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` texts of each row, best first, of at most `length` tokens, the end counted.

    A beam of 1 is greedy search. The search of a row ends, and the row leaves the batch, by the rule `stop`:
    "exact": no beam can become better than the n-best hypotheses;
    "transformers": there are `beam` hypotheses, and no beam is better now; the default of transformers;
    "first": there are `beam` hypotheses; CTranslate2's rule if α is not 0.
    """
    rules = SearchRules(end, beam, penalty, alpha, n_best, stop)
    searches = [RowSearch(rules, limit) for limit in read_limits(length, len(memory.tokens))]
    if record is not None:
        record.trees.extend(search.tree for search in searches)
    if searches:
        run_searches(searches, model, memory, start, rules)
    return [search.hypotheses[:n_best] for search in searches]


def run_searches(
    searches: Sequence[RowSearch], model: TextModel, memory: Memory, start: int, rules: SearchRules
) -> None:
    """Advance all rows together, one token per step, until each is over."""
    device = memory.tokens.device
    forbidden = list_forbidden(model, start, rules.end, device)
    live = list(searches)
    tokens, totals = torch.full((len(live),), start, device=device), torch.zeros(len(live), 1, device=device)
    length = max(search.limit for search in searches)
    state: Any = model.start(memory, length)
    for _ in range(length):
        logits, state = model.step(tokens, state)
        log_probabilities = compute_log_probabilities(logits, forbidden)  # (B·W, V)
        width, vocabulary = len(tokens) // len(live), log_probabilities.shape[1]
        scores, continuations = select_largest(log_probabilities.add_(totals).view(len(live), -1), 2 * rules.beam)
        best = zip(live, scores.tolist(), continuations.tolist(), strict=True)
        parents = [search.advance(values, numbers, vocabulary) for search, values, numbers in best]
        places = close_gaps([place for place, continued in enumerate(parents) if continued])
        if not places:
            return
        order = list_state_rows(places, parents, width)
        live = [live[place] for place in places]
        if order != list(range(len(tokens))):  # the state is in order already if each beam continues itself
            state = state.reorder(torch.tensor(order, device=device))
        tokens, totals = gather_beams(live, len(order) // len(live), device)


def list_state_rows(places: Sequence[int], parents: Sequence[Sequence[int]], width: int) -> list[int]:
    """The row of the state that each new beam continues; of a row with fewer than others, the first is repeated."""
    wanted = max(len(parents[place]) for place in places)
    padded = ((place, [*parents[place], *[0] * (wanted - len(parents[place]))]) for place in places)
    return [place * width + parent for place, each in padded for parent in each]


def gather_beams(live: Sequence[RowSearch], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The last tokens (B·W,) and log-probabilities (B·W, 1) of all beams; −∞ where a row has fewer than others."""
    tokens, totals = list[int](), list[float]()
    for search in live:
        missing = width - len(search.beams)
        beams = [each for each in search.beams if each is not None]
        tokens += [*(each.token for each in beams), *[0] * missing]
        totals += [*(each.log_probability for each in beams), *[-math.inf] * missing]
    return torch.tensor(tokens, device=device), torch.tensor(totals, device=device)[:, None]
