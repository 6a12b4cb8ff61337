"""Sentences in, a file of translations out; a job can be interrupted and resumed."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from vitrail.base.errors import DataError
from vitrail.base.text import format_count
from vitrail.predict.job import ignore_message
from vitrail.predict.output.job_file import identify_model
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.translation_files import (
    TranslationFile,
    TranslationFormat,
    TranslationPrinter,
    choose_translation_format,
    partial_folder_for_translations,
)
from vitrail.predict.sentence_list import Sentence, compute_sentences_checksum, list_sentences
from vitrail.predict.translator import SearchSettings, Translation, Translator

SCORE_DIGITS = 6


@dataclass(frozen=True)
class TranslateResult:
    """What a job did, including the rows of earlier runs that it resumed."""

    out: Path | None
    sentences: int
    failed: int = 0  # sentences that are too long; their rows say so
    seconds: float = 0.0  # of this run
    resumed: int = 0  # sentences of earlier runs
    was_complete: bool = False  # there was nothing left to resume

    def raise_if_failed(self) -> None:
        """DataError if some sentences could not be translated; the results of all others are complete."""
        if self.failed:
            raise DataError(f"{self.failed} of {format_count(self.sentences, 'sentence')} could not be translated")


@dataclass
class UnknownCharacters:
    """What the tokenizer has never seen, for a note."""

    sentences: int = 0
    tokens: int = 0
    example: str = ""

    def add(self, translator: Translator, found: Translation) -> None:
        if found.unknown:
            self.sentences += 1
            self.tokens += found.unknown
            unknown = translator.tokenizer.unknown
            pieces = (each.text for each in translator.tokenizer.pieces(found.source) if each.id == unknown)
            self.example = self.example or next(pieces, "")

    def describe(self) -> str:
        return (
            f"{format_count(self.tokens, 'unknown token')} in {format_count(self.sentences, 'sentence')}, for example "
            f"{self.example!r}: the tokenizer was trained without these characters"
        )


@dataclass(frozen=True, kw_only=True)
class TranslateJob:
    """One model, sentences, and a file for their translations."""

    model: str
    inputs: Sequence[str]  # sentences, files with one per line, - for `stdin`
    out: Path | None = None  # None: translations are passed to `write_text`
    format: TranslationFormat | None = None  # None: by the suffix of `out`
    search: SearchSettings = field(default_factory=SearchSettings)
    batch: int = 64  # sentences
    device: str = "auto"
    resume: bool = False  # continue with the rows in OUT.partial
    overwrite: bool = False  # replace OUT
    stdin: BinaryIO | None = None
    write_text: Callable[[str], object] = ignore_message
    on_note: Callable[[str], object] = ignore_message
    on_error: Callable[[DataError], object] = ignore_message  # a sentence that is too long
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]] = lambda _: nullcontext(ignore_message)

    def run(self) -> TranslateResult:
        """Translate all sentences; those that are too long are reported, counted and left empty."""
        kind = choose_translation_format(self.out, self.format, self.search.n_best)
        partial = None if self.out is None else partial_folder_for_translations(self.out, kind)
        sentences = list_sentences(self.inputs, self.stdin)
        with nullcontext() if partial is None else closing(partial):
            if partial is not None and partial.start(resume=self.resume, overwrite=self.overwrite):
                self.on_note(f"{partial.out} is already complete; use `overwrite` to start over")
                return TranslateResult(self.out, len(sentences), was_complete=True)
            with self.report_interrupt(partial):
                translator = Translator(self.model, device=self.device, batch=self.batch)
                with closing(self.open_sink(kind, partial, sentences)) as sink:
                    return self.translate_sentences(translator, sentences, sink)

    def describe(self, kind: str, sentences: Sequence[Sentence]) -> dict[str, Any]:
        """What must be the same when the job is resumed; the keys are those of job.json."""
        return {
            **identify_model(self.model),
            "format": kind,
            "output": "translations",
            "sentences": compute_sentences_checksum(sentences),
            "batch": self.batch,
            **asdict(self.search),
        }

    def open_sink(
        self, kind: TranslationFormat, partial: PartialFolder | None, sentences: Sequence[Sentence]
    ) -> TranslationFile | TranslationPrinter:
        if partial is None:
            return TranslationPrinter(kind, self.search.n_best, self.write_text)
        job = self.describe(kind, sentences)
        return TranslationFile(partial, kind, self.search.n_best, job, resume=self.resume)

    def translate_sentences(
        self, translator: Translator, sentences: Sequence[Sentence], sink: TranslationFile | TranslationPrinter
    ) -> TranslateResult:
        start, failed, resumed, unknown = monotonic(), sink.failed, sink.done, UnknownCharacters()
        if sink.done:
            self.on_note(f"resuming: {format_count(sink.done, 'sentence')} done")
        texts = [each.text for each in sentences]
        with self.progress(len(sentences) - sink.done) as advance:
            found = translator.iterate(texts, self.search, sink.done, advance)
            for sentence, each in zip(sentences[sink.done :], found, strict=True):
                if isinstance(each, DataError):
                    if len(sentences) == 1:
                        raise each
                    self.on_error(each)
                    failed += 1
                else:
                    unknown.add(translator, each)
                sink.write(make_record(sentence, each))
        if unknown.tokens:
            self.on_note(unknown.describe())
        sink.finish()
        return TranslateResult(self.out, len(sentences), failed, monotonic() - start, resumed)

    @contextmanager
    def report_interrupt(self, partial: PartialFolder | None) -> Generator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if partial is not None and (partial.has_job or partial.is_complete):
                self.on_note(f"stopped; finished rows are in {partial.folder}: run it again with `resume` to continue")
            raise


def make_record(sentence: Sentence, found: Translation | DataError) -> dict[str, Any]:
    """A row as JSON."""
    record: dict[str, Any] = {"file": sentence.file, "line": sentence.line, "source": sentence.text}
    if isinstance(found, DataError):
        return {**record, "error": str(found), "translations": []}
    each = (found, *found.alternatives)
    return {**record, "translations": [{"text": one.text, "score": round(one.score, SCORE_DIGITS)} for one in each]}
