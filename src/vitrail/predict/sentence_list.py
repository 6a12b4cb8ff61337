"""The sentences of a job: arguments that are text, files with one sentence per line, and standard input."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.files import suggest_sibling
from vitrail.checkpoint.model_location import is_image_file
from vitrail.data.text.text_files import MAX_FILE_BYTES, read_sentences, split_lines

STDIN, ARGUMENT = "-", "text"  # names of the sources of sentences that are not files
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
