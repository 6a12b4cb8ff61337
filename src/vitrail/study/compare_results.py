"""What came out of a comparison of models: as numbers, as text, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from vitrail.text import format_table, make_printable

TRUTH = "ground truth"
TEXT_WIDTH = 100  # of the text
MAX_NAME_LENGTH = 40  # name in it
MAX_LISTED_ROWS = 10  # pairs and files in it


@dataclass(frozen=True)
class Voter:
    """One that answers: the ground truth, a model, or one head of a model."""

    name: str
    model: str | None  # None is the ground truth
    head: str | None  # of a distilled model: class head, distillation head, both heads
    accuracy: float  # share of the pictures, as all numbers here

    def shorten_name(self, most: int) -> str:
        """The name in so many characters: it is the model's that is cut, never the head's."""
        head = f", {self.head}" if self.head else ""
        return make_printable(self.model or self.name, most - len(head)) + head


@dataclass(frozen=True)
class VoterPair:
    first: str
    second: str
    disagreement: float


@dataclass(frozen=True)
class TokenSimilarity:
    """Cosine of the class token and the distillation token of a model, the mean over the pictures."""

    model: str
    tokens: float  # as they were learned, without positions; the same for every picture
    layers: tuple[float, ...]  # 0 is after the embedding, with positions; then after each block
    end: float  # after the final norm, which the heads see


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who disagrees with whom; `str()` of it is a report."""

    data: str
    images: int
    voters: tuple[Voter, ...]  # the ground truth is the first
    disagreement: tuple[tuple[float, ...], ...]  # (voters, voters): share of the pictures classified differently
    similarities: tuple[TokenSimilarity, ...] = ()  # of each distilled model
    skipped: tuple[str, ...] = ()  # why pictures could not be read, one line each
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.voters)

    def pairs(self) -> list[VoterPair]:
        """Every two voters but the ground truth, those that agree most first."""
        found = [
            VoterPair(self.voters[row].name, self.voters[column].name, self.disagreement[row][column])
            for row, column in combinations(range(1, len(self.voters)), 2)
        ]
        return sorted(found, key=lambda each: each.disagreement)

    def to_json(self) -> dict[str, Any]:
        """All of it in plain values."""
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
        return f"{name}, {self.images:,} images; in % of them: right, and classified differently"

    def format_matrix(self) -> str:
        numbers = [str(row) for row in range(len(self.voters))]
        left = (
            ("", *numbers),
            ("voter", *(each.shorten_name(MAX_NAME_LENGTH) for each in self.voters)),
            ("right", *(format_percent(each.accuracy) for each in self.voters)),
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
        return format_wide_table(left, "rlr", columns)

    def format_pairs(self) -> str:
        pairs, short = self.pairs(), {each.name: each.shorten_name(MAX_NAME_LENGTH) for each in self.voters}
        rows = [
            (f"{short[each.first]} – {short[each.second]}", format_percent(each.disagreement))
            for each in pairs[:MAX_LISTED_ROWS]
        ]
        heading = f"closest of {len(pairs)} pairs" if len(pairs) > MAX_LISTED_ROWS else "pair, the closest first"
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
        return f"cosine of class and distillation token, after each layer\n{format_wide_table([left], 'l', columns)}"

    def format_skipped(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - MAX_LISTED_ROWS:,} more"] if len(self.skipped) > MAX_LISTED_ROWS else []
        named = [make_printable(each, TEXT_WIDTH) for each in self.skipped[:MAX_LISTED_ROWS]]
        return "\n".join([f"left out for all, {len(self.skipped):,} unreadable:", *named, *more])


def format_percent(share: float) -> str:
    return f"{100 * share:.2f}"


def format_wide_table(left: Sequence[Sequence[str]], sides: str, columns: Sequence[Sequence[str]]) -> str:
    """`left` columns beside as many `columns` as the width holds, and again beside the others; headings come first."""
    blocks = list[str]()
    rest = list(columns)
    while rest:
        room, taken = TEXT_WIDTH - sum(map(column_width, left)), 0
        while taken < len(rest) and (not taken or column_width(rest[taken]) <= room):
            room -= column_width(rest[taken])
            taken += 1
        heading, *lines = zip(*left, *rest[:taken], strict=True)
        blocks.append("\n".join(format_table(heading, lines, sides + taken * "r")))
        rest = rest[taken:]
    return "\n\n".join(blocks)


def column_width(column: Sequence[str]) -> int:
    return max(map(len, column)) + 2
