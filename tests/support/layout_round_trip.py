"""Checks for every source: their model and ours agree, and their file comes back with the same tensors."""

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
    """Read all tensors of a file with the library that it is made for."""
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


def write_checkpoint(checkpoint: Checkpoint, path: Path, to: str) -> None:
    description = checkpoint.description
    write(
        checkpoint.model,
        path,
        to,
        preprocessing=description.preprocessing,
        labels=description.labels,
        provenance=description.provenance,
        resampling=description.resampling,
    )


def check_round_trip(path: Path, back: Path, *, to: str, without: tuple[str, ...] = (), **fields: Any) -> Checkpoint:
    """Read their file, save it in our layout, and write it back in theirs, without warnings or losses."""
    checkpoint = read(path, **fields)
    assert checkpoint.layout == checkpoint.description.provenance["source"]["layout"] == to
    assert not checkpoint.report.initialized
    assert not checkpoint.report.resized
    own = back.with_name("own")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_checkpoint(checkpoint, own, "vitrail")
        again = read(own)
        assert again.description.config == checkpoint.description.config
        write_checkpoint(again, back, to)
    assert_same_tensors(
        {n: t for n, t in read_tensors(path).items() if not n.startswith(without or "\0")}, read_tensors(back)
    )
    return checkpoint


@torch.no_grad()
def max_output_difference(ours: Any, theirs: Callable[[Tensor], Tensor], size: tuple[int, int] = (32, 32)) -> float:
    """Largest difference of the outputs on random images; nearly constant outputs are refused."""
    images = torch.randn(3, 3, *size)
    mine, their = ours(images), theirs(images)
    assert mine.shape == their.shape
    assert their.std() > 0.01
    return (mine - their).abs().max().item()
