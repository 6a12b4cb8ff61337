"""The ONNX file: valid, for any batch size, and for any image size if the model is dynamic."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from support.toy_exports import (
    PREPROCESSING,
    TOY_FIELDS,
    ExportFinder,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    softmax_rows,
)

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.export.description import ONNX_FILE
from vitrail.export.onnx_file import find_size_multiple, trace_to_exported_program, write_onnx
from vitrail.export.torch_modules import ExportModule
from vitrail.layers.positions import bicubic_matrix


def run(path: Path, pixels: Any) -> Any:
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"pixels": pixels})[0]


def domains(path: Path) -> set[str]:
    return {node.domain for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("name", ["onnx", "int8", "any size", "portable", "tokens"])
def test_onnx_checker_accepts_the_file(exported: ExportFinder, name: str) -> None:
    file = exported(name) / ONNX_FILE
    theirs = domains(file) - {"", "ai.onnx"}
    assert theirs <= {"com.microsoft"}
    onnx.checker.check_model(str(file), full_check=not theirs)


def test_output_has_a_name_of_its_own(tmp_path: Path) -> None:
    """RMS norms of Image GPT have a mean, and so has its preprocessing."""
    torch.manual_seed(0)
    fields = {"image_size": 4, "colors": 9, "width": 8, "depth": 1, "heads": 2, "classes": 0}
    model: Any = vitrail.create("igpt_cpu", **fields).eval()
    torch.nn.init.normal_(model.palette)
    preprocessing = vitrail.Preprocessing(image_size=4)
    write_onnx(model, tmp_path / "igpt.onnx", preprocessing, "mean")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    expected = ExportModule(model, preprocessing, "mean", fused=False)(torch.from_numpy(pixels)).detach()
    np.testing.assert_allclose(run(tmp_path / "igpt.onnx", pixels), expected, atol=1e-5)


def test_portable_export_has_only_standard_operators(exported: ExportFinder) -> None:
    model = onnx.load(exported("portable") / ONNX_FILE)
    assert domains(exported("portable") / ONNX_FILE) <= {"", "ai.onnx"}
    assert [each.domain for each in model.opset_import if each.domain not in ("", "ai.onnx")] == []
    assert not model.functions
    assert "com.microsoft" in domains(exported("onnx") / ONNX_FILE), "without the option"


def test_export_runs_with_onnxruntime_alone(exported: ExportFinder, tmp_path: Path) -> None:
    import json

    import numpy as np
    import onnxruntime
    from PIL import Image

    folder, photo = exported("portable"), tmp_path / "photo.png"
    Image.fromarray(random_pixels(1, (48, 32))[0]).save(photo)
    labels = json.loads((folder / "config.json").read_text())["labels"]
    session: Any = onnxruntime.InferenceSession(folder / "model.onnx")
    pixels = np.asarray(Image.open(photo).convert("RGB").resize((32, 48)), dtype=np.uint8)
    logits = session.run(None, {"pixels": pixels[None]})[0]
    best = labels[int(logits[0].argmax())]

    expected = reference_probabilities(make_toy_model("map"), pixels[None])
    assert labels.index(best) == expected.argmax()
    assert np.abs(softmax_rows(logits) - expected).max() < 1e-4


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_any_batch_size(exported: ExportFinder, batch: int) -> None:
    pixels = random_pixels(batch)
    assert (
        np.abs(
            softmax_rows(run(exported("onnx") / ONNX_FILE, pixels))
            - reference_probabilities(make_toy_model("vit"), pixels)
        ).max()
        < 1e-5
    )


SIZES = [(48, 32), (16, 16), (16, 112), (80, 48), (224, 160)]


@pytest.mark.parametrize("size", SIZES)
def test_any_image_size(exported: ExportFinder, size: tuple[int, int]) -> None:
    """Compared with the dynamic model in torch, for larger, smaller and oblong images."""
    pixels = random_pixels(2, size)
    found = run(exported("any size") / ONNX_FILE, pixels)
    assert np.abs(softmax_rows(found) - reference_probabilities(make_toy_model("vit any size"), pixels)).max() < 1e-5


def test_unsupported_image_size_is_refused(exported: ExportFinder) -> None:
    for name, size in (("any size", (50, 32)), ("onnx", (32, 48))):
        with pytest.raises(Exception, match=r"(?i)shape|dimension"):
            run(exported(name) / ONNX_FILE, random_pixels(1, size))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name for name in TOY_FIELDS if name not in ("vit any size", "crossvit")
    ],  # torch cannot export resizing by rounded scales
)
def test_any_image_size_for_every_family(name: str, tmp_path: Path) -> None:
    fields = {} if name in ("resnet", "regnety") else {"dynamic": True}
    model = make_toy_model(name, **fields)
    write_onnx(model, tmp_path / ONNX_FILE, PREPROCESSING, dynamic=True)
    for size in SIZES:
        by = find_size_multiple(model)
        size = (max(by, size[0] // by * by), max(by, size[1] // by * by))
        found = run(tmp_path / ONNX_FILE, random_pixels(2, size))
        assert np.abs(softmax_rows(found) - reference_probabilities(model, random_pixels(2, size))).max() < 1e-4, size


def test_model_of_fixed_size_is_not_exported_as_dynamic() -> None:
    with pytest.raises(ConfigError, match=r"ViT takes one size; expected a model with dynamic=True"):
        trace_to_exported_program(ExportModule(make_toy_model("vit"), PREPROCESSING, fused=False), dynamic=True)


@pytest.mark.parametrize(
    ("name", "fields", "multiple"),
    [
        ("vit", {}, 16),
        ("vit", {"patch_size": (16, 8)}, 16),
        ("vit", {"patch_size": (8, 16)}, 16),
        ("vit", {"patch_size": (6, 4)}, 12),
        ("distilled", {"patch_size": 8}, 8),
        ("hybrid", {}, 16),
        ("cct", {}, 4),
        ("resnet", {}, 1),
        ("regnety", {}, 1),
    ],
)
def test_size_multiple(name: str, fields: dict[str, Any], multiple: int) -> None:
    model = make_toy_model(name, **fields, **({} if name in ("resnet", "regnety") else {"dynamic": True}))
    assert find_size_multiple(model) == multiple
    with torch.inference_mode():
        model(torch.zeros(1, 3, 48, 32 if 32 % multiple == 0 else 2 * multiple)) if not fields else None


@pytest.mark.parametrize("old", [1, 2, 3, 7, 14, 24])
def test_bicubic_matrices_match_torch(old: int) -> None:
    table = torch.randn(1, 3, old, old + 2)
    for new in (1, 2, 3, 5, 8, 14, 17, 37):
        expected = F.interpolate(table, size=(new, 2 * new), mode="bicubic", antialias=True)
        found = bicubic_matrix(old, new) @ table @ bicubic_matrix(old + 2, 2 * new).T
        assert torch.allclose(found, expected, atol=2e-5), new
