"""Open sentence pairs by name, folder or file: training, validation and test sentences of two languages.

Files are train.de and train.en, or train.tsv with two columns, also as .gz. The pairs called `reversal` are generated:
rows of digits and the same digits in reverse, for which the right attention is known.

Those called `tatoeba` are bundled: German–English, at most six words per sentence. A pair for validation shares no
sentence with a training pair; upper case and punctuation do not count as a difference. The sentences are by the
contributors of Tatoeba; license and attribution are next to the file. Those called `multi30k` are downloaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitrail.base.errors import ConfigError, DataError, describe_error, find_nearest_name
from vitrail.base.files import suggest_sibling
from vitrail.base.text import abbreviate_list, format_count
from vitrail.data.public.catalog import find_public_dataset
from vitrail.data.public.download import fetch_dataset
from vitrail.data.rng import make_view_keys, uniform_randoms
from vitrail.data.text.text_files import read_sentences, read_text_lines
from vitrail.data.validation_split import check_held_out_share, choose_held_out_pairs

TATOEBA_FILE = Path(__file__).parent / "tatoeba/pairs.tsv.gz"  # a third column has `val` for validation
TATOEBA_LANGUAGES = ("de", "en")
VALIDATION_MARK = "val"
REVERSAL_LANGUAGES = ("digits", "reversed")
MIN_DIGITS, MAX_DIGITS = 4, 12
REVERSAL_TRAIN, REVERSAL_VAL = 8000, 500  # pairs
PART_NAMES = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
LANGUAGE = re.compile(r"[a-z]{2,3}(?:[_-][A-Za-z0-9]{2,8})?")  # de, deu, pt_BR, zh-Hans
NOT_LANGUAGES = ("bz2", "cfg", "csv", "doc", "gz", "md", "pdf", "py", "sh", "tar", "tsv", "txt", "xml", "xz", "zip")
COLUMNS_IN_NAME = re.compile(r"(?:.*[._])?([a-z]{2,3})-([a-z]{2,3})")  # deu-eng.tsv, train.de-en.tsv
UNNAMED_COLUMNS = ("source", "target")
EXPECTED_PAIRS = (
    "expected 'tatoeba', 'reversal', 'multi30k', a folder with train.de and train.en (any two languages) or with "
    "train.tsv, their common beginning, or a .tsv file"
)


def read_tatoeba(path: Path = TATOEBA_FILE) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and validation pairs: (German, English)."""
    rows = [line.split("\t") for line in read_sentences(path)]
    train, val = ([(row[0], row[1]) for row in rows if (VALIDATION_MARK in row[2:]) == held] for held in (False, True))
    return train, val


def make_reversal() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Different pairs for training and validation, such as ("3 1 4 1", "1 4 1 3"): always the same ones."""
    needed = REVERSAL_TRAIN + REVERSAL_VAL
    numbers = uniform_randoms(make_view_keys(0, 0, np.arange(2 * needed), 0), 1 + MAX_DIGITS)
    lengths = MIN_DIGITS + (numbers[:, 0] * (MAX_DIGITS + 1 - MIN_DIGITS)).astype(np.int64)
    digits = (numbers[:, 1:] * 10).astype(np.int64)
    rows = [tuple(map(str, row[:length])) for row, length in zip(digits.tolist(), lengths.tolist(), strict=True)]
    pairs = [(" ".join(row), " ".join(reversed(row))) for row in dict.fromkeys(rows)][:needed]
    return pairs[REVERSAL_VAL:], pairs[:REVERSAL_VAL]


@dataclass(frozen=True, kw_only=True)
class PartFiles:
    """The files of one part of the data, such as `train`: one per language, or a table with a column per language."""

    name: str
    by_language: Mapping[str, Path] = field(default_factory=dict[str, Path])
    table: Path | None = None

    @property
    def languages(self) -> tuple[str, ...]:
        if self.table is None:
            return tuple(sorted(self.by_language))
        named = COLUMNS_IN_NAME.fullmatch(strip_suffixes(self.table.name))
        return (named[1], named[2]) if named else ()

    def describe(self) -> str:
        """The files, for messages."""
        return abbreviate_list([str(path) for path in ([self.table] if self.table else self.by_language.values())])

    def find_missing(self, languages: tuple[str, str]) -> str | None:
        """The first of two languages that the part does not have; the columns of a table may have no names."""
        return next((each for each in languages if self.languages and each not in self.languages), None)

    def read(self, languages: tuple[str, str]) -> tuple[list[str], list[str], list[str]]:
        """Sentences of both languages, line by line, and notes; pairs with an empty line are left out."""
        if self.table is not None:
            sources, targets, notes = read_table(self.table)
            if self.languages == languages[::-1]:
                sources, targets = targets, sources
        else:
            first, second = (self.by_language[language] for language in languages)
            sources, targets, notes = read_sentences(first), read_sentences(second), list[str]()
            if len(sources) != len(targets):
                raise DataError(
                    f"{first} has {format_count(len(sources), 'line')} and {second.name} {len(targets):,}; expected "
                    "the same number: line by line, one is the translation of the other"
                )
        kept = [(source, target) for source, target in zip(sources, targets, strict=True) if source and target]
        if empty := len(sources) - len(kept):
            notes.append(f"{self.name}: {format_count(empty, 'pair')} with an empty line left out")
        return [source for source, _ in kept], [target for _, target in kept], notes


def read_table(path: Path) -> tuple[list[str], list[str], list[str]]:
    """The first two columns of a tab-separated file, and notes."""
    lines = read_text_lines(path)
    rows = [line.split("\t", 2) for line in lines]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 and row[0].strip():
            raise DataError(
                f"line {number} of {path} has one column; expected two, a sentence and its translation, with a tab "
                "between them"
            )
    rows = [row if len(row) > 1 else ["", ""] for row in rows]
    widest = 1 + max((line.count("\t") for line in lines), default=0)
    notes = [f"{path.name} has {widest} columns; the first two are used"] if widest > 2 else []
    return [row[0].strip() for row in rows], [row[1].strip() for row in rows], notes


def find_pair_files(path: Path) -> list[PartFiles]:
    """The parts that a path names: those of a folder, a single table, or the files that begin with it."""
    if path.is_dir():
        return list_parts(path)
    if path.name.removesuffix(".gz").endswith(".tsv"):
        return [PartFiles(name="train", table=path)]  # errors name the file when it is read
    if path.exists():
        raise DataError(f"{path} is one file; {EXPECTED_PAIRS}")
    parts = [part for part in list_parts(path.parent) if part.name == path.name] if path.parent.is_dir() else []
    if not parts:
        nearest = find_nearest_name(path.name, ("tatoeba", "reversal"))
        hint = f": did you mean {nearest!r}?" if nearest else suggest_sibling(path)
        raise DataError(f"{path} does not exist; {EXPECTED_PAIRS}{hint}")
    return parts


def list_parts(folder: Path) -> list[PartFiles]:
    """All parts in a folder by the names of their files, sorted; a plain file comes before its .gz."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {describe_error(error)}; {EXPECTED_PAIRS}") from None
    found, tables = dict[str, dict[str, Path]](), dict[str, Path]()
    for name in names:
        stem, dot, suffix = name.removesuffix(".gz").rpartition(".")
        if dot and stem and suffix == "tsv":
            named = COLUMNS_IN_NAME.fullmatch(stem)
            part = stem[: named.start(1) - 1] if named and named.start(1) > 1 else stem
            tables.setdefault(part, folder / name)
        elif dot and stem and LANGUAGE.fullmatch(suffix) and suffix not in NOT_LANGUAGES:
            found.setdefault(stem, {}).setdefault(suffix, folder / name)
    return [
        *(PartFiles(name=stem, by_language=files) for stem, files in found.items()),
        *(PartFiles(name=stem, table=path) for stem, path in tables.items() if stem not in found),
    ]


