"""Text to tokens and back: BPE and WordPiece, trained or loaded, around the library `tokenizers` (extra `text`).

In what we train, a space becomes part of the word that follows it, as the mark ▁, and no piece reaches from a word into
punctuation: "Ja, das ist's." → ▁Ja , ▁das ▁ist's . These are the words that BPE and WordPiece divide into pieces.
"""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    describe_error,
    missing_package_error,
    unknown_name_error,
)
from vitrail.base.files import read_text
from vitrail.data.text.tokenizer_json import (
    CONTINUATION,
    MAX_JSON_LENGTH,
    MAX_VOCABULARY,
    SPACE_MARK,
    SPACES,
    WORDS,
    convert_library_errors,
    parse_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import Model

PAD, START, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # by their ids
PARALLELISM = "TOKENIZERS_PARALLELISM"


def check_tokenizers_installed() -> None:
    try:
        import tokenizers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise missing_package_error("text", "tokenizers", "text") from None


def assemble_tokenizer(model: "Model") -> "Tokenizer":
    """A tokenizer of ours around a model; what it encodes is decoded to the same text."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(SPACES), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(SPACE_MARK), pre_tokenizers.Split(Regex(WORDS), "isolated")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"^{CONTINUATION}"), ""), decoders.Metaspace(SPACE_MARK)]
        if type(model).__name__ == "WordPiece"
        else [decoders.Metaspace(SPACE_MARK)]
    )
    return tokenizer


def assemble_bert_tokenizer(vocabulary: dict[str, int], *, lower: bool) -> "Tokenizer":
    """BERT's own tokenizer: spaces and punctuation divide words, accents are removed with the upper case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(CONTINUATION, cleanup=True)
    tokenizer.add_special_tokens(
        [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocabulary]
    )
    return tokenizer


def train_bpe_tokenizer(texts: list[str], vocabulary: int) -> "Tokenizer":
    from tokenizers import models, trainers

    tokenizer = assemble_tokenizer(models.BPE(unk_token=SPECIAL_TOKENS[UNKNOWN]))
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=[*SPECIAL_TOKENS], show_progress=False
    )
    with disable_parallelism():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_wordpiece_tokenizer(texts: list[str], vocabulary: int) -> "Tokenizer":
    """Train WordPiece, reproducibly.

    The library numbers the single characters that continue words in the order of a hash table, which differs from run
    to run, and pairs of equal frequency are merged in the order of these numbers. Given as special tokens, the
    characters have fixed numbers.
    """
    from tokenizers import models, trainers

    def assemble(words: dict[str, int] | None = None) -> "Tokenizer":
        return assemble_tokenizer(
            models.WordPiece(words, unk_token=SPECIAL_TOKENS[UNKNOWN], max_input_chars_per_word=200)
        )

    tokenizer = assemble()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *list_continuations(tokenizer, texts)],
        show_progress=False,
        continuing_subword_prefix=CONTINUATION,
    )
    with disable_parallelism():
        tokenizer.train_from_iterator(texts, trainer)
    trained = assemble(tokenizer.get_vocab())
    trained.add_special_tokens([*SPECIAL_TOKENS])
    return trained


def list_continuations(tokenizer: "Tokenizer", texts: list[str]) -> list[str]:
    """The characters that continue a word somewhere in the texts, with their prefix, sorted."""
    normalize, divide = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    chunks = {chunk for text in texts for chunk in normalize(text).split(" ")}
    letters = {letter for chunk in chunks for word, _ in divide(chunk) for letter in word[1:]}
    return [f"{CONTINUATION}{letter}" for letter in sorted(letters)]


@contextmanager
def disable_parallelism() -> Generator[None]:
    """Train in one thread, unless the user has chosen: the library warns at every fork after it has used several."""
    chosen = os.environ.get(PARALLELISM)
    os.environ.setdefault(PARALLELISM, "false")
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(PARALLELISM, None)


# In the order in which they are looked for: our own names, then BERT's and others'.
SPECIAL_NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "start": ("<s>", "[CLS]", "<bos>"),
    "end": ("</s>", "[SEP]", "<eos>"),
    "unknown": ("<unk>", "[UNK]"),
}
TRAINERS = {"bpe": train_bpe_tokenizer, "wordpiece": train_wordpiece_tokenizer}
WORD_MARKS = (SPACE_MARK, "Ġ")  # Ġ is the space of byte-level BPE
SHOWN_SPACE = "␣"  # a piece that is a space only


@dataclass(frozen=True)
class Piece:
    """A token of a text as shown to people, and where it is: text[start:end]."""

    text: str
    id: int
    start: int
    end: int
    starts_word: bool


