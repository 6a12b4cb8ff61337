"""What a text model attends to while it translates one sentence: maps over tokens, and over the words that they make.

L layers, H heads, N source tokens with the end, M target tokens with the end.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import DataError, VitrailError
from vitrail.base.text import format_count
from vitrail.data.text.tokenizer import SHOWN_SPACE, TextTokenizer
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.inspection.attention.capture import resolve_index
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.opening import Opened, open_model
from vitrail.predict.search.beam_search import BeamRecord, BeamTree, beam_search
from vitrail.predict.search.hypothesis import Hypothesis, Penalty
from vitrail.predict.search.settings import SearchSettings

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


MapKind = Literal["cross", "encoder", "decoder"]


@dataclass(frozen=True, kw_only=True, eq=False)  # comparing arrays is ambiguous
class SentenceAttention:
    """A sentence, its translation, and the attention of all layers and heads while it was written.

    Rows are what is written, or for the encoder what is read, and sum to 1; a row of the decoder shows what is read to
    write its token, of the tokens before it. Without attention, `no_maps_reason` says why.
    """

    sentence: str
    translation: str
    source: SentenceWords  # with the end
    target: SentenceWords  # with the end, if it was reached
    target_before: SentenceWords  # what the decoder reads: the start, and the target without its last token
    best: Hypothesis
    tree: BeamTree
    alternatives: tuple[tuple[str, float], ...]  # the texts that the search has finished, with their scores, best first
    languages: tuple[str, str] | None = None
    encoder: NDArray[np.float32] | None = None  # (L, H, N, N)
    decoder: NDArray[np.float32] | None = None  # (L, H, M, M)
    cross: NDArray[np.float32] | None = None  # (L, H, M, N)
    no_maps_reason: str = ""

    @property
    def layers_and_heads(self) -> tuple[int, int]:
        return (0, 0) if self.cross is None else (self.cross.shape[0], self.cross.shape[1])

    @property
    def source_words(self) -> tuple[str, ...]:
        """The words that can be left out: all but the end."""
        return self.source.words[:-1]

    @property
    def target_words(self) -> tuple[str, ...]:
        """The words that were written, without the end."""
        return self.target.words[: len(self.target.words) - self.best.finished]

    def find_sides(self, kind: MapKind) -> tuple[SentenceWords, SentenceWords]:
        """What the rows and the columns of a map stand for."""
        return {
            "cross": (self.target, self.source),
            "encoder": (self.source, self.source),
            "decoder": (self.target, self.target_before),
        }[kind]

    def find_maps(self, kind: MapKind) -> NDArray[np.float32] | None:
        return {"cross": self.cross, "encoder": self.encoder, "decoder": self.decoder}[kind]

    def merge_words(self, kind: MapKind) -> NDArray[np.float32] | None:
        """The maps of a kind over words: the sum over source pieces, the mean over target pieces."""
        maps, (rows, columns) = self.find_maps(kind), self.find_sides(kind)
        return None if maps is None else rows.average_pieces(columns.sum_pieces(maps))

    def select_map(
        self, kind: MapKind = "cross", layer: int = -1, head: int | Literal["mean"] = "mean"
    ) -> NDArray[np.float32] | None:
        """One map over words, of one head or the mean over all heads of a layer; None if there are none."""
        maps = self.merge_words(kind)
        if maps is None:
            return None
        return select_head(maps, layer, head)


def select_head(maps: NDArray[Any], layer: int, head: int | Literal["mean"]) -> NDArray[Any]:
    """The map of one head, or the mean over all heads, of a layer: (L, H, …) → (…)."""
    of_layer = maps[resolve_index(layer, len(maps), "`layer`")]
    return of_layer.mean(0) if head == "mean" else of_layer[resolve_index(head, len(of_layer), "`head`")]


def read_sentence(
    model: str | Path | Opened,
    sentence: str,
    *,
    beam: int = 4,
    penalty: Penalty = "gnmt",
    alpha: float = 0.6,
    length: int | None = None,
) -> SentenceAttention:
    """Translate a sentence by beam search and collect its attention. The settings are those of `Translator.translate`.

    >>> found = read_sentence("runs/demo", "Ein Hund läuft.")
    >>> found.translation, found.select_map("cross", layer=-1)
    """
    loaded = open_model(model, kind="text")
    tokenizer, network = loaded.tokenizer, loaded.model
    source = SentenceWords.from_text(tokenizer, sentence).append(tokenizer.end, tokenizer.show_token(tokenizer.end))
    check_sentence(source, network)
    settings = SearchSettings(beam=beam, penalty=penalty, alpha=alpha, length=length)
    record = BeamRecord()
    with torch.inference_mode():
        row = make_rows(network, [source.ids])
        memory = network.encode(row)
        ((best,),) = beam_search(
            network,
            memory,
            start=tokenizer.start,
            end=tokenizer.end,
            length=settings.limit_length(len(source.ids), network.length_limit),
            beam=beam,
            penalty=penalty,
            alpha=alpha,
            record=record,
        )
        written = [*best.tokens, *[tokenizer.end] * best.finished]
        before = [tokenizer.start, *written[:-1]]
        maps = compute_maps(network, memory, make_rows(network, [before]), row)
    return SentenceAttention(
        sentence=sentence,
        translation=tokenizer.decode(best.tokens),
        source=source,
        target=SentenceWords.from_ids(tokenizer, written),
        target_before=SentenceWords.from_ids(tokenizer, before),
        best=best,
        tree=record.trees[0],
        alternatives=list_alternatives(record.trees[0], tokenizer),
        languages=loaded.languages,
        no_maps_reason=network.no_maps_reason,
        **maps,
    )


def list_alternatives(tree: BeamTree, tokenizer: TextTokenizer) -> tuple[tuple[str, float], ...]:
    ended = sorted((node for node in tree.nodes if node.score is not None), key=lambda node: -(node.score or 0.0))
    return tuple((tokenizer.decode(each.token for each in node.list_path()), node.score or 0.0) for node in ended)


def check_sentence(source: SentenceWords, model: TextModel) -> None:
    """Refuse a sentence without a word, and one that is longer than the positions of the model."""
    tokens, limit = len(source.ids), model.length_limit
    if tokens == 1:
        raise DataError("the `sentence` is empty; expected at least one word")
    if limit is not None and tokens > limit:
        raise DataError(
            f"the `sentence` has {format_count(tokens, 'token')}; expected at most {limit:,}, the positions of the "
            "model: split it"
        )


def make_rows(model: TextModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of token ids, padded at the end, on the device of the model: int64 (rows, longest)."""
    longest, pad = max(map(len, rows)), model.config.pad
    padded = [[*row, *[pad] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, device=next(model.parameters()).device)


def compute_maps(model: TextModel, memory: Memory, target: Tensor, source: Tensor) -> dict[str, NDArray[Any] | None]:
    """The attention of one sentence by its kind: (L, H, …) each."""
    found = model.attention_maps(memory, target, source)
    tensors = {"encoder": found.encoder, "decoder": found.decoder, "cross": found.cross}
    maps = {kind: None if each is None else each[0].float().numpy(force=True) for kind, each in tensors.items()}
    if any(each is not None and not np.isfinite(each).all() for each in maps.values()):
        raise VitrailError(NOT_FINITE_MESSAGE)
    return maps
