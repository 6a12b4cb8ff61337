"""Translations as rows of text, printed one by one, or gathered in OUT.partial until OUT is complete."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.base.errors import ConfigError
from vitrail.base.text import escape_formula_in_text, escape_unprintable, format_csv_line
from vitrail.predict.output.append_only_files import create_empty_file
from vitrail.predict.output.partial_folder import PartialFolder, WritingError
from vitrail.predict.output.resumable_rows import ResumableRows
from vitrail.predict.output.row_formats import choose_format, encode_utf8, format_json_line

TranslationFormat = Literal["text", "jsonl", "csv", "tsv"]
FORMAT_BY_SUFFIX: dict[str, TranslationFormat] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}
ROW_FILES = {"text": "rows.txt", "jsonl": "rows.jsonl", "csv": "rows.csv", "tsv": "rows.tsv"}
Record = Mapping[str, Any]  # file, line, source, and translations, or an error


def choose_translation_format(out: Path | None, given: TranslationFormat | None, n_best: int) -> TranslationFormat:
    """The given format, by default that of the suffix of `out`, or text."""
    found = given or "text" if out is None else choose_format(out, given, FORMAT_BY_SUFFIX)
    if out is not None and found == "text" and n_best > 1:
        raise ConfigError(f"`n_best` {n_best} for a text file, which has one line per sentence; use jsonl, csv or tsv")
    return found


def partial_folder_for_translations(out: Path, kind: TranslationFormat) -> PartialFolder:
    return PartialFolder(out, {ROW_FILES[kind]: out})


class TranslationFile:
    """One row per sentence, in the order of the sentences, gathered as JSON lines."""

    def __init__(
        self, partial: PartialFolder, kind: TranslationFormat, n_best: int, job: Mapping[str, Any], *, resume: bool
    ) -> None:
        self.partial, self.n_best = partial, n_best
        self.kind: TranslationFormat = kind
        partial.open_job(job, resume=resume)
        self.rows = ResumableRows(partial, ROW_FILES["jsonl"])
        self.done, self.failed = len(self.rows.done), self.rows.failed

    def write(self, record: Record) -> None:
        self.rows.write(f"{record['file']}:{record['line']}", 0, format_json_line(record))

    def close(self) -> None:
        self.rows.close()

    def finish(self) -> None:
        if self.kind != "jsonl":
            with self.partial.convert_write_errors():
                count = 0
                with create_empty_file(self.partial.folder / ROW_FILES[self.kind]) as file:
                    for line in self.format_rows(row for row, _ in self.rows.read_records()):
                        file.write(encode_utf8(line))
                        count += 1
                if count != self.rows.log.count + len(list_header(self.kind, self.n_best)):
                    raise WritingError(
                        f"{self.rows.path} was damaged while the job ran; use `resume` to compute the rest"
                    )
        self.partial.finish()

    def format_rows(self, records: Iterable[Record]) -> Iterator[str]:
        yield from list_header(self.kind, self.n_best)
        for record in records:
            yield format_row(record, self.kind, self.n_best)


class TranslationPrinter:
    """Writes rows at once, to a terminal or a pipe; has the methods of a file of translations."""

    done = failed = 0

    def __init__(self, kind: TranslationFormat, n_best: int, write_text: Callable[[str], object]) -> None:
        self.kind: TranslationFormat = kind
        self.n_best, self.write_text, self.rows = n_best, write_text, 0
        for line in list_header(kind, n_best):
            write_text(line)

    def write(self, record: Record) -> None:
        if self.kind == "text" and self.n_best > 1:
            self.write_text("\n" * bool(self.rows) + format_ranked_lines(record["translations"]))
        else:
            self.write_text(format_row(record, self.kind, self.n_best))
        self.rows += 1

    def close(self) -> None:
        """Nothing to close."""

    def finish(self) -> None:
        """Nothing to finish."""


def list_header(kind: TranslationFormat, n_best: int) -> list[str]:
    """The first line of a table; none for other formats."""
    numbers = [""] if n_best == 1 else [f"_{number}" for number in range(1, n_best + 1)]
    names = ["source", *(f"{name}{number}" for number in numbers for name in ("text", "score")), "error"]
    return [format_csv_line(names)] if kind == "csv" else ["\t".join(names) + "\n"] if kind == "tsv" else []


def format_row(record: Record, kind: TranslationFormat, n_best: int) -> str:
    """A sentence that could not be translated is an empty line of text."""
    found: Sequence[Record] = record["translations"]
    if kind == "jsonl":
        return format_json_line(record)
    if kind == "text":
        return f"{make_single_line(found[0]['text']) if found else ''}\n"
    pairs = [(each["text"], str(each["score"])) for each in found]
    pairs += [("", "")] * (n_best - len(pairs))
    texts = [record["source"], *(text for pair in pairs for text in pair), record.get("error") or ""]
    if kind == "tsv":
        texts = [make_single_line(text).replace("\t", " ") for text in texts]
    texts = [text if is_number(text) else escape_formula_in_text(text) for text in texts]
    return "\t".join(texts) + "\n" if kind == "tsv" else format_csv_line(texts)


def format_ranked_lines(translations: Sequence[Record]) -> str:
    """The translations of a sentence with their scores, best first."""
    return "".join(f"{each['score']:8.3f}  {escape_unprintable(each['text'])}\n" for each in translations)


def make_single_line(text: str) -> str:
    """A text without line breaks, of any kind: one line per sentence."""
    return " ".join(text.splitlines())


def is_number(text: str) -> bool:
    """Whether it is a number, such as a score, which is not a formula though it starts with a minus."""
    try:
        float(text)
    except ValueError:
        return False
    return True
