"""Unsupported dtypes are refused by name; mixed floating dtypes are cast to the widest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import vitrail
from vitrail.checkpoint import read
from vitrail.checkpoint.files.raw_contents import SAFETENSORS_DTYPES
from vitrail.checkpoint.reading import RUNNABLE_DTYPES
from vitrail.errors import CheckpointError
from vitrail.inspection.checkpoints.file_inspection import inspect_file

FIELDS: dict[str, Any] = {"image_size": 16, "patch_size": 8, "depth": 1, "width": 16, "heads": 2, "classes": 3}
UNSUPPORTED_DTYPES = sorted({*SAFETENSORS_DTYPES.values()} - {*RUNNABLE_DTYPES}, key=str)


def save_toy(path: Path, **changes: torch.dtype) -> Path:
    """Save a toy ViT with timm's names and some tensors in another dtype."""
    tensors = {
        name: each.clone() for name, each in vitrail.create("vit_tiny_patch16_224", **FIELDS).state_dict().items()
    }
    for name, dtype in changes.items():
        key = name.replace("__", ".")
        tensors[key] = tensors[key].to(dtype)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("dtype", UNSUPPORTED_DTYPES, ids=str)
def test_unsupported_dtypes_are_refused_by_name_and_can_be_inspected(
    dtype: torch.dtype, suffix: str, tmp_path: Path
) -> None:
    path = save_toy(tmp_path / f"a{suffix}", norm__bias=dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        CheckpointError, match=rf"norm\.bias has dtype {name}; expected one of float32, float16, bfloat16, float64"
    ) as caught:
        read(path, heads=2)
    assert len(str(caught.value).splitlines()) == 1
    seen = inspect_file(path, heads=2)
    assert seen.dtypes[name] == 1
    assert name in (seen.reason or "")


@pytest.mark.parametrize(
    ("one", "two", "widest"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
)
def test_mixed_dtypes_are_cast_to_the_widest_with_a_warning(
    one: torch.dtype, two: torch.dtype, widest: torch.dtype, tmp_path: Path
) -> None:
    path = save_toy(tmp_path / "a.safetensors", norm__bias=one, norm__weight=two)
    checkpoint = read(path, heads=2)
    assert {each.dtype for each in checkpoint.model.parameters()} == {torch.promote_types(widest, torch.float32)}
    assert checkpoint.model(torch.zeros(1, 3, 16, 16, dtype=torch.promote_types(widest, torch.float32))).shape == (1, 3)
    said = [warning for warning in checkpoint.report.warnings if "its tensors have dtypes" in warning]
    assert len(said) == 1
    assert str(one).removeprefix("torch.") in said[0]
    given = read(path, heads=2, dtype=torch.bfloat16)
    assert {each.dtype for each in given.model.parameters()} == {torch.bfloat16}
    assert not any("its tensors have dtypes" in warning for warning in given.report.warnings)


def test_a_single_dtype_is_kept_and_counters_are_ignored(tmp_path: Path) -> None:
    model = vitrail.create("resnet20_cifar", stages=(1, 1, 1)).bfloat16()
    vitrail.save(model, tmp_path / "a.th", to="akamaster")
    checkpoint = read(tmp_path / "a.th")
    assert {each.dtype for each in checkpoint.model.parameters()} == {torch.bfloat16}
    assert not any("its tensors have dtypes" in warning for warning in checkpoint.report.warnings)
