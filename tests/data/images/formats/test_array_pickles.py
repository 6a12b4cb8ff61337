"""Pickles are read without running code."""

import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy_datasets import random_array

from vitrail.base.errors import DataError
from vitrail.data.images.formats.cifar import read_array_pickle

BATCH = {
    b"data": random_array(2, 3),
    b"labels": [1, 2],
    b"filenames": [b"a.png", b"b.png"],
    "text": ("é", 1.5, None, True),
}


class Malicious:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return subprocess.getoutput, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_and_plain_containers_are_read(protocol: int, order: Any) -> None:
    batch = {**BATCH, b"data": np.array(BATCH[b"data"], order=order)}
    read = read_array_pickle(pickle.dumps(batch, protocol), Path("toy"))
    assert np.array_equal(read.pop(b"data"), random_array(2, 3))
    assert read == {key: value for key, value in BATCH.items() if key != b"data"}


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_is_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({**BATCH, "more": [Malicious(f"touch {tmp_path / 'ran'}")]}, protocol)
    with pytest.raises(
        DataError, match=r"^toy is a pickle that wants to run \w+\.getoutput; refused: expected arrays only$"
    ):
        read_array_pickle(data, Path("toy"))
    assert not (tmp_path / "ran").exists()


def test_arrays_of_other_dtypes_are_refused() -> None:
    for array in (np.zeros(3), np.array(["text", None], object)):
        with pytest.raises(DataError, match="not of bytes"):
            read_array_pickle(pickle.dumps({"data": array}), Path("toy"))


def test_damaged_pickles_are_refused_in_one_line() -> None:
    chance = random.Random(0)
    for protocol in range(6):
        intact = pickle.dumps(BATCH, protocol)
        for _ in range(200):
            data = bytearray(intact[: chance.randrange(1, len(intact) + 1)])
            data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                read_array_pickle(bytes(data), Path("toy"))
            except DataError as error:
                assert "\n" not in str(error)  # noqa: PT017


def nested(start: bytes) -> bytes:
    """Opcodes that replace a tuple or list with one that contains it twice, fifty times."""
    steps = start
    for level in range(50):
        put, get = b"q" + bytes([level]), b"h" + bytes([level])
        steps += put + (get + b"\x86" if start == b")" else b"0(" + get + get + b"l")
    return steps


CALLS = {
    "dtype": b"cnumpy\ndtype\n(%bK\0K\1tR",
    "array": b"cnumpy\nndarray\n)R(K\1%bK\0K\0C\0tb",
    "buffer": b"cnumpy.core.numeric\n_frombuffer\n(C\0K\0%bK\0tR",
    "encode": b"c_codecs\nencode\n(%bK\0tR",
    "key": b"}(%bK\1u",
    "value": b"}(K\1%bu",
}


@pytest.mark.parametrize("start", [b")", b"]"], ids=["tuple", "list"])
@pytest.mark.parametrize("place", CALLS)
def test_exponentially_nested_containers_cost_nothing(place: str, start: bytes) -> None:
    data = b"\x80\x04" + CALLS[place] % nested(start) + b"."
    try:
        assert len(read_array_pickle(data, Path("toy"))) == 1
    except DataError as error:
        assert len(str(error)) < 200  # noqa: PT017


def test_repeated_encoding_is_limited() -> None:
    text = b"X" + (10**6).to_bytes(4, "little") + b"x" * 10**6
    data = b"\x80\x02" + text + b"q\0" + b"0c_codecs\nencode\nh\0X\6\0\0\0latin1\x86R" * 10_000 + b"."
    with pytest.raises(DataError, match=r"^toy has more than \d+ steps; expected a pickle of arrays$"):
        read_array_pickle(data, Path("toy"))
