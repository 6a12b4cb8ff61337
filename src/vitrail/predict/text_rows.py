"""What a job writes of sentences and images as text: translations and captions.

Sentences are arguments that are text, files with one per line, and standard input.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial as bind
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.files import suggest_sibling
from vitrail.base.text import escape_formula_in_text, escape_unprintable, format_count
from vitrail.checkpoint.model_location import is_image_file
from vitrail.data.text.text_files import MAX_FILE_BYTES, read_sentences, split_lines
from vitrail.predict.captioner import Caption, Captioner
from vitrail.predict.image_list import STDIN, ImageList, list_images
from vitrail.predict.image_rows import find_starting_folder, note_changed_images, summarize_images
from vitrail.predict.job import ItemSummary, OpenRows
from vitrail.predict.model_checksums import identify_model
from vitrail.predict.output.partial_folder import PartialFolder
from vitrail.predict.output.resumable_rows import (
    CompletedItems,
    Record,
    Row,
    choose_format,
    compute_file_stamp,
    escape_formula_in_path,
    make_single_line,
)
from vitrail.predict.output.row_files import RowLayout, open_row_sink
from vitrail.predict.search.settings import SearchSettings
from vitrail.predict.translator import Translation, Translator

ARGUMENT = "text"  # name of the source of sentences that are not in a file
PATH_PATTERN = re.compile(  # sentences.de, data/sentences, ./my sentences, my sentences.txt; but not 3.14 or "z.B."
    r"\S+\.(?=\d*[A-Za-z])\w{1,10}|\S*/\S*|\.{0,2}/.*|.+\.(?:txt|tsv|csv|gz|jsonl)", re.DOTALL | re.IGNORECASE
)


@dataclass(frozen=True)
class Sentence:
    text: str
    file: str
    line: int  # from 1


def list_sentences(arguments: Sequence[str], stdin: BinaryIO | None = None) -> list[Sentence]:
    """All sentences in order: of arguments that are text, of files, and for - of standard input."""
    found, said = list[Sentence](), 0
    for argument in arguments:
        if argument == STDIN:
            found += [Sentence(text, STDIN, line) for line, text in enumerate(read_stdin(stdin), 1)]
        elif is_file_name(argument):
            if is_image_file(argument):
                raise DataError(f"{argument} is an image; expected sentences, or a file with one per line")
            found += [Sentence(text, argument, line) for line, text in enumerate(read_sentences(Path(argument)), 1)]
        else:
            said += 1
            found.append(Sentence(" ".join(argument.split()), ARGUMENT, said))
    if not any(each.text for each in found):
        raise DataError("there are no sentences; expected text, a file with one sentence per line, or - for stdin")
    return found


def is_file_name(argument: str) -> bool:
    """Whether an argument is a file, by its spelling: with a suffix or a slash and no spaces, or one of text files.

    A file that is missing is an error, and so is a word that is also the name of a file.
    """
    named = PATH_PATTERN.fullmatch(argument) is not None
    if named == os.path.lexists(argument):  # Path refuses a long name
        return named
    if named:
        expected = "expected a file with one sentence per line, or - for a word from standard input"
        raise DataError(f"{argument} does not exist; {expected}{suggest_sibling(argument)}")
    place = os.path.join(".", argument)  # noqa: PTH118
    raise DataError(f"{argument!r} is also a file or folder; write {place!r} to read it, or pass the text through -")


def read_stdin(stdin: BinaryIO | None) -> list[str]:
    if stdin is None:
        raise ConfigError("there is no standard input; expected text, or a file with one sentence per line")
    data = stdin.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"standard input has more than {MAX_FILE_BYTES:,} bytes; expected less: split it")
    return [line.strip() for line in split_lines(data, "standard input")]


def compute_sentences_checksum(sentences: Sequence[Sentence]) -> str:
    """A checksum of all sentences, so that a job is resumed only with the same ones."""
    found = blake2b(digest_size=8)
    for each in sentences:
        found.update(f"{each.text}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


SCORE_DIGITS = 6
TextFormat = Literal["text", "jsonl", "csv", "tsv"]
TEXT_FORMAT_BY_SUFFIX: dict[str, TextFormat] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}


@dataclass(frozen=True, kw_only=True)
class TranslationRows:
    """The translations of each sentence, for a job. Sentences that are too long are left empty."""

    noun: ClassVar[str] = "sentence"
    failure: ClassVar[str] = "could not be translated"
    model: str
    inputs: Sequence[str]  # sentences, files with one per line, - for standard input
    format: TextFormat | None = None  # None: by the suffix of the file, or text
    search: SearchSettings = field(default_factory=SearchSettings)
    batch: int = 64  # sentences
    device: str = "auto"

    def plan_output(self, out: Path | None) -> PartialFolder | None:
        layout = self.make_layout(out)
        return None if out is None else layout.partial_folder(out)

    def make_layout(self, out: Path | None) -> RowLayout:
        kind, many = choose_text_format(out, self.format, self.search.n_best), self.search.n_best
        return RowLayout(
            kind=kind,
            columns=["source", *list_ranked_columns("text", many), "error"],
            list_cells=bind(list_translation_cells, kind=kind, n_best=many),
            format_text=format_translation,
            spaced=many > 1,
        )

    def list_items(self, stdin: BinaryIO | None) -> list[Sentence]:
        return list_sentences(self.inputs, stdin)

    def summarize(self, items: list[Sentence]) -> ItemSummary:
        return ItemSummary(len(items))

    def open(
        self,
        items: list[Sentence],
        summary: ItemSummary,  # noqa: ARG002
        partial: PartialFolder | None,
        on_note: Callable[[str], object],
    ) -> OpenRows:
        translator = Translator(self.model, device=self.device, batch=self.batch)
        layout = self.make_layout(partial and partial.out)

        def iterate(done: CompletedItems, advance: Callable[[int], object]) -> Iterator[Row]:
            first, unknown = len(done), UnknownCharacters()  # by number: a sentence may be given twice
            found = translator.iterate([each.text for each in items], self.search, first, advance)
            for sentence, translation in zip(items[first:], found, strict=True):
                yield self.make_row(sentence, translation)
                unknown.add(translator, translation)
            if unknown.tokens:
                on_note(unknown.describe())

        return OpenRows(
            iterate=iterate,
            describe=lambda: {
                **identify_model(self.model),
                "format": layout.kind,
                "output": "translations",
                "sentences": compute_sentences_checksum(items),
                "batch": self.batch,
                **asdict(self.search),
            },
            open_sink=bind(open_row_sink, layout, partial),
        )

    def make_row(self, sentence: Sentence, found: Translation | DataError) -> Row:
        name = f"{sentence.file}:{sentence.line}"
        record: dict[str, Any] = {"file": sentence.file, "line": sentence.line, "source": sentence.text}
        if isinstance(found, DataError):
            record |= {"error": str(found), "translations": []}
            return Row(name, record, found, shown="" if self.search.n_best > 1 else "\n")
        ranked = [(each.text, round(each.score, SCORE_DIGITS)) for each in (found, *found.alternatives)]
        record["translations"] = [{"text": text, "score": score} for text, score in ranked]
        lines = "".join(f"{score:8.3f}  {escape_unprintable(text)}\n" for text, score in ranked)
        return Row(name, record, shown=lines if self.search.n_best > 1 else format_translation(record))


@dataclass(frozen=True, kw_only=True)
class CaptionRows:
    """The captions of each image, for a job."""

    noun: ClassVar[str] = "image"
    failure: ClassVar[str] = "could not be read"
    model: str
    inputs: Sequence[str]  # files, folders, patterns, - for standard input
    format: TextFormat | None = None  # None: by the suffix of the file, or text
    search: SearchSettings = field(default_factory=SearchSettings)
    batch: int = 16  # images
    device: str = "auto"

    def plan_output(self, out: Path | None) -> PartialFolder | None:
        layout = self.make_layout(out)
        return None if out is None else layout.partial_folder(out)

    def make_layout(self, out: Path | None) -> RowLayout:
        kind, many = choose_text_format(out, self.format, self.search.n_best), self.search.n_best
        return RowLayout(
            kind=kind,
            columns=["file", *list_ranked_columns("caption", many), "error"],
            list_cells=bind(list_caption_cells, kind=kind, n_best=many),
            format_text=lambda record: f"{make_single_line(record.get('caption', ''))}\n",
        )

    def list_items(self, stdin: BinaryIO | None) -> ImageList:
        return list_images(self.inputs, stdin=stdin)

    def summarize(self, items: ImageList) -> ItemSummary:
        return summarize_images(items)

    def open(
        self,
        items: ImageList,
        summary: ItemSummary,  # noqa: ARG002
        partial: PartialFolder | None,
        on_note: Callable[[str], object],
    ) -> OpenRows:
        captioner = Captioner(self.model, device=self.device, batch=self.batch)
        layout = self.make_layout(partial and partial.out)

        def iterate(done: CompletedItems, advance: Callable[[int], object]) -> Iterator[Row]:
            if done:
                note_changed_images(items, done, on_note)
            left, first = iter(items), 0
            while batch := list(islice(left, captioner.batch)):  # as without an interruption: captions are the same
                if any(each.name not in done for each in batch):
                    stamps = [compute_file_stamp(each.source) for each in batch]
                    found = captioner.describe_batch(batch, self.search, first)
                    for each, stamp, caption in zip(batch, stamps, found, strict=True):
                        if each.name not in done:
                            yield self.make_row(each.name, stamp, caption)
                            advance(1)
                first += len(batch)

        return OpenRows(
            iterate=iterate,
            describe=lambda: {
                **identify_model(self.model),
                "format": layout.kind,
                "output": "captions",
                "batch": self.batch,
                "started in": find_starting_folder(self.inputs),
                **asdict(self.search),
            },
            open_sink=bind(open_row_sink, layout, partial),
        )

    def make_row(self, name: str, stamp: int, found: Caption | DataError) -> Row:
        if isinstance(found, DataError):
            return Row(name, {"file": name, "error": str(found)}, found, stamp)
        shown = format_caption_lines(found, with_scores=self.search.n_best > 1)
        return Row(name, found.to_json(), None, stamp, shown)


@dataclass
class UnknownCharacters:
    """What the tokenizer has never seen, for a note."""

    sentences: int = 0
    tokens: int = 0
    example: str = ""

    def add(self, translator: Translator, found: Translation | DataError) -> None:
        if isinstance(found, Translation) and found.unknown:
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


def choose_text_format(out: Path | None, given: TextFormat | None, n_best: int) -> TextFormat:
    """The given format, by default that of the suffix of `out`, or text."""
    found = given or "text" if out is None else choose_format(out, given, TEXT_FORMAT_BY_SUFFIX)
    if out is not None and found == "text" and n_best > 1:
        raise ConfigError(f"`n_best` {n_best} for a text file, which has one line per input; use jsonl, csv or tsv")
    return found


def list_ranked_columns(name: str, n_best: int) -> list[str]:
    """text and score; with `n_best` text_1, score_1, text_2, …"""
    numbers = [""] if n_best == 1 else [f"_{number}" for number in range(1, n_best + 1)]
    return [f"{column}{number}" for number in numbers for column in (name, "score")]


def list_translation_cells(record: Record, kind: TextFormat, n_best: int) -> list[str]:
    pairs = [(each["text"], str(each["score"])) for each in record["translations"]]
    return [escape_cell(text, kind) for text in (record["source"], *pad(pairs, n_best), record.get("error") or "")]


def list_caption_cells(record: Record, kind: TextFormat, n_best: int) -> list[str]:
    ranked = [] if "error" in record else [record, *record.get("alternatives", ())]
    pairs = [(each["caption"], str(round(each["score"], SCORE_DIGITS))) for each in ranked]
    name = escape_formula_in_path(record["file"])
    return [escape_cell(text, kind) for text in (name, *pad(pairs, n_best), record.get("error", ""))]


def pad(pairs: Sequence[tuple[str, str]], n_best: int) -> list[str]:
    """The texts and scores in one list, empty where there are fewer than `n_best`."""
    return [cell for pair in (*pairs, *[("", "")] * (n_best - len(pairs))) for cell in pair]


def escape_cell(text: str, kind: TextFormat) -> str:
    """A cell that no spreadsheet takes for a formula; in TSV without tabs and line breaks, which it cannot quote."""
    if kind == "tsv":
        text = make_single_line(text).replace("\t", " ")
    return text if is_number(text) else escape_formula_in_text(text)


def is_number(text: str) -> bool:
    """Whether it is a number, such as a score, which is not a formula though it starts with a minus."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_translation(record: Record) -> str:
    """A sentence that could not be translated is an empty line of text."""
    found = record["translations"]
    return f"{make_single_line(found[0]['text']) if found else ''}\n"


def format_caption_lines(caption: Caption, *, with_scores: bool, files: Sequence[Path] = ()) -> str:
    """The captions of an image, best first, and the figures that were drawn of it."""
    name = "stdin" if caption.image == STDIN else caption.image
    lines = [
        f"{name}: {f'{each.score:7.3f}  ' if with_scores else ''}{each.text}"
        for each in (caption, *caption.alternatives)
    ]
    if files:
        lines[0] += f"  {', '.join(map(str, files))}"
    return "".join(f"{escape_unprintable(line)}\n" for line in lines)
