"""The options of commands that write text: how it is searched for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitrail.cli.options.groups import SEARCH
from vitrail.cli.output.help_text import reflow_docstring

if TYPE_CHECKING:
    from vitrail.predict.translator import SearchSettings


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How a text is searched for.

    Parameters
    ----------
    beam
        Beginnings of a text that are kept at each step; 1 is greedy search.
    n_best
        Texts per input, with their scores.
    penalty
        Length penalty: gnmt is ((5 + length)/6)^alpha, length is length^alpha.
    alpha
        Exponent of the length penalty; 0 disables it.
    length
        Tokens of a text, at most. [default: 50 more than its sentence has, 60 for captions]
    temperature
        Draw tokens at random with this temperature instead of searching; so do --top-k and --top-p. [default: search]
    top_k
        Draw from the most probable tokens, as many as this. [default: all]
    top_p
        Draw from the most probable tokens that together have this probability.
    seed
        Seed of the draws.
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
        from vitrail.predict.translator import SearchSettings

        return SearchSettings(**vars(self))
