"""The sentences of a job: arguments that are text, files with one sentence per line, and standard input."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from vitrail.checkpoint.argument_order import is_image_file
from vitrail.data.text.text_files import MAX_FILE_BYTES, read_sentences, split_lines
from vitrail.errors import ConfigError, DataError

STDIN, ARGUMENT = "-", "text"  # names of the sources of sentences that are not files
FILE_SUFFIXES = (".txt", ".tsv", ".csv", ".gz", ".jsonl")


@dataclass(frozen=True)
class Sentence:
    text: str
    file: str
    line: int  # from 1


def list_sentences(arguments: Sequence[str], stdin: BinaryIO | None = None) -> list[Sentence]:
    """All sentences in order. An argument is a file if one has this name, - is standard input, others are sentences."""
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
    """Whether a file has this name; a text that looks like the name of a missing file is an error."""
    if os.path.lexists(argument):  # Path refuses a long name
        return True
    if not any(each.isspace() for each in argument) and ("/" in argument or argument.lower().endswith(FILE_SUFFIXES)):
        raise DataError(f"{argument} does not exist; expected a sentence, or a file with one per line")
    return False


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
