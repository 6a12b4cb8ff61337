"""Translate sentences: text in, text out, by greedy search, beam search or sampling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.progress import Progress, track_progress
from vitrail.base.text import format_count
from vitrail.distributed import Ranks, resolve_device
from vitrail.models.base.checks import check_count
from vitrail.opening import Opened, open_model
from vitrail.predict.search.hypothesis import Hypothesis
from vitrail.predict.search.settings import SearchSettings, change_search

BATCHES_PER_CHUNK = 16  # batches that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A translation of a sentence; `print` shows its text."""

    source: str
    text: str
    score: float  # log-probability, divided by the length penalty
    log_probability: float = 0.0
    tokens: tuple[str, ...] = ()  # as shown to people
    ids: tuple[int, ...] = ()  # of the tokens
    finished: bool = True  # False: cut at the maximum length
    unknown: int = 0  # unknown tokens of the source: characters that the tokenizer has never seen
    alternatives: tuple["Translation", ...] = ()  # the next best, with `n_best`

    def __str__(self) -> str:
        return self.text


def ignore_progress(_: int) -> None:
    """The default of `progress`: nothing is shown."""


class Translator:
    """Translates sentences with a run of translation, or the folder of its model.

    `batch` is the number of sentences that are translated together, `trust_code` that of `vitrail.open_model`.

    >>> translator = vitrail.Translator("runs/demo")  # doctest: +SKIP
    >>> translator.translate("Ein Hund läuft.", beam=4).text  # doctest: +SKIP
    'A dog runs.'
    """

    def __init__(
        self,
        model: str | Path | Opened,
        *,
        device: str | torch.device | None = "auto",
        batch: int = 64,
        trust_code: str | Sequence[str] = (),
    ) -> None:
        check_count("batch", batch)
        place = None if device is None else resolve_device(device, Ranks())
        self.loaded, self.batch = open_model(model, kind="text", device=place, trust_code=trust_code), batch
        self.model, self.tokenizer = self.loaded.model, self.loaded.tokenizer

    @property
    def languages(self) -> tuple[str, str] | None:
        """Source and target."""
        return self.loaded.languages

    def translate(
        self,
        text: str | Sequence[str],
        search: SearchSettings | None = None,
        *,
        progress: Progress = None,
        **changes: Any,
    ) -> Any:
        """The Translation of a sentence, or a list of them for a list of sentences, in the same order.

        `search` is a `vitrail.SearchSettings`; its fields may also be given as keywords, such as `beam=1` for greedy
        search. By default, the progress of a list is a bar in a notebook and on a terminal.
        """
        search = change_search(search, changes)
        texts = [text] if isinstance(text, str) else check_sentences(text)
        found = list[Translation]()
        with track_progress(progress, 0 if isinstance(text, str) else len(texts), "sentences") as advance:
            for each in self.iterate(texts, search, progress=advance):
                if isinstance(each, DataError):
                    raise each
                found.append(each)
        return found[0] if isinstance(text, str) else found

    def iterate(
        self,
        texts: Sequence[str],
        search: SearchSettings,
        first: int = 0,
        progress: Callable[[int], object] = ignore_progress,
    ) -> Iterator[Translation | DataError]:
        """Translate sentences in order, from the sentence `first` on; one that is too long is an error.

        Sentences are sorted by length in chunks, which begin at the same places whatever `first` is: a translation
        does not depend on where a job was resumed. `progress` is called with the number of sentences of each batch.
        """
        size = self.batch * BATCHES_PER_CHUNK
        for start in range(first // size * size, len(texts), size):
            found = self.translate_chunk(texts[start : start + size], search, start, progress)
            yield from found[max(first - start, 0) :]

    def translate_chunk(
        self, texts: Sequence[str], search: SearchSettings, start: int, progress: Callable[[int], object]
    ) -> list[Translation | DataError]:
        rows = self.tokenizer.encode(texts)
        results: dict[int, Translation | DataError] = {}
        for place, (text, row) in enumerate(zip(texts, rows, strict=True)):
            if (error := self.find_length_error(len(row) + 1, start + place + 1)) is not None:
                results[place] = error
            elif not row:
                results[place] = Translation(source=text, text="", score=0.0)
        progress(len(results))
        left = sorted((place for place in range(len(rows)) if place not in results), key=lambda each: len(rows[each]))
        for begin in range(0, len(left), self.batch):
            places = left[begin : begin + self.batch]
            numbers = [start + place for place in places]
            found = search.run(self.model, self.tokenizer, [rows[place] for place in places], numbers)
            for place, hypotheses in zip(places, found, strict=True):
                results[place] = self.make_translation(texts[place], rows[place], hypotheses)
            progress(len(places))
        return [results[place] for place in range(len(texts))]

    def find_length_error(self, tokens: int, number: int) -> DataError | None:
        limit = self.model.length_limit
        if limit is None or tokens <= limit:
            return None
        return DataError(
            f"sentence {number} has {format_count(tokens, 'token')}; expected at most {limit:,}, the positions of the "
            "model: split it"
        )

    def make_translation(self, source: str, row: Sequence[int], hypotheses: Sequence[Hypothesis]) -> Translation:
        unknown = row.count(self.tokenizer.unknown)
        found = [
            Translation(
                source=source,
                text=self.tokenizer.decode(each.tokens),
                score=each.score,
                log_probability=each.log_probability,
                tokens=tuple(map(self.tokenizer.show_token, each.tokens)),
                ids=each.tokens,
                finished=each.finished,
                unknown=unknown,
            )
            for each in hypotheses
        ]
        return replace(found[0], alternatives=tuple(found[1:]))


def check_sentences(texts: Any) -> list[str]:
    """A list of sentences; an error for anything else."""
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(f"the text is {repr(texts)[:60]}; expected a string, or a list of strings")
    return list(texts)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
