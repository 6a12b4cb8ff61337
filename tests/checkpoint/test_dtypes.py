"""Unsupported dtypes are refused by name; mixed floating dtypes are cast to the widest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read
from vitrail.checkpoint.reading import RUNNABLE_DTYPES
from vitrail.checkpoint.weight_files import SAFETENSORS_DTYPES
from vitrail.inspection.file_inspection import inspect_file

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


QUANTISED = {  # dtype of the weights and name of their scales
    "float8": (torch.float8_e4m3fn, ""),
    "float8 with scales": (torch.float8_e5m2, "weight_scale"),
    "int8 with scales": (torch.int8, "SCB"),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_quantized_weights_are_refused_in_one_line_that_says_what_to_do(kind: str, suffix: str, tmp_path: Path) -> None:
    dtype, scale = QUANTISED[kind]
    tensors = dict(vitrail.create("vit_tiny_patch16_224", **FIELDS).state_dict())
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        if scale:
            tensors[name.replace("weight", scale)] = torch.ones(len(tensors[name]))
        tensors[name] = tensors[name].to(dtype)
    path = tmp_path / f"a{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(tensors, path)
    expected = (
        rf"\.weight has dtype {str(dtype).removeprefix('torch.')}; expected one of float32, float16, bfloat16, "
        "float64: convert quantized weights with the library that wrote them$"
    )
    with pytest.raises(CheckpointError, match=expected):
        read(path, heads=2)
    assert "convert quantized weights" in (inspect_file(path, heads=2).reason or "")


@pytest.mark.parametrize("dtype", ["V1", "complex64", "longdouble", "datetime64[s]", "int8", "float16", "str"])
def test_arrays_of_an_npz_are_never_left_out_for_their_dtype(dtype: str, tmp_path: Path) -> None:
    """Without its head, a file would be read as a model without classes."""
    model = vitrail.create("vit_tiny_patch16_224", activation="gelu_tanh", **FIELDS)
    torch.nn.init.ones_(model.head.weight)
    vitrail.save(model, tmp_path / "a.npz", to="google")
    arrays = dict(np.load(tmp_path / "a.npz"))
    assert {"head/kernel", "head/bias"} <= set(arrays)
    if dtype == "str":
        arrays["about"] = np.array(["trained", "on", "photos"])
    else:
        for name in ("head/kernel", "head/bias"):
            values = arrays[name].astype(np.int8 if dtype == "V1" else np.int64)
            arrays[name] = values.view(dtype) if dtype[0] in "Vd" else values.astype(dtype)
    np.savez(tmp_path / "b.npz", **arrays)
    if dtype in ("float16", "str"):
        assert read(tmp_path / "b.npz").model.config.classes == 3
        return
    with pytest.raises(CheckpointError, match=r"head.* has dtype .*; expected .*: convert quantized weights") as caught:
        read(tmp_path / "b.npz")
    assert "\n" not in str(caught.value)
