"""The page's questions about a sentence: its translation, what each word looked at, and what depends on each word.

L layers, H heads, W source words with the end, M target words with the end, B the words that the decoder reads.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError
from vitrail.inspection.explore.figure_file import pack_figures
from vitrail.inspection.sentences.sentence_attention import MapKind, SentenceAttention, read_sentence
from vitrail.inspection.sentences.word_occlusion import occlude_words
from vitrail.opening import Opened

FIGURES: Mapping[str, MapKind] = {"weights": "cross", "encoder": "encoder", "decoder": "decoder"}  # by array
KEPT_SENTENCES = 16
MAX_CHARACTERS = 2000
EXAMPLES = {  # by source language
    "de": ("Ich habe viel zu tun.", "Wo ist der Bahnhof?", "Tom ist müde, aber er liest noch ein Buch."),
    "en": ("I have a lot to do.", "Where is the station?", "Tom is tired, but he is still reading a book."),
    "fr": ("J'ai beaucoup à faire.", "Où est la gare ?", "Tom est fatigué, mais il lit encore un livre."),
}


class TextExplorer:
    """Built by `vitrail serve` for a model that reads text; see `vitrail.base.kinds.Explorer`."""

    def __init__(self, model: str, opened: Opened) -> None:
        del model
        self.opened = opened
        self.sentences = OrderedDict[str, SentenceAttention]()

    def describe(self) -> dict[str, Any]:
        languages = self.opened.languages
        reason = self.opened.model.no_maps_reason
        return {
            "kind": "text",
            "languages": None if languages is None else list(languages),
            "examples": list(EXAMPLES.get(languages[0], ())) if languages else [],
            "parts": {"maps": reason or True, "check": True},
        }

    def explore(self, body: bytes, query: Mapping[str, str]) -> bytes:
        part = query.get("part", "all")
        read = self.read(body)
        if part == "check":
            return self.check_words(read)
        if part != "all":
            raise ConfigError(f"part is {part[:20]!r}; expected all or check")
        arrays = dict[str, NDArray[Any]]()
        for name, kind in FIGURES.items():
            maps = read.merge_words(kind)
            if maps is not None:
                arrays[name] = maps.astype(np.float32)
        about = {
            "source": read.source.words,
            "target": read.target.words,
            "before": read.target_before.words,
            "result": read.translation,
            "score": read.best.score,
            "alternatives": [{"text": text, "score": score} for text, score in read.alternatives[1:4]],
            "reasons": {"maps": read.no_maps_reason} if read.no_maps_reason else {},
        }
        return pack_figures(about, arrays)

    def read(self, body: bytes) -> SentenceAttention:
        try:
            sentence = body.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"the text is not UTF-8 at byte {error.start}; send it in UTF-8") from None
        if len(sentence) > MAX_CHARACTERS:
            raise DataError(f"the sentence has {len(sentence):,} characters; expected at most {MAX_CHARACTERS:,}")
        if sentence not in self.sentences:
            self.sentences[sentence] = read_sentence(self.opened, sentence)
            while len(self.sentences) > KEPT_SENTENCES:
                self.sentences.popitem(last=False)
        return self.sentences[sentence]

    def check_words(self, read: SentenceAttention) -> bytes:
        """The probability of each target word with all source words, (M), and without each of them, (M, W)."""
        found = occlude_words(self.opened, read)
        whole = found.log_probabilities
        arrays = {"probability": np.exp(whole), "without": np.exp(whole[:, None] - found.losses)}
        about = {"greedy": found.greedy, "texts": found.without}
        return pack_figures(about, {name: each.astype(np.float32) for name, each in arrays.items()})
