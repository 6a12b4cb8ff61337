"""The bundled sentence pairs: German–English from Tatoeba, 14,581 for training and 1,000 for validation.

Pairs of at most six words in each language. A pair for validation shares no sentence with a training pair in either
language; upper case and punctuation do not count as a difference. Sentences that differ in one word can be in both
parts. The sentences are by the contributors of Tatoeba; licence and attribution are next to the file.
"""

from pathlib import Path

from vitrail.data.text.text_files import read_sentences

TATOEBA_FILE = Path(__file__).parent / "pairs.tsv.gz"  # two columns, and a third one with `val` for validation
TATOEBA_LANGUAGES = ("de", "en")
VALIDATION_MARK = "val"


def read_tatoeba(path: Path = TATOEBA_FILE) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and validation pairs: (German, English)."""
    rows = [line.split("\t") for line in read_sentences(path)]
    train, val = ([(row[0], row[1]) for row in rows if (VALIDATION_MARK in row[2:]) == held] for held in (False, True))
    return train, val
