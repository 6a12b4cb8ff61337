"""Files of torch.save from real training are read as torch.load reads them, in both of its formats."""

import io
import pickle
import struct
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bad_checkpoints import (
    LEGACY_HEADER,
    assert_refused,
    tensor_pickle,
    torch_save_bytes,
    write_file,
    zip_pickle,
)
from torch import Tensor, nn

from vitrail.checkpoint.weight_files import read_raw_contents


def make_training_checkpoint() -> dict[Any, Any]:
    """A model, averaged weights, an optimizer, a scheduler, a scaler and the arguments of the script."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    assert isinstance(steps.state_dict()["milestones"], Counter)
    return {
        "model": model.state_dict(),
        "model_ema": OrderedDict((name, 2 * each) for name, each in model.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": steps.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "args": Namespace(
            lr=0.1, device=torch.device("cpu"), dtype=torch.float16, size=torch.Size([3, 4]), names={"a"}
        ),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        (1, "a"): 1j,
    }


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_training_checkpoints_are_read(new: bool, protocol: int, tmp_path: Path) -> None:
    data = make_training_checkpoint()
    torch.save(data, tmp_path / "a.pth", _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    contents = read_raw_contents(tmp_path / "a.pth")
    assert contents.wrapper == "model_ema"
    assert contents.other_keys[:4] == ("model", "optimizer", "lr_scheduler", "scaler")
    assert list(contents.tensors) == list(data["model_ema"])
    assert all(torch.equal(contents.tensors[name], each) for name, each in data["model_ema"].items())


def make_tensors() -> dict[str, Tensor]:
    base, named = torch.randn(6, 5), torch.ones(3)
    named.note = "an attribute"  # pyright: ignore[reportAttributeAccessIssue]
    parameter = nn.Parameter(torch.randn(2, 2))
    parameter.note = "an attribute"  # pyright: ignore[reportAttributeAccessIssue]
    kinds = ("float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64", "uint16", "float8_e4m3fn")
    return {
        "row": base[2],
        "column": base[:, 3],
        "turned": base.T,
        "none": base[3:3],
        "scalar": torch.tensor(3.5),
        "parameter": nn.Parameter(torch.randn(3)),
        "named": named,
        "named parameter": parameter,
        **{kind: torch.arange(5).to(getattr(torch, kind)) for kind in kinds},
    }


@pytest.mark.parametrize("new", [True, False])
def test_all_dtypes_and_views_are_read(new: bool, tmp_path: Path) -> None:
    data = make_tensors()
    torch.save({**data, "filling": torch.zeros(1000)}, tmp_path / "a.pth", _use_new_zipfile_serialization=new)
    contents = read_raw_contents(tmp_path / "a.pth").tensors
    for name, each in data.items():
        assert (contents[name].dtype, contents[name].shape) == (each.dtype, each.shape), name
        assert contents[name].tolist() == each.tolist(), name


def test_big_endian_values_are_swapped(tmp_path: Path) -> None:
    numbers = torch.randn(16)
    content = zip_pickle(tensor_pickle(16, "zip"), numbers.numpy().byteswap().tobytes())
    swapped = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(swapped, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    contents = read_raw_contents(write_file(tmp_path / "a.pth", swapped.getvalue()))
    assert torch.equal(contents.tensors["a"], numbers)


def legacy_file(keys: list[Any], *counts: int, view: bytes = b"N", declared: int = 16) -> bytes:
    """A file in the format of torch.save until 1.6, with one storage of 16 values."""
    pickled = tensor_pickle(declared, "legacy").replace(b"NtQ", view + b"tQ")
    return (
        LEGACY_HEADER
        + pickled
        + pickle.dumps(keys, 2)
        + b"".join(struct.pack("<q", n) + b"\0\0\x80\x3f" * 16 for n in counts)
    )


def test_the_legacy_format_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    assert torch.equal(read_raw_contents(write_file(path, legacy_file(["0"], 16))).tensors["a"], torch.ones(16))
    view = b"(X\x01\0\0\0vK\0K\x10t"
    assert torch.equal(
        read_raw_contents(write_file(path, legacy_file(["0"], 16, view=view))).tensors["a"], torch.ones(16)
    )
    for content in (
        legacy_file([]),
        legacy_file([], 16),
        legacy_file(["0"]),
        legacy_file(["0"], 15),
        legacy_file(["0"], 2**62),
        legacy_file(["0"], 17, declared=17),
        legacy_file(["0", "0"], 16, 16),
        legacy_file(["1"], 16),
        legacy_file([0], 16),
        legacy_file([["0"]], 16),
        legacy_file(["0"], 16, view=b"(X\x01\0\0\0vK\x01K\x10t"),
        legacy_file(["0"], 16, view=b"(X\x01\0\0\0vK\0K\x0ft"),
        legacy_file(["0"], 16, view=b"K\x01"),
    ):
        assert_refused(write_file(path, content))


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    """In Python 2 an OrderedDict was pickled as a list of pairs, and strings were bytes."""
    tensor = tensor_pickle(16, "zip")[3:-2].split(b"X\x01\0\0\0a", 1)[1]
    pairs = b"\x80\x02ccollections\nOrderedDict\n(](](U\x01a" + tensor + b"eetR."
    contents = read_raw_contents(write_file(tmp_path / "a.pth", zip_pickle(pairs, b"\0\0\x80\x3f" * 16)))
    assert torch.equal(contents.tensors["a"], torch.ones(16))


def test_tensors_next_to_the_weights_are_not_read(tmp_path: Path) -> None:
    content = torch_save_bytes({"model": {"a": torch.ones(3)}, "optimizer": {"state": {0: torch.full((64,), 7.0)}}})
    contents = read_raw_contents(write_file(tmp_path / "a.pth", content))
    assert (contents.wrapper, contents.other_keys, list(contents.tensors)) == ("model", ("optimizer",), ["a"])
