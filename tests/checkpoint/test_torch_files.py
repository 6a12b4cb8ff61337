"""Pickles that run code, or take much time or memory, bare and in both containers of torch."""

import io
import pickle
import re
import subprocess
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_checkpoints import (
    CONTAINERS,
    OS_SYSTEM,
    TENSORS,
    PickledCall,
    assert_refused,
    legacy_torch_bytes,
    repeat_step,
    tensor_pickle,
    torch_save_bytes,
    write_file,
    zip_pickle,
)

from vitrail.checkpoint.weight_files import read_raw_contents


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("call", ["os.system", "eval", "exec", "subprocess.call"])
def test_pickles_that_run_code_are_refused_by_name(call: str, container: str, protocol: int, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    calls = {
        "os.system": ("posix.system", PickledCall(OS_SYSTEM, f"touch {sentinel}")),
        "eval": ("eval", PickledCall(eval, f"open({str(sentinel)!r}, 'w').close()")),
        "exec": ("exec", PickledCall(exec, f"open({str(sentinel)!r}, 'w').close()")),
        "subprocess.call": ("(subprocess|commands).call", PickledCall(subprocess.call, ["touch", str(sentinel)])),
    }
    name, harm = calls[call]
    pickled = pickle.dumps({"model": harm}, protocol)
    message = assert_refused(write_file(tmp_path / "weights.pth", CONTAINERS[container](pickled)))
    if (container, protocol) not in (("plain", 0), ("plain", 1)):  # whose first bytes are not those of a pickle
        assert re.search(rf"wants to run (builtins\.|__builtin__\.)?{name};", message)  # __builtin__ in Python 2
    assert not sentinel.exists()
    pickle.loads(pickled)  # Python runs it
    assert sentinel.exists()


@pytest.mark.parametrize("new", [True, False])
def test_a_pickled_module_is_refused_by_name(new: bool, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    assert_refused(
        tmp_path / "model.pt", r"wants to run torch\.nn\.modules\.linear\.Linear; refused: expected tensors only"
    )


@pytest.mark.parametrize("new", [True, False])
def test_script_arguments_are_ignored_but_not_run(new: bool, tmp_path: Path) -> None:
    data = {"model": TENSORS, "args": Namespace(lr=0.1, names=["x"]), "epoch": 3}
    torch.save(data, tmp_path / "run.pth", _use_new_zipfile_serialization=new)
    contents = read_raw_contents(tmp_path / "run.pth")
    assert contents.wrapper == "model"
    assert contents.other_keys == ("args", "epoch")
    assert contents.tensors.keys() == TENSORS.keys()
    torch.save({"model": TENSORS, "args": Namespace(call=PickledCall(OS_SYSTEM, "true"))}, tmp_path / "bad.pth")
    assert_refused(tmp_path / "bad.pth", r"wants to run posix\.system")


def make_cyclic_dict() -> dict[str, Any]:
    data: dict[str, Any] = dict(TENSORS)
    data["self"] = data
    data["model"] = data
    return data


@pytest.mark.parametrize("new", [True, False])
def test_a_dict_that_contains_itself_is_read(new: bool, tmp_path: Path) -> None:
    torch.save(make_cyclic_dict(), tmp_path / "a.pth", _use_new_zipfile_serialization=new)
    assert read_raw_contents(tmp_path / "a.pth").tensors.keys() == TENSORS.keys()


OTHER_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: [torch.ones(2)], r"contains a list; expected a dict"),
    "a tuple": (lambda: (torch.ones(2),), r"contains a tuple; expected a dict"),
    "a tensor": (lambda: torch.ones(2), r"contains a Tensor; expected a dict"),
    "a text": (lambda: "text", r"contains a str; expected a dict"),
    "numbers for names": (lambda: {1: torch.ones(2)}, r"under keys that are not strings"),
    "expanded": (lambda: {"a": torch.ones(1).expand(10**9)}, r"describes more values than it holds"),
    "expanded often": (lambda: dict.fromkeys("abcdefghijk", torch.ones(2**22)), r"describes more values than it holds"),
    "a bytearray": (lambda: {"a": bytearray(3)}, r"wants to run .*bytearray; refused"),
    "bytes": (lambda: {"a": b"\xff"}, r"wants to run _codecs\.encode; refused"),
    "sparse": (lambda: {"a": torch.eye(3).to_sparse()}, r"a is sparse, quantized or has no values"),
    "meta": (lambda: {"a": torch.ones(3, device="meta")}, r"a is sparse, quantized or has no values"),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("kind", OTHER_VALUES)
def test_pickles_of_other_values_are_refused(kind: str, new: bool, tmp_path: Path) -> None:
    data, message = OTHER_VALUES[kind]
    torch.save(data(), tmp_path / "a.pth", _use_new_zipfile_serialization=new)
    assert_refused(tmp_path / "a.pth", message)


@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")  # from making one
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "a.pth")
    assert_refused(tmp_path / "a.pth", r"a is sparse, quantized or has no values")


