"""Open tokenizer.json, a file that may be damaged or hostile: checked before the library reads it.

All functions raise ValueError with a one-line reason; callers add the name of the file.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitrail.errors import describe_error
from vitrail.json_yaml import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_JSON_LENGTH = 2**24  # characters
MAX_JSON_VALUES = 2**21  # 37,000 pieces of BPE have 150,000
MAX_VOCABULARY = 2**20
MAX_PARTS = 8  # of a normalizer or decoder
MAX_REPLACEMENTS = 2  # each can make a text twice as long, if its pattern matches between the letters
MAX_PATTERN_LENGTH = 1000  # characters of a regular expression
KNOWN_PARTS = {
    "model": ("BPE", "WordPiece", "WordLevel", "Unigram"),
    "normalizer": (
        *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence", "Strip"),
        "StripAccents",
    ),
    "pre_tokenizer": (
        *("BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Sequence", "Split", "Whitespace"),
        "WhitespaceSplit",
    ),
    "decoder": (
        *("BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece"),
    ),
}
UNUSED_PARTS = ("post_processor", "truncation", "padding")  # special tokens and padding are added by the batches
ADDED_TEXT = {"content": 1, "prepend": 1, "replacement": 1, "prefix": 8, "suffix": 8}  # most characters


def parse_tokenizer(text: str) -> "Tokenizer":
    """The tokenizer in a JSON text."""
    import json

    from tokenizers import Tokenizer

    if len(text) > MAX_JSON_LENGTH:
        raise ValueError(f"it has {len(text):,} characters; expected at most {MAX_JSON_LENGTH:,}")
    try:
        data = parse_json(text, MAX_JSON_VALUES)
    except RecursionError as error:
        raise ValueError(describe_error(error)) from None
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise ValueError("it has no `model`; expected the file of a tokenizer")  # noqa: TRY004  # callers expect it
    count = check_vocabulary(data)
    for name, known in KNOWN_PARTS.items():
        check_parts(data.get(name), name, known)
    if data["model"].get("dropout"):
        raise ValueError("its model has dropout; expected one that encodes a text in one way")
    if data["model"].get("type") == "BPE" and data["model"].get("continuing_subword_prefix"):
        raise ValueError("its model has a prefix for pieces, which is not supported with BPE")
    with convert_library_errors():
        tokenizer = Tokenizer.from_str(json.dumps({**data, **dict.fromkeys(UNUSED_PARTS)}))
        tokenizer.encode_special_tokens = True  # `</s>` in a text is text
        tokenizer.decode(tokenizer.encode("a b").ids)
        if tokenizer.get_vocab_size() != count:
            raise ValueError(f"it has {tokenizer.get_vocab_size()} tokens; expected {count}, as listed")
    return tokenizer


def check_vocabulary(data: dict[str, Any]) -> int:
    """The number of tokens, if their ids are 0 to the last without a gap and without one id for two tokens."""
    found, added = data["model"].get("vocab"), data.get("added_tokens", [])
    if isinstance(found, list):  # Unigram
        found = {row[0]: number for number, row in enumerate(found) if isinstance(row, list) and row}
    if not isinstance(found, dict) or not isinstance(added, list):
        raise ValueError("it has no vocabulary; expected tokens with their ids")  # noqa: TRY004  # callers expect it
    ids: dict[Any, Any] = {**found}
    for each in added:
        if not isinstance(each, dict) or not isinstance(each.get("content"), str):
            raise ValueError("one of its added tokens has no content")  # noqa: TRY004  # callers expect it
        if ids.setdefault(each["content"], each.get("id")) != each.get("id"):
            raise ValueError(f"its token {each['content'][:40]!r} has two ids")
    if not 0 < len(ids) <= MAX_VOCABULARY:
        raise ValueError(f"it has {len(ids):,} tokens; expected 1 to {MAX_VOCABULARY:,}")
    if any(type(each) is not int for each in ids.values()) or {*ids.values()} != {*range(len(ids))}:
        raise ValueError(f"its ids are not 0 to {len(ids) - 1:,}, one per token")
    return len(ids)


def check_parts(part: Any, name: str, known: tuple[str, ...]) -> None:
    """Refuse parts that make a text much longer: a few lines of a hostile file could make it grow without end."""
    parts = [each for each in list_objects(part) if "type" in each]
    if len(parts) > MAX_PARTS:
        raise ValueError(f"its {name} has {len(parts)} parts; expected at most {MAX_PARTS}")
    if sum(each["type"] in ("Replace", "Prepend") for each in parts) > MAX_REPLACEMENTS:
        raise ValueError(f"its {name} replaces text more than {MAX_REPLACEMENTS} times")
    for each in parts:
        if each["type"] not in known:
            raise ValueError(f"its {name} {str(each['type'])[:40]!r} is not supported; expected {', '.join(known)}")
    for each in list_objects(part):
        for key, most in ADDED_TEXT.items():
            if isinstance(each.get(key), str) and len(each[key]) > most and name != "model":
                raise ValueError(f"its {name} has a {key} of {len(each[key])} characters; expected at most {most}")
        if isinstance(each.get("Regex"), str) and len(each["Regex"]) > MAX_PATTERN_LENGTH:
            raise ValueError(f"its {name} has a pattern of {len(each['Regex'])} characters")


def list_objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a part but the vocabulary: a part, those of a sequence, and their patterns."""
    if isinstance(value, dict):
        yield value
        for key, each in value.items():
            if key not in ("vocab", "merges"):
                yield from list_objects(each)
    elif isinstance(value, list):
        for each in value:
            yield from list_objects(each)


@contextmanager
def convert_library_errors() -> Generator[None]:
    """Turn errors of the library into a ValueError; a panic of its Rust code is not even an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(describe_error(error)) from None
