"""The reader returns what Python would for plain values, within its budget."""

import pickle
import struct
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.pickle_reader import (
    AllowedCall,
    BoundedStream,
    ForbiddenGlobalError,
    OpaqueGlobal,
    PickleError,
    StepBudget,
    evaluate_pickle,
)

SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text()
KEYS = st.none() | st.booleans() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def evaluate(data: bytes, names: Mapping[str, object] | None = None, size: int | None = None) -> Any:
    return evaluate_pickle(BytesIO(data), names or {}, StepBudget(len(data) if size is None else size))


@given(value=VALUES, protocol=st.integers(0, 5))
def test_plain_values_are_read(value: Any, protocol: int) -> None:
    assert evaluate(pickle.dumps(value, protocol)) == value


@given(data=st.binary(max_size=200))
def test_random_bytes_give_a_value_or_an_error(data: bytes) -> None:
    # callers report what pickletools raises
    with suppress(ValueError, LookupError, OverflowError, MemoryError, AttributeError, TypeError, struct.error):
        evaluate(b"\x80\x02" + data)


def repeat_with_memo(start: bytes, step: bytes, times: int) -> bytes:
    """A pickle that stores one value in its memo and repeats a step with it."""
    return b"\x80\x02" + start + b"q\0" + step * times + b"."


LONG = b"(" + b"K\x01" * 30_000  # a mark and many numbers
EXPENSIVE = {
    "a long tuple as the arguments of a call": repeat_with_memo(LONG + b"t", b"0cf\ng\nh\0R", 30_000),
    "more steps than the file allows": b"\x80\x02" + b"]0" * 200_000 + b"N.",
}


@pytest.mark.parametrize("kind", EXPENSIVE)
def test_copies_are_charged_to_the_budget(kind: str) -> None:
    def takes(*_: Any) -> None:
        """Anything."""

    with pytest.raises(PickleError, match=r"has more than \d+ steps"):
        evaluate(EXPENSIVE[kind], {"f.g": AllowedCall(takes)}, 0)


@pytest.mark.parametrize("container", [b"\x86", b"0(h\0h\0l", b"0(h\0h\0d"])
@pytest.mark.parametrize("place", ["key", "value", "call", "state", "name"])
def test_doubled_containers_are_not_traversed(container: bytes, place: str) -> None:
    steps = b")"
    for level in range(50):
        put, get = b"q" + bytes([level]), b"h" + bytes([level])
        steps += put + (get + b"\x86" if container == b"\x86" else b"0(" + get + get + container[-1:])
    whole = {
        "key": b"\x80\x02}(" + steps + b"K\x01u.",
        "value": b"\x80\x02}(K\x01" + steps + b"u.",
        "call": b"\x80\x02" + steps + b")R.",
        "state": b"\x80\x02]" + steps + b"b.",
        "name": b"\x80\x04" + steps + steps + b"\x93.",
    }[place]
    if place in ("key", "value"):
        assert len(evaluate(whole)) == 1
    else:
        with pytest.raises(PickleError):
            evaluate(whole)


def test_numbers_and_tuples_are_not_hashed() -> None:
    same = [number * (2**61 - 1) for number in (2**80, 2**81, 2**82)]
    assert len({hash(number) for number in same}) == 1
    evaluated = evaluate(pickle.dumps(dict.fromkeys((*same, (1, 2), 7, 0.5, "a")), 2))
    assert [key for key in evaluated if isinstance(key, int | float | tuple | str)] == ["a"]
    assert len(evaluated) == 7


def test_unknown_names_and_calls_of_values_are_refused() -> None:
    with pytest.raises(ForbiddenGlobalError, match=r"is a pickle that wants to run posix\.system"):
        evaluate(b"\x80\x02cposix\nsystem\n.")
    known = {"a.b": OpaqueGlobal("a.b")}
    assert evaluate(b"\x80\x02ca\nb\n.", known) is known["a.b"]
    for call in (b"R", b"\x81"):
        with pytest.raises(ForbiddenGlobalError, match=r"wants to run a\.b"):
            evaluate(b"\x80\x02ca\nb\n)" + call + b".", known)


def test_bounded_stream_stops_at_its_limit() -> None:
    file = BytesIO(b"12345\n7890")
    stream = BoundedStream(file, 6)
    assert stream.read(2) == b"12"
    assert stream.readline() == b"345\n"
    with pytest.raises(PickleError, match=r"claims a value of 1 bytes"):
        stream.read(1)
    assert stream.readline() == b""
