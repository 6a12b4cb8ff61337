"""The tokens of a sentence and the words that they are pieces of: maps over tokens become maps over words."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.text.tokenizer import SHOWN_SPACE, TextTokenizer

WORD = re.compile(
    "w+(?:'w+)*|[p']"
)  # in classes of characters, see `classify_character`: ist's is one word, "." another
EMPTY_PIECE = "□"


@dataclass(frozen=True)
class SentenceWords:
    """Tokens in order, as shown to people, and the word of each. Special tokens are words of their own."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    places: tuple[int, ...]  # the number of the word that each token is a piece of

    @classmethod
    def from_text(cls, tokenizer: TextTokenizer, text: str) -> "SentenceWords":
        """The tokens of a text; an unknown one is shown as the characters that it stands for."""
        found = tokenizer.pieces(text)
        return cls.group((each.id for each in found), ((each.text, each.starts_word) for each in found), ())

    @classmethod
    def from_ids(cls, tokenizer: TextTokenizer, ids: Sequence[int]) -> "SentenceWords":
        shown = ((tokenizer.show_token(each), tokenizer.starts_word(each)) for each in ids)
        special = (tokenizer.pad, tokenizer.start, tokenizer.end, tokenizer.unknown)
        return cls.group(ids, shown, {place for place, each in enumerate(ids) if each in special})

    @classmethod
    def group(cls, ids: Iterable[int], shown: Iterable[tuple[str, bool]], special: "Iterable[int]") -> "SentenceWords":
        """Group pieces, each with whether it follows a space, by the words of the text that they make.

        A piece that is a space only belongs to the word that follows it.
        """
        texts, text, starts, alone = list[str](), "", list[int](), {*special}
        for place, (piece, follows_space) in enumerate(shown):
            is_apart = follows_space or place in alone or place - 1 in alone
            text += " " if is_apart and texts[-1:] != [SHOWN_SPACE] else ""
            texts.append(piece or EMPTY_PIECE)
            starts.append(len(text))
            text += "w" if place in alone else texts[-1].replace(SHOWN_SPACE, "")
        found = [match.start() for match in WORD.finditer("".join(map(classify_character, text)))]
        words = [int(np.searchsorted(found, start, "right")) for start in starts]
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        return cls(tuple(ids), tuple(texts), tuple(numbers[word] for word in words))

    def append(self, token: int, shown: str) -> "SentenceWords":
        """With one more token, a word of its own."""
        return SentenceWords((*self.ids, token), (*self.pieces, shown), (*self.places, len(self.words)))

    @cached_property
    def words(self) -> tuple[str, ...]:
        grouped = groupby(zip(self.places, self.pieces, strict=True), key=lambda each: each[0])
        joined = ("".join(piece for _, piece in group) for _, group in grouped)
        return tuple(each.replace(SHOWN_SPACE, "") or SHOWN_SPACE for each in joined)

    def drop_word(self, word: int) -> list[int]:
        """The ids without the pieces of one word."""
        return [token for token, place in zip(self.ids, self.places, strict=True) if place != word]

    def sum_pieces(self, values: NDArray[Any]) -> NDArray[Any]:
        """Add up the values of the pieces of each word, on the last axis: (…, tokens) → (…, words)."""
        return values @ self.membership.astype(values.dtype)

    def average_pieces(self, values: NDArray[Any]) -> NDArray[Any]:
        """The mean of the pieces of each word, on the last but one axis: (…, tokens, N) → (…, words, N)."""
        shares = self.membership / self.membership.sum(0)
        return shares.T.astype(values.dtype) @ values

    @property
    def membership(self) -> NDArray[np.float64]:
        """1 where a token is a piece of a word: (tokens, words)."""
        return np.eye(len(self.words))[list(self.places)]


def classify_character(character: str) -> str:
    """w for letters, digits and marks on them, a space, an apostrophe, and p for anything else."""
    if character.isspace():
        return " "
    if character in "'’":
        return "'"
    return "w" if character.isalnum() or unicodedata.category(character)[0] == "M" else "p"
