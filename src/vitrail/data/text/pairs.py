"""Open sentence pairs by name, folder or file: training, validation and test sentences of two languages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitrail.base.errors import DataError
from vitrail.base.text import format_count
from vitrail.data.text.pair_files import (
    EXPECTED_PAIRS,
    UNNAMED_COLUMNS,
    ChosenParts,
    PartFiles,
    choose_languages,
    choose_parts,
    find_pair_files,
)
from vitrail.data.text.reversal import REVERSAL_LANGUAGES, make_reversal
from vitrail.data.text.sentence_split import check_held_out_share, choose_held_out_pairs
from vitrail.data.text.tatoeba import TATOEBA_LANGUAGES, read_tatoeba

BUILT_IN_PAIRS = {"tatoeba": (TATOEBA_LANGUAGES, read_tatoeba), "reversal": (REVERSAL_LANGUAGES, make_reversal)}


@dataclass(frozen=True)
class SentencePairs:
    """Sentences of one language and their translations, at the same places."""

    sources: Sequence[str]
    targets: Sequence[str]
    name: str = ""

    def __len__(self) -> int:
        return len(self.sources)

    def source(self, index: int) -> str:
        return self.sources[index]

    def target(self, index: int) -> str:
        return self.targets[index]


@dataclass(frozen=True, kw_only=True)
class PairSplits:
    """Training, validation and test pairs, and notes for the user."""

    name: str
    languages: tuple[str, str]  # source, target
    train: SentencePairs
    val: SentencePairs  # empty if nothing is held out
    tests: Mapping[str, SentencePairs] = field(default_factory=dict[str, SentencePairs])  # by name: test_2016_flickr
    notes: tuple[str, ...] = ()

    @property
    def test(self) -> SentencePairs | None:
        """The first test set by name."""
        return self.tests[min(self.tests)] if self.tests else None


def open_pairs(
    data: str | Path | PairSplits, pair: str | None = None, *, seed: int = 0, val_share: float = 0.05
) -> PairSplits:
    """Open the pairs of a folder, of a file or of a name; `pair` is source and target: "de-en" or "en-de".

    A folder has train.de and train.en (or train.tsv), and if there are such files val, valid or dev, and test sets,
    all also as .gz. Without validation pairs, `val_share` of the pairs is held out, at most half: no sentence of them
    is in a training pair, so duplicates stay together. `pair` may be left out if there are only two languages; the
    source is then the first of them by name, or the first column.

    >>> pairs = open_pairs("tatoeba", "en-de")
    >>> pairs.languages, len(pairs.train), len(pairs.val)
    (('en', 'de'), 14581, 1000)
    """
    if isinstance(data, PairSplits):
        return data
    check_held_out_share(val_share)
    if isinstance(data, str) and data in BUILT_IN_PAIRS:
        return open_built_in(data, pair)
    try:
        where = Path(data).expanduser()
        parts = find_pair_files(where)
    except (OSError, ValueError, RuntimeError):  # a NUL in the name, a circular link, no home folder
        raise DataError(f"{data!s} cannot be opened; {EXPECTED_PAIRS}") from None
    chosen = choose_parts(parts, where) if where.is_dir() else ChosenParts(train=parts[0], val=None, tests=())
    languages, notes = name_languages(chosen.train, pair, where)
    notes += chosen.notes
    train = read_part(chosen.train, languages, notes)
    if chosen.val is not None:
        val = read_part(chosen.val, languages, notes)
    else:
        train, val = hold_out_pairs(train, seed=seed, share=val_share, notes=notes)
    tests = dict[str, SentencePairs]()
    for part in chosen.tests:
        if missing := part.find_missing(languages):
            notes.append(f"{part.name} has no {missing}: not used")
        else:
            tests[part.name] = read_part(part, languages, notes)
    return PairSplits(
        name=where.resolve().name, languages=languages, train=train, val=val, tests=tests, notes=tuple(notes)
    )


def open_built_in(name: str, pair: str | None) -> PairSplits:
    own, read = BUILT_IN_PAIRS[name]
    languages = choose_languages(pair, own, name)
    sides = (0, 1) if languages == own else (1, 0)
    train, val = (
        SentencePairs([row[sides[0]] for row in rows], [row[sides[1]] for row in rows], f"{name} ({part})")
        for part, rows in zip(("train", "val"), read(), strict=True)
    )
    return PairSplits(name=name, languages=languages, train=train, val=val)


def name_languages(train: PartFiles, pair: str | None, where: Path) -> tuple[tuple[str, str], list[str]]:
    """Source and target, and notes: the columns of a table whose name does not say are called as `pair` does."""
    if train.table is None or train.languages:
        return choose_languages(pair, train.languages, where), []
    if pair is None:
        return UNNAMED_COLUMNS, []
    source, target = languages = choose_languages(pair, (), where)
    note = (
        f"the columns of {train.table.name} are taken as {source} and {target}; to choose the direction by `pair`, "
        f"call the file {train.name}.{source}-{target}.tsv"
    )
    return languages, [note]


def read_part(part: PartFiles, languages: tuple[str, str], notes: list[str]) -> SentencePairs:
    """Read one part, and add its notes."""
    if missing := part.find_missing(languages):
        raise DataError(f"{part.describe()} has no {missing}; expected {' and '.join(languages)}")
    sources, targets, found = part.read(languages)
    if not sources:
        raise DataError(f"{part.describe()} has no pairs; expected sentences and their translations")
    notes += found
    return SentencePairs(sources, targets, part.name)


def hold_out_pairs(
    pairs: SentencePairs, *, seed: int, share: float, notes: list[str]
) -> tuple[SentencePairs, SentencePairs]:
    """Split training pairs into training and validation pairs, and note how many were held out."""
    held_out = choose_held_out_pairs(pairs.sources, pairs.targets, seed=seed, share=share)
    train, val = (
        SentencePairs(
            [each for each, held in zip(pairs.sources, held_out, strict=True) if held == part],
            [each for each, held in zip(pairs.targets, held_out, strict=True) if held == part],
            f"{pairs.name} ({name})",
        )
        for part, name in ((False, "train"), (True, "val"))
    )
    if len(val):
        notes.append(f"{format_count(len(val), 'pair')} of {len(pairs):,} held out for validation")
    elif share:
        notes.append("no pairs for validation: all of them share sentences")
    return train, val
