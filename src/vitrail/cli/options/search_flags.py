"""The options of commands that write text: how it is searched for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.output.help_text import SEARCH, reflow_docstring

if TYPE_CHECKING:
    from vitrail.predict.search.settings import SearchSettings


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How a text is searched for.

    Parameters
    ----------
    beam
        Hypotheses kept at each step of beam search; 1 is greedy search.
    n_best
        Number of results per input, with their scores.
    penalty
        Length penalty: gnmt is ((5 + length)/6)^alpha, length is length^alpha.
    alpha
        Exponent of the length penalty; 0 disables it.
    length
        Maximum number of tokens to generate. [default: 50 more than the sentence has, 60 for captions]
    temperature
        Sample tokens at this temperature instead of searching; --top-k and --top-p also sample. [default: search]
    top_k
        Sample from this many of the most probable tokens. [default: all]
    top_p
        Sample from the most probable tokens that together have this probability.
    seed
        Seed for sampling.
    """

    beam: Annotated[int, Parameter(group=SEARCH)] = 4
    n_best: Annotated[int, Parameter(group=SEARCH)] = 1
    penalty: Annotated[Literal["gnmt", "length"], Parameter(group=SEARCH)] = "gnmt"
    alpha: Annotated[float, Parameter(group=SEARCH)] = 0.6
    length: Annotated[int | None, Parameter(group=SEARCH)] = None
    temperature: Annotated[float | None, Parameter(group=SEARCH)] = None
    top_k: Annotated[int | None, Parameter(group=SEARCH)] = None
    top_p: Annotated[float, Parameter(group=SEARCH)] = 1.0
    seed: Annotated[int, Parameter(group=SEARCH)] = 0

    def make_settings(self) -> "SearchSettings":
        from vitrail.predict.search.settings import SearchSettings

        return SearchSettings(**vars(self))
