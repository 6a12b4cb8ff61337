"""Open tokenizer.json, a file that may be damaged or hostile: checked before the library reads it.

All functions raise ValueError with a one-line reason; callers add the name of the file.
"""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitrail.base.errors import describe_error
from vitrail.base.json_yaml import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE_MARK = "▁"  # U+2581, as in SentencePiece
CONTINUATION = "##"  # before a piece of WordPiece that continues a word
SPACES = rf"[\s{SPACE_MARK}]+"  # a mark in the text is read as a space
WORDS = (
    rf"{SPACE_MARK}?[\p{{L}}\p{{M}}\p{{N}}]+(?:['’][\p{{L}}\p{{M}}]+)*"  # letters and digits; ist's is one word
    rf"|{SPACE_MARK}?[^\p{{L}}\p{{M}}\p{{N}}{SPACE_MARK}]|{SPACE_MARK}"  # one other character
)
MAX_JSON_LENGTH = 2**24  # characters
MAX_JSON_VALUES = 2**21  # 37,000 pieces of BPE have 150,000
MAX_VOCABULARY = 2**20
MAX_PARTS = 8  # of a normalizer or decoder
MAX_REPLACEMENTS = 2  # each can make a text twice as long, if its pattern matches between the letters
MAX_ADDED_TOKENS = 2**16
MAX_WORD_LENGTH = 2**8  # characters of a word that WordPiece divides, in a time that grows with their cube
MAX_PATTERN_LENGTH = 1000  # characters of a regular expression
MAX_PATTERN_CHOICES = 64  # ways in which the bounded repeats of an alternative can match
# One character or class of a regular expression, perhaps repeated; ^, $, or one character that follows.
PATTERN_PART = re.compile(
    r"""(?:[\^$]|\(\?[!=](?:\\[sSdDwW]|[^\\()\[\]{}?*+|^$])\)
    |(?:\\[sSdDwWrnt]|\\[pP]\{\^?\w+\}|\\\W|\[\^?(?:\\.|[^\\\[\]&]|&(?!&))+\]|[^\\()\[\]{}?*+|^$])
    (?P<repeat>[?*+]|\{(?P<least>\d{1,2})(?P<comma>,(?P<most>\d{1,2})?)?\})?)""",
    re.VERBOSE | re.DOTALL,
)
TOP_LEVEL_PART = re.compile(r"\\.|\[(?:\\.|[^\\\]])*\]|.", re.DOTALL)  # what | is not looked for in
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
KNOWN_ALTERNATIVES = (  # of our own pattern and of public ones (Llama 3, GPT-4, BLOOM and others), which end soon
    *WORDS.split("|"),
    *(ENDINGS, "'(?i:[sdmt]|ll|ve|re)", "(?:'([sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))"),
    *(r"\s*[\r\n]+", r"(?=(\d{3})+(?!\d))", " ?[^(\\s|[.,!?…。，、।۔،])]+"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{cases}" for cases in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{cases}{ENDINGS}?" for cases in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")),
)
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
    data = parse_json(text, MAX_JSON_VALUES)
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise ValueError("it has no `model`; expected the file of a tokenizer")  # noqa: TRY004  # callers expect it
    count = check_vocabulary(data)
    for name, known in KNOWN_PARTS.items():
        check_parts(data.get(name), name, known)
    if data["model"].get("dropout"):
        raise ValueError("its model has dropout; expected one that encodes a text in one way")
    if data["model"].get("type") == "BPE" and data["model"].get("continuing_subword_prefix"):
        raise ValueError("its model has a prefix for pieces, which is not supported with BPE")
    longest = data["model"].get("max_input_chars_per_word", 0)
    if data["model"].get("type") == "WordPiece" and not (isinstance(longest, int) and longest <= MAX_WORD_LENGTH):
        raise ValueError(f"its model divides words of {longest!r} characters; expected at most {MAX_WORD_LENGTH}")
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
    if len(added) > MAX_ADDED_TOKENS:
        raise ValueError(f"it has {len(added):,} added tokens; expected at most {MAX_ADDED_TOKENS:,}")
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
        if name == "decoder" and each["type"] == "Strip" and each.get("stop") != 0:
            raise ValueError("its decoder strips the ends of tokens, which fails for short ones; expected a stop of 0")
    for each in list_objects(part):
        for key, most in ADDED_TEXT.items():
            if isinstance(each.get(key), str) and len(each[key]) > most and name != "model":
                raise ValueError(f"its {name} has a {key} of {len(each[key])} characters; expected at most {most}")
        if isinstance(each.get("Regex"), str):
            check_pattern(each["Regex"], name)


def check_pattern(pattern: str, name: str) -> None:
    """Refuse a regular expression that may take a time that is more than quadratic in the length of a text.

    An alternative is a known one, or a sequence of characters and classes of which one is repeated without a bound.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(f"its {name} has a pattern of {len(pattern)} characters")
    for alternative in split_alternatives(pattern):
        if alternative not in KNOWN_ALTERNATIVES and not is_simple_sequence(alternative):
            raise ValueError(
                f"its {name} has the pattern {alternative[:60]!r}, which may take very long; "
                "expected characters and classes, only one of them repeated without a bound"
            )


def split_alternatives(pattern: str) -> list[str]:
    """The parts between | outside of groups and classes."""
    found, depth = [""], 0
    for part in TOP_LEVEL_PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append("")
        else:
            found[-1] += part
    return found


def is_simple_sequence(alternative: str) -> bool:
    """Whether it is a sequence of characters and classes, with one unbounded repeat and few choices among bounded."""
    end, unbounded, choices = 0, 0, 1
    while end < len(alternative):
        part = PATTERN_PART.match(alternative, end)
        if part is None:
            return False
        end = part.end()
        if part["repeat"] in ("*", "+") or (part["comma"] and not part["most"]):
            unbounded += not (part["repeat"] == "*" and end == len(alternative))  # the last one always matches
        elif part["repeat"] == "?":
            choices *= 2
        elif part["comma"]:
            choices *= max(1, int(part["most"]) - int(part["least"]) + 1)
    return unbounded <= 1 and choices <= MAX_PATTERN_CHOICES


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