def nest_tuples(levels: int) -> bytes:
    """A nested tuple with each level holding the next one twice, as a key: hashing would take 2^levels steps."""
    steps = b"\x80\x02}(" + b")"
    for level in range(levels):
        steps += b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return steps + b"K\x01u."


EXPENSIVE_PICKLES = {
    "a call of a list": (b"\x80\x02](h\x00h\x00e)R.", r"."),
    "a call of a value": (b"\x80\x02])R.", r"calls a list; expected weights"),
    "an endless bytearray": (b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R.", r"bytearray"),
    "punycode": (b"\x80\x02c_codecs\nencode\nX\x04\0\0\0\xc3\xa9\xc3\xa9X\x08\0\0\0punycode\x86R.", r"encode"),
    "a million dicts": (repeat_step(b"}"), r"has more than \d+ steps; expected weights"),
    "a million sets": (repeat_step(b"\x8f"), r"has more than \d+ steps"),
    "a text without end": (b"\x80\x02X\xff\xff\xff\xffabc.", r"cannot be read|claims a value of 4294967295 bytes"),
    "a number of a billion digits": (
        b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        r"cannot be read|claims a value of 2147483647 bytes",
    ),
    "a stack that is empty": (b"\x80\x02u.", r"has no mark on its stack"),
    "a memo that is empty": (b"\x80\x02h\x05.", r"reads value 5 of its memo, which it did not store"),
    "nothing after its protocol": (b"\x80\x02", r"cannot be read"),
    "no allowed codec": (b"\x80\x02c__builtin__\nset\n(K\x01tR.", r"."),
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("kind", EXPENSIVE_PICKLES)
def test_expensive_pickles_are_refused(kind: str, container: str, tmp_path: Path) -> None:
    pickled, message = EXPENSIVE_PICKLES[kind]
    assert_refused(write_file(tmp_path / "a.pth", CONTAINERS[container](pickled)), message)


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_nested_tuples_as_keys_are_not_hashed(container: str, tmp_path: Path) -> None:
    assert read_raw_contents(write_file(tmp_path / "a.pth", CONTAINERS[container](nest_tuples(60)))).tensors == {}


@pytest.mark.parametrize("count", [10**9, 10**12, 10**18, -1, -(10**18)])
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_pickles_that_claim_more_values_than_stored_are_refused(container: str, count: int, tmp_path: Path) -> None:
    content = (
        zip_pickle(tensor_pickle(count, container), b"\0" * 64)
        if container == "zip"
        else legacy_torch_bytes(tensor_pickle(count, container))
    )
    assert_refused(write_file(tmp_path / "a.pth", content))


def test_stored_values_are_read(tmp_path: Path) -> None:
    contents = read_raw_contents(
        write_file(tmp_path / "a.pth", zip_pickle(tensor_pickle(16, "zip"), b"\0\0\x80\x3f" * 16))
    )
    assert torch.equal(contents.tensors["a"], torch.ones(16))


def test_two_pickles_in_one_archive_are_refused(tmp_path: Path) -> None:
    for other in ("archive/DATA.PKL", "archive/data.pkl"):
        file = io.BytesIO(zip_pickle(torch_save_bytes({})))
        with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "a") as archive:  # it is there already
            archive.writestr(other, repeat_step(b"}"))
        assert_refused(write_file(tmp_path / "a.pth", file.getvalue()), r"two entries of the same name")
