"""Make the bundled pairs from a table of Tatoeba: `python scripts/make_tatoeba_pairs.py deu-eng.tsv.gz`."""

import gzip
import re
import sys
from pathlib import Path
from unicodedata import normalize

from vitrail.base.errors import DataError
from vitrail.data.text.pairs import TATOEBA_FILE, VALIDATION_MARK
from vitrail.data.text.text_files import read_sentences
from vitrail.data.validation_split import choose_held_out_pairs

MAX_WORDS = 6  # of a sentence
VALIDATION_PAIRS = 1000
LEFT_OUT = re.compile(  # not for a classroom
    r"\b(arsch|fick|fotze|hure|nutte|porn|schei[sß]|schlampe|selbstmord|sex|titten|vergewaltig|verpiss|wichs"
    r"|ass\b|asshole|bastard|bitch|cunt|fuck|penis|pussy|rap(e|ed|ing|ist)\b|shit|slut|suicid|tits|vagina|whore)",
    re.IGNORECASE,
)


def make_pairs(source: Path, target: Path, val: int = VALIDATION_PAIRS) -> None:
    """Write the short pairs of `source`, a line each, sorted; those for validation have a mark in a third column."""
    rows = [tuple(normalize("NFC", line).split("\t")) for line in read_sentences(source)]
    if not rows or any(len(row) != 2 for row in rows):
        raise DataError(f"{source} does not have two columns; expected German and English sentences")
    pairs = sorted({row for row in rows if all(is_suitable(text) for text in row)})
    sources, targets = [row[0] for row in pairs], [row[1] for row in pairs]
    held_out = choose_held_out_pairs(sources, targets, seed=0, share=val / len(pairs), key=reduce_to_words)
    lines = ["\t".join((*row, VALIDATION_MARK) if held else row) for row, held in zip(pairs, held_out, strict=True)]
    target.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def is_suitable(text: str) -> bool:
    return 0 < len(text.split()) <= MAX_WORDS and text.isprintable() and not LEFT_OUT.search(text)


def reduce_to_words(text: str) -> str:
    """Sentences that differ only in case, punctuation or spaces become equal."""
    return " ".join(re.findall(r"\w+", text.casefold()))


if __name__ == "__main__":
    make_pairs(Path(sys.argv[1]), TATOEBA_FILE)