@dataclass(frozen=True, kw_only=True)
class ChosenParts:
    """What the parts of a folder are used for."""

    train: PartFiles
    val: PartFiles | None
    tests: tuple[PartFiles, ...]
    notes: tuple[str, ...] = ()


def choose_parts(parts: list[PartFiles], where: Path) -> ChosenParts:
    """The training, validation and test parts among the files of a folder.

    Without a part called `train`, the only one that is complete and neither validation nor test is used.
    """
    trains, vals, tests = (
        [part for part in parts if re.fullmatch(rf"({'|'.join(names)})([._-].*)?", part.name, re.IGNORECASE)]
        for names in PART_NAMES.values()
    )
    others = [part for part in parts if part not in (*trains, *vals, *tests)]
    others = [part for part in others if part.table or len(part.by_language) > 1]
    train, val = choose_one(trains or others, "training", where), choose_one(vals, "validation", where)
    if train is None:
        raise DataError(f"{where} has no training pairs; {EXPECTED_PAIRS}")
    notes = tuple(f"{part.name} is not used" for part in (*trains, *vals) if part not in (train, val))
    return ChosenParts(train=train, val=val, tests=tuple(tests), notes=notes)


def choose_one(parts: list[PartFiles], what: str, where: Path) -> PartFiles | None:
    """The only part, or the only one that is called by a plain word of its kind, such as train."""
    plain = [part for part in parts if part.name.lower() in sum(PART_NAMES.values(), ())]
    if len(parts) > 1 and len(plain) != 1:
        listed = abbreviate_list([part.name for part in parts])
        raise DataError(f"{where} has several {what} parts ({listed}); expected one: give their beginning as `data`")
    return (plain if len(parts) > 1 else [*parts, None])[0]


def choose_languages(pair: str | None, available: tuple[str, ...], where: object) -> tuple[str, str]:
    """The languages of `pair`, such as de-en: source and target. None: the only two that there are, by name."""
    listed = ", ".join(available)
    if pair is None:
        if len(available) != 2:
            raise ConfigError(
                f"{where} has {format_count(len(available), 'language')} ({listed}); set `pair` to source and target, "
                f"for example {'-'.join(available[:2])}"
                if len(available) > 1
                else f"{where} has files of one language ({listed}); expected those of two"
            )
        return available[0], available[1]
    splits = [(pair[:place], pair[place + 1 :]) for place, letter in enumerate(pair) if letter == "-"]
    splits = [(source, target) for source, target in splits if source and target]
    if not splits:
        raise ConfigError(f"`pair` is {pair!r}; expected source and target, for example de-en")
    languages = next((each for each in splits if set(each) <= set(available)), splits[0])
    if languages[0] == languages[1]:
        raise ConfigError(f"`pair` {pair} has one language twice; expected two different ones, for example de-en")
    if missing := [each for each in languages if available and each not in available]:
        raise ConfigError(f"`pair` is {pair}, but {where} has no {missing[0]}; it has {listed}")
    return languages


def strip_suffixes(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".tsv")


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
    public = find_public_dataset(data)
    try:
        where = fetch_dataset(public) if public is not None and public.is_text else Path(data).expanduser()
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
