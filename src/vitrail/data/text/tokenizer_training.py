"""Train tokenizers: how text is normalized and cut into words, and how pieces become text again.

A space becomes part of the word that follows it, as the mark ▁, and no piece reaches from a word into punctuation:
"Ja, das ist's." → ▁Ja , ▁das ▁ist's . These are the words that BPE and WordPiece divide into pieces.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vitrail.base.errors import missing_package_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import Model

PAD, START, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # by their ids


SPACE_MARK = "▁"  # U+2581, as in SentencePiece
CONTINUATION = "##"  # before a piece of WordPiece that continues a word
SPACES = rf"[\s{SPACE_MARK}]+"  # a mark in the text is read as a space
WORDS = (
    rf"{SPACE_MARK}?[\p{{L}}\p{{M}}\p{{N}}]+(?:['’][\p{{L}}\p{{M}}]+)*"  # letters and digits; ist's is one word
    rf"|{SPACE_MARK}?[^\p{{L}}\p{{M}}\p{{N}}{SPACE_MARK}]|{SPACE_MARK}"  # one other character
)
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
    normalise, divide = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    chunks = {chunk for text in texts for chunk in normalise(text).split(" ")}
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
