"""The settings of a search for text, and the search that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.data.text.batches import TokenRows
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.predict.search.beam_search import beam_search
from vitrail.predict.search.greedy_and_sampling import check_sampling, greedy, sample
from vitrail.predict.search.hypothesis import Hypothesis, Penalty, check_beam, check_penalty

EXTRA_TOKENS = 50  # a translation has at most so many tokens more than its source, as in the paper of the Transformer


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How a translation or caption is searched for: by beam search, greedily if `beam` is 1, or drawn at random.

    >>> vitrail.SearchSettings(beam=8, n_best=2).draws
    False
    """

    beam: int = 4  # hypotheses kept at each step
    n_best: int = 1  # results per input; the next best are the `alternatives` of the best one
    penalty: Penalty = "gnmt"  # divides the log-probability: ((5 + length)/6)^alpha, or "length": length^alpha
    alpha: float = 0.6
    length: int | None = None  # tokens, at most; None: EXTRA_TOKENS more than the sentence has, 60 for captions
    temperature: float | None = None  # with it, `top_k` or `top_p`, tokens are drawn at random
    top_k: int | None = None  # draw from so many of the most probable tokens; None: all
    top_p: float = 1.0  # draw from the most probable tokens that together have this probability
    seed: int = 0  # of the draws

    def __post_init__(self) -> None:
        check_penalty(self.penalty, self.alpha)
        check_beam("beam", self.beam)
        check_beam("n_best", self.n_best)
        if self.length is not None:
            check_count("length", self.length)
        if self.draws:
            check_sampling(1.0 if self.temperature is None else self.temperature, self.top_k, self.top_p)
        elif self.n_best > self.beam:
            raise ConfigError(f"`n_best` is {self.n_best}; expected at most `beam`, {self.beam}: use a larger `beam`")

    @property
    def draws(self) -> bool:
        """Whether translations are drawn at random."""
        return self.temperature is not None or self.top_k is not None or self.top_p < 1

    def describe_beam(self) -> str:
        return "greedy" if self.beam == 1 else f"beam {self.beam}"

    def run(
        self, model: TextModel, tokenizer: TextTokenizer, sources: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """The hypotheses for each source, best first. `numbers` are those of the sentences, for the draws."""
        rows, device = TokenRows.join(sources), next(model.parameters()).device
        padded = rows.pad(torch.arange(len(rows)).numpy(), pad=tokenizer.pad, last=tokenizer.end).to(device)
        limits = torch.tensor([self.limit_length(len(each) + 1, model.length_limit) for each in sources])
        with torch.inference_mode():
            memory = model.encode(padded)
        return self.write(model, tokenizer, memory, limits, numbers)

    def write(
        self, model: TextModel, tokenizer: TextTokenizer, memory: Memory, limits: Tensor, numbers: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """The hypotheses for each row of a memory, best first, of at most `limits` tokens."""
        given: dict[str, Any] = {"start": tokenizer.start, "end": tokenizer.end, "length": limits}
        given |= {"penalty": self.penalty, "alpha": self.alpha}
        if self.draws:
            given |= {"temperature": 1.0 if self.temperature is None else self.temperature, "seed": self.seed}
            given |= {"top_k": self.top_k, "top_p": self.top_p, "count": self.n_best, "numbers": numbers}
            return [sorted(each, key=lambda one: -one.score) for each in sample(model, memory, **given)]
        if self.beam == 1:
            return [[each] for each in greedy(model, memory, **given)]
        return beam_search(model, memory, beam=self.beam, n_best=self.n_best, **given)

    def limit_length(self, source: int, limit: int | None) -> int:
        length = source + EXTRA_TOKENS if self.length is None else self.length
        return length if limit is None else min(length, limit)


GREEDY = SearchSettings(beam=1)


def change_search(search: SearchSettings | None, changes: Mapping[str, Any]) -> SearchSettings:
    """The given settings, by default those of `SearchSettings()`, with changes given as keywords."""
    unknown = [name for name in changes if name not in SearchSettings.__dataclass_fields__]
    if unknown:
        raise unknown_name_error("setting of a search", unknown[0], tuple(SearchSettings.__dataclass_fields__))
    return replace(search or SearchSettings(), **changes)
