"""tokenizer.json: damaged and hostile files give one line."""

import json
import random
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest

from vitrail.base.errors import CheckpointError, VitrailError
from vitrail.data.text import tokenizer_json
from vitrail.data.text.tokenizer import TextTokenizer

pytest.importorskip("tokenizers")
TEXTS = ["low low low lower newest widest", "Ein Hund, der läuft."] * 3
SAMPLE = "lower Hund 漢 </s>"


@pytest.fixture(scope="module", params=["bpe", "wordpiece"])
def good(request: pytest.FixtureRequest) -> str:
    return TextTokenizer.train(request.param, TEXTS, 60).to_json()


def use(text: str) -> None:
    tokenizer = TextTokenizer.from_json(text)
    (row,) = tokenizer.encode([SAMPLE])
    assert all(0 <= token < tokenizer.vocabulary for token in row)
    tokenizer.decode(row)
    tokenizer.pieces(SAMPLE)


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, tuple[Change, str]] = {
    "no model": (lambda data: data.pop("model"), "it has no `model`"),
    "no vocabulary": (lambda data: data["model"].pop("vocab"), "it has no vocabulary"),
    "empty vocabulary": (
        lambda data: (data["model"].update(vocab={}), data.update(added_tokens=[])),
        "it has 0 tokens; expected 1 to",
    ),
    "an id twice": (lambda data: data["model"]["vocab"].update({"low": 5, "lower": 5}), "its ids are not 0 to"),
    "a gap": (lambda data: data["model"]["vocab"].update(new=2**40), "its ids are not 0 to"),
    "a negative id": (lambda data: data["model"]["vocab"].update(new=-1), "its ids are not 0 to"),
    "an id that is true": (lambda data: data["model"]["vocab"].update(new=True), "its ids are not 0 to"),
    "two ids": (lambda data: data["added_tokens"][0].update(id=9), "its token '<pad>' has two ids"),
    "added without content": (lambda data: data["added_tokens"][0].pop("content"), "one of its added tokens"),
    "another unknown token": (lambda data: data["model"].update(unk_token="none"), "is not a usable tokenizer"),
    "another model": (lambda data: data["model"].update(type="Magic"), "its model 'Magic' is not supported"),
    "dropout": (lambda data: data["model"].update(dropout=0.5), "its model has dropout"),
    "another normalizer": (
        lambda data: data.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "its normalizer 'Precompiled' is not supported",
    ),
    "text that grows": (
        lambda data: data.update(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 2**20}),
        "its normalizer has a content of 2097152 characters",
    ),
    "text that doubles many times": (
        lambda data: data.update(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}] * 5,
            }
        ),
        "its normalizer replaces text more than 2 times",
    ),
    "many parts": (
        lambda data: data.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 20}),
        "its normalizer has 21 parts; expected at most 8",
    ),
    "a long pattern": (
        lambda data: data.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|b)" * 1000}}),
        "its pre_tokenizer has a pattern of 5000 characters",
    ),
    "a pattern that is not one": (
        lambda data: data.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "[z-a]"}, "behavior": "Isolated", "invert": False}
        ),
        "Oniguruma error",
    ),
    "a decoder that fails for short tokens": (
        lambda data: data.update(decoder={"type": "Strip", "content": "l", "start": 0, "stop": 3}),
        "its decoder strips the ends of tokens",
    ),
    "long words for WordPiece": (
        lambda data: data["model"].update(type="WordPiece", max_input_chars_per_word=10_000),
        "its model divides words of 10000 characters; expected at most 256",
    ),
    "another decoder": (lambda data: data.update(decoder={"type": "CTC"}), "its decoder 'CTC' is not supported"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(good: str, name: str) -> None:
    change, match = HOSTILE[name]
    data = json.loads(good)
    change(data)
    started = process_time()
    with pytest.raises(CheckpointError, match=match) as caught:
        use(json.dumps(data))
    assert str(caught.value).startswith("tokenizer.json is not a usable tokenizer: ")
    assert "\n" not in str(caught.value)
    assert process_time() - started < 5


SLOW_PATTERNS = (
    *(r"(?:.|.){4}[^\s\S]", r"(a+)+b", r".*.*x", r".+.+$", "a?" * 7 + "b", "a{1,9}a{1,9}b", "a{2}{9}b", "a++b"),
    *(r"(\s*[\r\n]+)+x", r"\s*[\r\n]+*", "(a|b)", r"(a)\1", "(?<=a)b", "(?i)a", "[a-z&&[^b]]", "[[a]b]", "a{0,}a{0,}b"),
    *("a|(a*)*", "[^a]]", "a{,5}b", r"\X+"),
)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_patterns_that_may_take_very_long_are_refused(good: str, part: str) -> None:
    data = json.loads(good)
    kind = "Split" if part == "pre_tokenizer" else "Replace"
    more = {"behavior": "Isolated", "invert": False} if part == "pre_tokenizer" else {"content": "a"}
    for pattern in SLOW_PATTERNS:
        data[part] = {"type": kind, "pattern": {"Regex": pattern}, **more}
        with pytest.raises(CheckpointError, match=f"its {part} has the pattern .* which may take very long"):
            use(json.dumps(data))


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
PUBLIC_PATTERNS = {
    "GPT-2": GPT2,
    "Llama 3": LLAMA3,
    "Qwen 2": LLAMA3.replace("{1,3}", ""),
    "GPT-4o": GPT4O,
    "CLIP": CLIP,
    "DeepSeek V3": DEEPSEEK,
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "StarCoder": r"\d",
    "Llama 2": " {2,}",
    "words": r"\w+|[^\w\s]+",
    "groups of digits": r"(?=(\d{3})+(?!\d))",
    "kana": "[一-龥぀-ゟ゠-ヿ]+",
}


@pytest.mark.parametrize("name", PUBLIC_PATTERNS)
def test_patterns_of_public_tokenizers_are_used(good: str, name: str) -> None:
    data = json.loads(good)
    pattern = {"type": "Split", "pattern": {"Regex": PUBLIC_PATTERNS[name]}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern]}
    use(json.dumps(data))


