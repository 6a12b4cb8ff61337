"""What every source is tested for: their model and ours agree, and their file comes back tensor for tensor."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from vitrail.checkpoint import Checkpoint, read, write


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, read by the library that the file is made for."""
    if path.is_dir():
        path = next(each for each in (path / "model.safetensors", path / "pytorch_model.bin") if each.exists())
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    data = torch.load(path, weights_only=True)
    return data.get("model", data)


def assert_same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def write_checkpoint(found: Checkpoint, path: Path, to: str) -> None:
    about = found.description
    write(
        found.model,
        path,
        to,
        preprocessing=about.preprocessing,
        labels=about.labels,
        provenance=about.provenance,
        resampling=about.resampling,
    )


def check_round_trip(path: Path, back: Path, *, to: str, without: tuple[str, ...] = (), **fields: Any) -> Checkpoint:
    """Theirs → ours in memory → our folder → theirs; nothing warned of on the way back, and nothing lost."""
    found = read(path, **fields)
    assert found.layout == found.description.provenance["source"]["layout"] == to
    assert not found.report.initialised
    assert not found.report.resized
    own = back.with_name("own")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_checkpoint(found, own, "vitrail")
        again = read(own)
        assert again.description.config == found.description.config
        write_checkpoint(again, back, to)
    assert_same_tensors(
        {n: t for n, t in read_tensors(path).items() if not n.startswith(without or "\0")}, read_tensors(back)
    )
    return found


@torch.no_grad()
def max_output_difference(ours: Any, theirs: Callable[[Tensor], Tensor], size: tuple[int, int] = (32, 32)) -> float:
    """The largest difference of their outputs on random images; outputs that say nothing are refused."""
    images = torch.randn(3, 3, *size)
    mine, their = ours(images), theirs(images)
    assert mine.shape == their.shape
    assert their.std() > 0.01
    return (mine - their).abs().max().item()
