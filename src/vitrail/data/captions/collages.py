"""Collages of the bundled garments, each with a sentence ("a boot left of a shirt"): what a word means is known.

A collage has 2 × 2 places of 28 × 28 pixels and two garments of different kinds in two of them. The sentence names the
upper one first, or the left one of a row: "above", "left of", "above and left of" or "above and right of". One training
collage in eight has one garment only ("a boot"), so that a garment can be removed from the others without making an
image of a new kind. A collage is a function of seed and index, so that nothing is stored. Pullovers and shirts with
buttons are left out: even people confuse them with T-shirts and coats.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.base.errors import ConfigError
from vitrail.data.fashion import FASHION_CLASSES, FASHION_FOLDER, IMAGE_SIDE, read_sheet
from vitrail.data.images.array_dataset import NO_LABEL, ArrayDataset
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.rng import COLLAGE_PURPOSE, make_view_keys, uniform_randoms

Part = Literal["train", "val", "test"]

NOUNS = {
    "T-shirt/top": "shirt",
    "Trouser": "trousers",
    "Dress": "dress",
    "Coat": "coat",
    "Sandal": "sandal",
    "Sneaker": "sneaker",
    "Bag": "bag",
    "Ankle boot": "boot",
}
WORDS = tuple(NOUNS.values())
NOUN_PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")
PLACES = 2  # per row and per column
COLLAGE_SIDE = PLACES * IMAGE_SIDE  # pixels
PLACE_PAIRS = tuple((first, second) for first in range(PLACES**2) for second in range(first + 1, PLACES**2))
NOUN_PAIRS = tuple((first, second) for first in range(len(WORDS)) for second in range(len(WORDS)) if first != second)
SINGLE_SHARES: dict[Part, float] = {"train": 1 / 8, "val": 0.0, "test": 0.0}  # of collages with one garment
COUNTS: dict[Part, int] = {"train": 20_000, "val": 1_000, "test": 1_000}


@dataclass(frozen=True)
class PlacedGarment:
    """A garment of a collage."""

    word: str
    number: int  # among the garments of its kind
    place: int  # row by row: 0 top left, 1 top right, 2 bottom left, 3 bottom right

    @property
    def rows_and_columns(self) -> tuple[slice, slice]:
        """Its pixels."""
        row, column = (IMAGE_SIDE * each for each in divmod(self.place, PLACES))
        return slice(row, row + IMAGE_SIDE), slice(column, column + IMAGE_SIDE)

    @property
    def phrase(self) -> str:
        return self.word if self.word.endswith("trousers") else f"a {self.word}"

    def find_patches(self, grid: tuple[int, int]) -> NDArray[np.bool_]:
        """True for the patches of its place, in a grid of (rows, columns) over the collage: (h, w)."""
        if grid[0] % PLACES or grid[1] % PLACES:
            raise ConfigError(f"{grid[0]}×{grid[1]} patches; expected even numbers, so that no patch has two places")
        row, column = divmod(self.place, PLACES)
        rows, columns = (np.arange(side) * PLACES // side for side in grid)
        return (rows == row)[:, None] & (columns == column)


@dataclass(frozen=True)
class Collage:
    """One or two garments, in the order of the sentence."""

    garments: tuple[PlacedGarment, ...]

    @property
    def sentence(self) -> str:
        if len(self.garments) == 1:
            return self.garments[0].phrase
        first, second = self.garments
        return f"{first.phrase} {describe_relation(first.place, second.place)} {second.phrase}"


class CollageImages:
    """The collages of a part, as images without classes. The garments of val and test are different test images."""

    classes: tuple[str, ...] = ()

    def __init__(self, part: Part, *, seed: int = 0, count: int | None = None) -> None:
        self.part: Part = part
        garments = read_garments("train" if part == "train" else "test")  # (kinds, garments, 28, 28)
        half = garments.shape[1] // 2
        self.garments = {"train": garments, "val": garments[:, :half], "test": garments[:, half:]}[part]
        self.plans = draw_plans(seed, part, COUNTS[part] if count is None else count, self.garments.shape[1])

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return open_image(self.source(index)), NO_LABEL

    def collage(self, index: int) -> Collage:
        places, nouns, *numbers, alone = self.plans[index].tolist()
        parts = zip(NOUN_PAIRS[nouns], numbers, PLACE_PAIRS[places], strict=True)
        garments = tuple(PlacedGarment(WORDS[noun], number, place) for noun, number, place in parts)
        return Collage(garments if alone < 0 else (garments[alone],))

    def source(self, index: int) -> NDArray[np.uint8]:
        """The pixels: uint8 (56, 56, 1)."""
        return self.draw(self.collage(index).garments)

    def source_without(self, index: int, garment: int) -> NDArray[np.uint8]:
        """The pixels without the first (0) or the second (1) garment of the sentence; its place is empty."""
        garments = self.collage(index).garments
        return self.draw(garments[:garment] + garments[garment + 1 :])

    def draw(self, garments: tuple[PlacedGarment, ...]) -> NDArray[np.uint8]:
        pixels = np.zeros((COLLAGE_SIDE, COLLAGE_SIDE, 1), np.uint8)
        for each in garments:
            pixels[each.rows_and_columns][..., 0] = self.garments[WORDS.index(each.word), each.number]
        return pixels

    def to_arrays(self) -> ArrayDataset:
        """All collages drawn, in memory."""
        pixels = np.zeros((len(self), COLLAGE_SIDE, COLLAGE_SIDE, 1), np.uint8)
        for index in range(len(self)):
            pixels[index] = self.source(index)
        return ArrayDataset(pixels, None, (), f"collages ({self.part})")

    def list_sentences(self) -> list[str]:
        return [self.collage(index).sentence for index in range(len(self))]

    def label(self, index: int) -> int:  # noqa: ARG002
        return NO_LABEL

    def name(self, index: int) -> str:
        return f"collage {index} ({self.part})"

    def real_labels(self, index: int) -> tuple[int, ...] | None:  # noqa: ARG002
        return None


@lru_cache(maxsize=2)
def read_garments(sheet: str) -> NDArray[np.uint8]:
    """The garments of the kinds with a noun, in the order of WORDS: (kinds, garments, 28, 28)."""
    return read_sheet(FASHION_FOLDER / f"{sheet}.png")[[FASHION_CLASSES.index(name) for name in NOUNS]]


def draw_plans(seed: int, part: Part, count: int, garments: int) -> NDArray[np.int64]:
    """Of every collage: the pair of places, the pair of nouns, the number of each garment, and the one that is alone,
    0 or 1, or −1 if both are there: (count, 5).
    """
    keys = make_view_keys(seed, tuple(COUNTS).index(part), np.arange(count), 0)
    choices = len(PLACE_PAIRS), len(NOUN_PAIRS), garments, garments, 2
    randoms = uniform_randoms(keys, len(choices) + 1, COLLAGE_PURPOSE)
    plans = (randoms[:, :-1] * choices).astype(np.int64)
    plans[randoms[:, -1] >= SINGLE_SHARES[part], -1] = -1
    return plans


def describe_relation(first: int, second: int) -> str:
    """Where the first place is, seen from the second, which comes later row by row."""
    (row, column), (other_row, other_column) = divmod(first, PLACES), divmod(second, PLACES)
    words = ["above"] if row < other_row else []
    if column != other_column:
        words.append("left of" if column < other_column else "right of")
    return " and ".join(words)


def find_nouns(sentence: str) -> Iterator[tuple[int, int]]:
    """Start and end of each noun of a sentence, in characters."""
    return (match.span() for match in NOUN_PATTERN.finditer(sentence))


def is_noun_gone(sentence: str, other: str, place: int) -> bool:
    """Whether the first (0) or second (1) noun of a sentence exists, and is not in the other sentence."""
    nouns, others = NOUN_PATTERN.findall(sentence), NOUN_PATTERN.findall(other)
    return place < len(nouns) and nouns[place] not in others