def test_many_added_tokens_are_refused(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_json, "MAX_ADDED_TOKENS", 3)
    with pytest.raises(CheckpointError, match="it has 4 added tokens; expected at most 3"):
        TextTokenizer.from_json(good)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"model": 3}', "{", "[" * 100_000, '{"a":' * 100_000])
def test_what_is_not_a_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        TextTokenizer.from_json(text)


def test_large_files_are_refused(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_json, "MAX_JSON_VALUES", 100)
    with pytest.raises(CheckpointError, match="it has more than 100 values"):
        TextTokenizer.from_json(good)
    monkeypatch.setattr(tokenizer_json, "MAX_JSON_LENGTH", 1000)
    with pytest.raises(CheckpointError, match=r"it has .* characters; expected at most 1,000"):
        TextTokenizer.from_json(good)


def test_truncation_padding_and_templates_of_a_file_are_not_used(good: str) -> None:
    data = json.loads(good)
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    data["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    assert TextTokenizer.from_json(json.dumps(data)).encode([SAMPLE]) == TextTokenizer.from_json(good).encode([SAMPLE])


def mutate(text: str, source: random.Random) -> str:
    """Delete, repeat, replace or swap parts of a text."""
    start = source.randrange(len(text))
    end = min(len(text), start + source.choice((1, 1, 2, 8, 64)))
    other = source.randrange(len(text))
    kind = source.randrange(4)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:end] * source.choice((1, 3)) + text[end:]
    if kind == 2:
        return (
            text[:start] + source.choice(('"', "}", "0", "-1", "null", "[]", "▁", "1e9", "\\u0000", ",")) + text[end:]
        )
    return text[:start] + text[other : other + end - start] + text[end:]


def change_value(data: Any, source: random.Random) -> None:
    """Replace a value somewhere in a JSON object by one of another kind."""
    place = data
    while True:
        key = source.choice([*place]) if isinstance(place, dict) else source.randrange(len(place))
        if isinstance(place[key], dict | list) and place[key] and source.random() < 0.8:
            place = place[key]
            continue
        place[key] = source.choice((None, True, 0, -1, 2**63, 1e300, "", "▁", "a" * 50, [], {}, [[]], {"type": "NFC"}))
        return


def test_damaged_files_give_errors_of_ours_only(good: str, mutations: int) -> None:
    """Also if the file still opens: the texts are then encoded and decoded."""
    source, messages = random.Random(0), list[str]()
    for number in range(mutations // 4):
        text = good
        if number % 2:
            data = json.loads(good)
            for _ in range(source.choice((1, 1, 3))):
                change_value(data, source)
            text = json.dumps(data)
        else:
            for _ in range(source.choice((1, 1, 3))):
                text = mutate(text, source)
        try:
            use(text)
        except VitrailError as error:
            messages.append(str(error))
    assert len(messages) > mutations // 16
    assert not any("\n" in message for message in messages)
