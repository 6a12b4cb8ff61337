"""Results of a comparison of models: as numbers, text and JSON."""

from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from vitrail.base.text import TEXT_WIDTH, format_table, format_table_in_parts, make_printable

TRUTH = "ground truth"
MAX_NAME_LENGTH = 40
MAX_LISTED_ROWS = 10  # pairs and skipped files in the text


@dataclass(frozen=True)
class Voter:
    """The ground truth, a model, or one head of a model."""

    name: str
    model: str | None  # None for the ground truth
    head: str | None  # for a distilled model: class head, distillation head, both heads
    accuracy: float  # share of the images

    def shorten_name(self, max_length: int) -> str:
        """Cut the model's name, not the head's."""
        head = f", {self.head}" if self.head else ""
        return make_printable(self.model or self.name, max_length - len(head)) + head


@dataclass(frozen=True)
class VoterPair:
    first: str
    second: str
    disagreement: float


@dataclass(frozen=True)
class ClassDistillationSimilarity:
    """Cosine similarity of a model's class and distillation tokens, averaged over the images."""

    model: str
    tokens: float  # of the learned parameters, without positions
    layers: tuple[float, ...]  # after the embedding, with positions, and after each block
    end: float  # after the final norm, which the heads read


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Accuracies and pairwise disagreement of voters; `str()` formats a report."""

    data: str
    images: int
    voters: tuple[Voter, ...]  # the ground truth first
    disagreement: tuple[tuple[float, ...], ...]  # (voters, voters): share of the images classified differently
    similarities: tuple[ClassDistillationSimilarity, ...] = ()  # one per distilled model
    skipped: tuple[str, ...] = ()  # unreadable images and why, one line each
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.voters)

    def pairs(self) -> list[VoterPair]:
        """All pairs of voters without the ground truth, most similar first."""
        found = [
            VoterPair(self.voters[row].name, self.voters[column].name, self.disagreement[row][column])
            for row, column in combinations(range(1, len(self.voters)), 2)
        ]
        return sorted(found, key=lambda each: each.disagreement)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "data": self.data,
            "images": self.images,
            "voters": [asdict(each) for each in self.voters],
            "disagreement": [list(row) for row in self.disagreement],
            "pairs": [asdict(each) for each in self.pairs()],
            "similarities": [{**asdict(each), "layers": list(each.layers)} for each in self.similarities],
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        parts = (
            self.format_headline(),
            self.format_matrix(),
            self.format_pairs(),
            self.format_similarities(),
            self.format_skipped(),
        )
        return "\n\n".join(filter(None, parts))

    def format_headline(self) -> str:
        name = make_printable(self.data, MAX_NAME_LENGTH)
        return f"{name}, {self.images:,} images: accuracy and disagreement in %"

    def format_matrix(self) -> str:
        numbers = [str(row) for row in range(len(self.voters))]
        left = (
            ("", *numbers),
            ("voter", *(each.shorten_name(MAX_NAME_LENGTH) for each in self.voters)),
            ("correct", *(format_percent(each.accuracy) for each in self.voters)),
        )
        columns = [
            (
                number,
                *(
                    "·" if row == column else format_percent(shares[column])
                    for row, shares in enumerate(self.disagreement)
                ),
            )
            for column, number in enumerate(numbers)
        ]
        return format_table_in_parts(left, "rlr", columns)

    def format_pairs(self) -> str:
        pairs, short_names = self.pairs(), {each.name: each.shorten_name(MAX_NAME_LENGTH) for each in self.voters}
        rows = [
            (f"{short_names[each.first]} – {short_names[each.second]}", format_percent(each.disagreement))
            for each in pairs[:MAX_LISTED_ROWS]
        ]
        heading = f"most similar of {len(pairs)} pairs" if len(pairs) > MAX_LISTED_ROWS else "pair, most similar first"
        return "\n".join(format_table((heading, "differ"), rows, "lr")) if rows else ""

    def format_similarities(self) -> str:
        if not self.similarities:
            return ""
        depth = max(len(each.layers) for each in self.similarities)
        left = ("layer", "tokens alone", "embedding", *(f"block {layer}" for layer in range(1, depth)), "final norm")
        columns = [
            (
                make_printable(each.model, MAX_NAME_LENGTH),
                *(f"{value:.3f}" for value in (each.tokens, *each.layers)),
                *("" for _ in range(depth - len(each.layers))),
                f"{each.end:.3f}",
            )
            for each in self.similarities
        ]
        table = format_table_in_parts([left], "l", columns)
        return f"cosine similarity of class and distillation tokens, by layer\n{table}"

    def format_skipped(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - MAX_LISTED_ROWS:,} more"] if len(self.skipped) > MAX_LISTED_ROWS else []
        lines = [make_printable(each, TEXT_WIDTH) for each in self.skipped[:MAX_LISTED_ROWS]]
        return "\n".join([f"{len(self.skipped):,} unreadable, excluded for all models:", *lines, *more])


def format_percent(share: float) -> str:
    return f"{100 * share:.2f}"
