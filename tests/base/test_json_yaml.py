"""Untrusted JSON and YAML are parsed within limits, or refused in one line."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.json_yaml import (
    MAX_NESTING,
    add_checksum,
    compute_json_checksum,
    parse_json,
    parse_yaml,
    verify_and_remove_checksum,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "checksum"), VALUES, max_size=4)


@given(VALUES)
def test_parse_json_equals_json_loads(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1)) == value


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"]":'])
def test_deeply_nested_json_is_refused(opening: str) -> None:
    levels = opening.count("[") + opening.count("{")
    allowed = opening * (MAX_NESTING // levels)
    with pytest.raises(json.JSONDecodeError):  # reached the parser, which misses the end
        parse_json(allowed)
    for deeper in (MAX_NESTING // levels + 1, 10_000):
        with pytest.raises(ValueError, match=r"nested \d+ levels deep; expected at most 64"):
            parse_json(opening * deeper)


@pytest.mark.parametrize(
    "text", ["[" + "0," * 2**17 + "0]", "{" + ",".join(f'"{n}":0' for n in range(2**17 + 1)) + "}"]
)
def test_json_with_too_many_values_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 131072 values"):
        parse_json(text)


def test_brackets_in_strings_are_not_nesting() -> None:
    assert parse_json(json.dumps(["[" * 1000, '\\"{' * 100])) == ["[" * 1000, '\\"{' * 100]


@pytest.mark.parametrize("text", ['\\"' * 2**20, '"' + "\\" * 2**20, '""\\"' * 2**19])
def test_unclosed_quotes_are_refused_quickly(text: str) -> None:
    with pytest.raises(ValueError, match="line 1 column"):
        parse_json(text)


def test_plain_yaml_is_parsed() -> None:
    assert parse_yaml("lr: 0.1\nfields: {depth: 2}\nwords: [a, b]") == {
        "lr": 0.1,
        "fields": {"depth": 2},
        "words": ["a", "b"],
    }


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "aliases that explode": (LAUGHS, "anchors or aliases"),
        "an alias of itself": ("a: &a [*a]", "anchors or aliases"),
        "merge keys": ("a: &a {b: 1}\nc:\n  <<: *a", "anchors or aliases"),
        "nested lists": ("[" * 5000, "nested too deep; expected at most 64"),
        "nested blocks": ("\n".join(" " * n + "a:" for n in range(300)), "nested too deep; expected at most 64"),
        "a number of many digits": ("a: " + "1" * 10_000, "10,000 characters; expected at most 4,096"),
        "a number in base 60": ("a: " + "1:" * 5_000 + "1", "characters; expected at most 4,096"),
        "a long file": ("a: b\n" * 100_000, "characters; expected at most 262,144"),
        "an object of Python": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        "invalid YAML": ("a: [", "expected"),
        "control characters": ("a: \x00", "not allowed"),
    }.values(),
)
def test_expensive_or_invalid_yaml_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


@given(OBJECTS, OBJECTS)
def test_changes_to_an_object_with_a_checksum_are_detected(value: dict[str, Any], changed: dict[str, Any]) -> None:
    signed = json.loads(json.dumps(add_checksum(value)))
    assert verify_and_remove_checksum(signed) == json.loads(json.dumps(value))
    if compute_json_checksum(changed) != compute_json_checksum(value):
        with pytest.raises(ValueError, match='if you edited it, delete its "checksum"'):
            verify_and_remove_checksum({**changed, "checksum": signed["checksum"]})


def test_the_checksum_depends_only_on_values() -> None:
    assert compute_json_checksum({"b": (1, 2), "a": 1.0}) == compute_json_checksum({"a": 1.0, "b": [1, 2]})
    assert compute_json_checksum({"a": 1}) != compute_json_checksum({"a": 2})
    assert verify_and_remove_checksum({"a": 1}) == {"a": 1}  # as written by earlier versions