class TextTokenizer:
    """Encodes sentences as ids and decodes them. The ids of its special tokens are `pad`, `start`, `end`, `unknown`.

    What we train decodes to the text that was encoded, in NFC, with one space for every run of white space and none
    at the ends; a character that is in no training text becomes an unknown token, with WordPiece its whole word.
    Special tokens are made from text only if `encode` is asked for them: otherwise "</s>" is five characters.
    """

    def __init__(self, tokenizer: "Tokenizer", where: str = "the tokenizer") -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True
        ids = tokenizer.get_vocab()
        found = {
            role: next((ids[name] for name in names if name in ids), None) for role, names in SPECIAL_NAMES.items()
        }
        for role, names in SPECIAL_NAMES.items():
            if found[role] is None:
                raise CheckpointError(f"{where} has no token for `{role}`; expected {' or '.join(names)}")
        self.pad, self.start, self.end, self.unknown = (found[role] or 0 for role in SPECIAL_NAMES)
        self.vocabulary = tokenizer.get_vocab_size()

    @classmethod
    def train(cls, kind: str, texts: Iterable[str], vocabulary: int) -> "TextTokenizer":
        """Train a tokenizer of at most `vocabulary` tokens on texts, those of both languages for a joint vocabulary.

        `kind` is "bpe" or "wordpiece". The same texts give the same tokenizer, byte for byte.
        """
        check_tokenizers_installed()
        if kind not in TRAINERS:
            raise unknown_name_error("kind of tokenizer", kind, TRAINERS)
        if not 0 < vocabulary <= MAX_VOCABULARY:
            raise ConfigError(f"`vocabulary` is {vocabulary}; expected 1 to {MAX_VOCABULARY:,} tokens")
        listed = [*texts]
        if not any(text.strip() for text in listed):
            raise DataError("there is no text to train a tokenizer on; expected at least one sentence")
        check_unicode(listed)
        trained = TRAINERS[kind](listed, vocabulary)
        if (size := trained.get_vocab_size()) > vocabulary:
            raise ConfigError(
                f"`vocabulary` is {vocabulary}, but the different characters of the texts alone are {size} tokens; "
                f"expected more than {size}"
            )
        return cls(trained)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], vocabulary: int) -> "TextTokenizer":
        """Byte-pair encoding (Sennrich, 2016): the most frequent pair of neighbors is merged, again and again."""
        return cls.train("bpe", texts, vocabulary)

    @classmethod
    def train_wordpiece(cls, texts: Iterable[str], vocabulary: int) -> "TextTokenizer":
        """The longest pieces of a word, from its beginning; pieces that continue a word have the prefix ##."""
        return cls.train("wordpiece", texts, vocabulary)

    @classmethod
    def load(cls, path: str | Path, *, lower: bool | None = None) -> "TextTokenizer":
        """Read tokenizer.json, or vocab.txt in BERT's layout, where a token's id is its line.

        `lower` is for vocab.txt: whether text is converted to lower case. None: if no token has an upper-case letter.
        """
        check_tokenizers_installed()
        file = Path(path)
        try:
            text = read_text(file, 4 * MAX_JSON_LENGTH)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} cannot be read: {describe_error(error)}; expected tokenizer.json or vocab.txt"
            ) from None
        if file.suffix == ".txt":
            return cls(load_bert_vocabulary(text, str(file), lower), str(file))
        if lower is not None:
            raise ConfigError(f"`lower` is for a vocab.txt, but {file} says itself how it treats upper case")
        return cls.from_json(text, str(file))

    @classmethod
    def from_json(cls, text: str, where: str = "tokenizer.json") -> "TextTokenizer":
        """Parse the result of `to_json`, or another tokenizer.json."""
        check_tokenizers_installed()
        try:
            return cls(parse_tokenizer(text), where)
        except ValueError as error:
            raise CheckpointError(
                f"{where} is not a usable tokenizer: {describe_error(error)}; restore the file"
            ) from None

    def to_json(self) -> str:
        """The contents of tokenizer.json."""
        return self.tokenizer.to_str(pretty=False) + "\n"

    def encode(self, texts: Sequence[str], *, special_tokens: bool = False) -> list[list[int]]:
        """The ids of each text; with `special_tokens` as BERT reads it, [MASK] as one token and [CLS] … [SEP] around.

        Without them, which is how translations are read, a text cannot end itself or contain padding.
        """
        if isinstance(texts, str):
            raise ConfigError("encode got one text; expected a list of texts")
        check_unicode(texts)
        tokenizer, around = (self.special_tokenizer, 1) if special_tokens else (self.tokenizer, 0)
        encode = tokenizer.encode  # one at a time is as fast as a batch in one thread, and starts no threads
        first, last = [self.start] * around, [self.end] * around
        try:
            with convert_library_errors():
                return [[*first, *encode(text, add_special_tokens=False).ids, *last] for text in texts]
        except ValueError as error:
            raise CheckpointError(f"the tokenizer failed: {describe_error(error)}; restore its file") from None

    @cached_property
    def special_tokenizer(self) -> "Tokenizer":
        """The same, but special tokens in a text are read as such."""
        other = type(self.tokenizer).from_str(self.to_json())
        other.encode_special_tokens = False
        return other

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; padding, start and end are left out, and an unknown token is written by its name."""
        kept = [each for each in ids if each not in (self.pad, self.start, self.end)]
        for each in kept:
            self.check_id(each)
        return self.run_decoder(kept, skip_special=False)

    def run_decoder(self, ids: list[int], *, skip_special: bool) -> str:
        try:
            with convert_library_errors():
                return self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        except ValueError as error:
            raise CheckpointError(f"the tokenizer failed: {describe_error(error)}; restore its file") from None

    def pieces(self, text: str) -> list[Piece]:
        """The tokens of a text with their places in it, without spaces at their ends."""
        self.encode([text])  # for its errors
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [*(start for start, _ in encoding.offsets), len(text)]
        pieces = list[Piece]()
        for number, token in enumerate(encoding.ids):
            start, end = starts[number], starts[number + 1]  # an accent of its own belongs to the letter before it
            part = text[start:end]
            last = start + len(part.rstrip())
            first = min(start + len(part) - len(part.lstrip()), last)
            if first == last:  # a piece that is a space only
                first, last = start, end
            if token == self.unknown:
                begins = not first or text[first - 1].isspace()
                pieces.append(Piece(text[first:last], token, first, last, begins))
            else:
                pieces.append(Piece(self.show_token(token), token, first, last, self.starts_word(token)))
        return pieces

    def show_token(self, token: int) -> str:
        """A token as shown to people: without the marks for spaces and continued words."""
        self.check_id(token)
        if token in (self.pad, self.start, self.end, self.unknown):
            return self.names[token]
        return self.run_decoder([token], skip_special=True).removeprefix(CONTINUATION).strip() or SHOWN_SPACE

    def starts_word(self, token: int) -> bool:
        """Whether a token begins a word, so that it is written after a space."""
        name = self.names[token]
        return name.startswith(WORD_MARKS) if self.marks_spaces else not name.startswith(CONTINUATION)

    @cached_property
    def names(self) -> list[str]:
        """The tokens as they are in the vocabulary, by id."""
        return [name for name, _ in sorted(self.tokenizer.get_vocab().items(), key=lambda each: each[1])]

    @cached_property
    def marks_spaces(self) -> bool:
        return any(name.startswith(WORD_MARKS) for name in self.names)

    def check_id(self, token: int) -> None:
        if not 0 <= token < self.vocabulary:
            raise ConfigError(f"token {token} is not in the vocabulary; expected 0 to {self.vocabulary - 1}")


def load_bert_vocabulary(text: str, where: str, lower: bool | None) -> "Tokenizer":
    if (count := text.count("\n")) > MAX_VOCABULARY:
        raise CheckpointError(f"{where} has {count:,} lines; expected one token per line, at most {MAX_VOCABULARY:,}")
    names = text.removesuffix("\n").split("\n")
    ids = {name: number for number, name in enumerate(names)}
    if len(ids) < len(names):
        twice = next(name for number, name in enumerate(names) if ids[name] != number)
        raise CheckpointError(f"{where} has {twice[:40]!r} twice; expected one token per line, each once")
    if "[UNK]" not in ids:
        raise CheckpointError(f"{where} has no [UNK]; expected a vocabulary in BERT's layout")
    if lower is None:
        lower = not any(letter.isupper() for name in names if not name.startswith("[") for letter in name)
    try:
        with convert_library_errors():
            return assemble_bert_tokenizer(ids, lower=lower)
    except ValueError as error:
        raise CheckpointError(f"{where} is not a usable vocabulary: {describe_error(error)}") from None


def check_unicode(texts: Sequence[Any]) -> None:
    """Raise an error for what is not text, and for a text with half of a surrogate pair, which is not Unicode."""
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ConfigError(f"text {number} is a {type(text).__name__}; expected a string")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"text {number}, {text[:40]!r}, is not Unicode; expected text in UTF-8") from None
