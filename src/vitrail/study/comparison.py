"""What came out of a comparison of models: as numbers, as text, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from vitrail.tables import text_table
from vitrail.train.tally import clean

TRUTH = "ground truth"
WIDTH = 100  # of the text
LONGEST = 40  # name in it
SHOWN = 10  # pairs and files in it


@dataclass(frozen=True)
class Voter:
    """One that answers: the ground truth, a model, or one head of a model."""

    name: str
    model: str | None  # None is the ground truth
    head: str | None  # of a distilled model: class head, distillation head, both heads
    accuracy: float  # share of the pictures, as all numbers here

    def short(self, most: int) -> str:
        """The name in so many characters: it is the model's that is cut, never the head's."""
        head = f", {self.head}" if self.head else ""
        return clean(self.model or self.name, most - len(head)) + head


@dataclass(frozen=True)
class Pair:
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

    def pairs(self) -> list[Pair]:
        """Every two voters but the ground truth, those that agree most first."""
        found = [
            Pair(self.voters[row].name, self.voters[column].name, self.disagreement[row][column])
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
        parts = (self.headline(), self.matrix(), self.pair_table(), self.similarity_table(), self.left_out())
        return "\n\n".join(filter(None, parts))

    def headline(self) -> str:
        return f"{clean(self.data, LONGEST)}, {self.images:,} images; in % of them: right, and classified differently"

    def matrix(self) -> str:
        numbers = [str(row) for row in range(len(self.voters))]
        left = (
            ("", *numbers),
            ("voter", *(each.short(LONGEST) for each in self.voters)),
            ("right", *(percent(each.accuracy) for each in self.voters)),
        )
        columns = [
            (
                number,
                *("·" if row == column else percent(shares[column]) for row, shares in enumerate(self.disagreement)),
            )
            for column, number in enumerate(numbers)
        ]
        return wide_table(left, "rlr", columns)

    def pair_table(self) -> str:
        pairs, short = self.pairs(), {each.name: each.short(LONGEST) for each in self.voters}
        rows = [(f"{short[each.first]} – {short[each.second]}", percent(each.disagreement)) for each in pairs[:SHOWN]]
        heading = f"closest of {len(pairs)} pairs" if len(pairs) > SHOWN else "pair, the closest first"
        return "\n".join(text_table((heading, "differ"), rows, "lr")) if rows else ""

    def similarity_table(self) -> str:
        if not self.similarities:
            return ""
        depth = max(len(each.layers) for each in self.similarities)
        left = ("layer", "tokens alone", "embedding", *(f"block {layer}" for layer in range(1, depth)), "final norm")
        columns = [
            (
                clean(each.model, LONGEST),
                *(f"{value:.3f}" for value in (each.tokens, *each.layers)),
                *("" for _ in range(depth - len(each.layers))),
                f"{each.end:.3f}",
            )
            for each in self.similarities
        ]
        return f"cosine of class and distillation token, after each layer\n{wide_table([left], 'l', columns)}"

    def left_out(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - SHOWN:,} more"] if len(self.skipped) > SHOWN else []
        named = [clean(each, WIDTH) for each in self.skipped[:SHOWN]]
        return "\n".join([f"left out for all, {len(self.skipped):,} unreadable:", *named, *more])


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def wide_table(left: Sequence[Sequence[str]], sides: str, columns: Sequence[Sequence[str]]) -> str:
    """`left` columns beside as many `columns` as the width holds, and again beside the others; headings come first."""
    blocks = list[str]()
    rest = list(columns)
    while rest:
        room, taken = WIDTH - sum(map(wide, left)), 0
        while taken < len(rest) and (not taken or wide(rest[taken]) <= room):
            room -= wide(rest[taken])
            taken += 1
        heading, *lines = zip(*left, *rest[:taken], strict=True)
        blocks.append("\n".join(text_table(heading, lines, sides + taken * "r")))
        rest = rest[taken:]
    return "\n\n".join(blocks)


def wide(column: Sequence[str]) -> int:
    return max(map(len, column)) + 2
