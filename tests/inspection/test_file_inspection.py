"""Inspection of checkpoints: layout, contents, and suspicious weights without false alarms."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import write
from vitrail.inspection.file_inspection import CheckpointInspection, inspect_file
from vitrail.models.catalog.external_families import load_external_family

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own_family.py")
SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 3, "heads": 2, "classes": 5}
Tensors = dict[str, Tensor]


def toy(name: str = "ViT-Ti/16", **fields: Any) -> Any:
    return add_weight_noise(vitrail.create(name, **{**SMALL, **fields}))


def weights(**fields: Any) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in toy(**fields).state_dict().items()}


def inspect(tensors: Tensors, folder: Path, **known: Any) -> CheckpointInspection:
    torch.save({"model": tensors}, folder / "weights.pth")
    fields: dict[str, Any] = {"heads": 2, **known}
    return inspect_file(folder / "weights.pth", **fields)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def first_set(value: float, count: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[:count] = value
        return tensor

    return change


def second_block_copied(tensors: Tensors) -> Tensors:
    names = [name for name in tensors if name.startswith("blocks.1.")]
    return {**tensors, **{name: tensors[name.replace(".1.", ".0.", 1)].clone() for name in names}}


QKV, COUNT = "blocks.0.attn.qkv.weight", f"{3 * 64 * 64:,}"
FINDINGS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "NaN": (put(QKV, first_set(float("nan"), 3)), f"NaN: {QKV} (3 of {COUNT} values)"),
    "infinite": (put(QKV, first_set(-float("inf"), 2)), f"infinite: {QKV} (2 of {COUNT} values)"),
    "enormous": (put(QKV, first_set(-3e7, 1)), f"beyond ±10,000: {QKV} (3e+07)"),
    "head": (put("head.weight", torch.zeros_like), "head of zeros, as in Google's ImageNet-21k files: head.weight"),
    "zero": (put("blocks.2.mlp.fc1.bias", torch.zeros_like), "all zeros: blocks.#.mlp.fc1.bias"),
    "constant": (put("norm.weight", torch.ones_like), "constant, as before training: norm.weight (1)"),
    "positions": (
        put("pos_embed", lambda table: torch.cat((table[:, :1], table[:, 1:2].expand(-1, 16, -1)), dim=1)),
        "equal position embeddings, as before training: pos_embed (16 of 17)",
    ),
    "block": (second_block_copied, "blocks with the same weights: blocks.0 = blocks.1"),
    "copy": (
        lambda tensors: {**tensors, "blocks.2.norm1.bias": tensors["norm.bias"].clone()},
        "identical tensors: blocks.2.norm1.bias = norm.bias",
    ),
    "memory": (
        lambda tensors: {**tensors, "blocks.2.norm1.bias": tensors["norm.bias"]},
        "identical tensors: blocks.2.norm1.bias = norm.bias",
    ),
    "integer": (put("norm.bias", Tensor.long), "not floating point: norm.bias (int64)"),
    "mixed": (put("norm.bias", Tensor.half), "mixed dtypes: 43 float32, 1 float16"),
    "empty": (lambda tensors: {**tensors, "head.bias": torch.empty(0)}, "empty: head.bias"),
}


def test_healthy_files_are_not_suspicious(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"pool": "map", "registers": 2},
        {"layer_scale": 0.1},
        {"positions": "sincos_2d"},
    ]
    for fields in kinds:
        vitrail.save(toy(**fields), tmp_path / "own", preprocessing=vitrail.Preprocessing(image_size=32))
        assert inspect_file(tmp_path / "own").suspicious == ()
    found = inspect(weights(), tmp_path)
    assert (found.reason, found.suspicious) == ("", ())
    assert str(found).endswith("\n\nnothing suspicious")


@pytest.mark.parametrize("kind", FINDINGS)
def test_each_finding_is_reported_alone(kind: str, tmp_path: Path) -> None:
    change, line = FINDINGS[kind]
    found = inspect(change(weights()), tmp_path)
    assert found.suspicious == (line,)
    assert found.format_report().splitlines()[-2:] == ["suspicious", f"- {line}"]
    json.dumps(asdict(found), allow_nan=False)


def test_findings_over_many_blocks_are_one_line(tmp_path: Path) -> None:
    torch.save(vitrail.create("ViT-Ti/16", **SMALL).state_dict(), tmp_path / "weights.pth")
    zeros, ones = inspect_file(tmp_path / "weights.pth", heads=2).suspicious[1:3]
    assert zeros.startswith(
        "all zeros: cls_token, patch_embed.proj.bias, blocks.#.norm1.bias, blocks.#.attn.qkv.bias and"
    )
    assert ones.startswith("constant, as before training: blocks.#.norm1.weight (1), ")
    same = weights()
    tensors = {name: same[name.replace("blocks.1.", "blocks.0.").replace("blocks.2.", "blocks.0.")] for name in same}
    found = inspect({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path)
    assert found.suspicious == ("blocks with the same weights: blocks.0 = blocks.1, blocks.0 = blocks.2",)


def test_statistics_are_over_finite_values(tmp_path: Path) -> None:
    tensors = {
        "some": torch.tensor([1.0, 3.0, float("nan"), float("inf")]),
        "none": torch.full((2, 2), float("nan")),
        "whole": torch.tensor([1, 2]),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "half": torch.tensor([2.0, 4.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(7.0),
    }
    torch.save(tensors, tmp_path / "weights.pth")
    found = inspect_file(tmp_path / "weights.pth")
    rows = {
        row.name: (row.mean, row.deviation, row.lowest, row.highest, row.nan, row.infinite) for row in found.tensors
    }
    assert rows == {
        "some": (2.0, 1.0, 1.0, 3.0, 1, 1),
        "none": (None, None, None, None, 4, 0),
        "whole": (1.5, 0.5, 1.0, 2.0, 0, 0),
        "truth": (0.5, 0.5, 0.0, 1.0, 0, 0),
        "complex": (1.5, 0.5, 1.0, 2.0, 0, 0),
        "half": (3.0, 1.0, 2.0, 4.0, 0, 0),
        "scalar": (7.0, 0.0, 7.0, 7.0, 0, 0),
    }
    assert [
        line.split() for line in found.format_report(every_tensor=True).splitlines() if line.startswith("some")
    ] == [["some", "(4,)", "float32", "2", "1", "1", "3"]]


LAYOUTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "vitrail": ("own", {"name": "DeiT-Ti-distilled"}, "distilled, two linear, 5 classes"),
    "timm": ("timm.safetensors", {"pool": "map", "class_token": False}, "linear, 5 classes on attention pooling (MAP)"),
    "deit": ("deit.pth", {"name": "DeiT-Ti"}, "linear, 5 classes"),
    "google": ("google.npz", {"head": "mlp", "activation": "gelu_tanh"}, "tanh layer and linear, 5 classes"),
    "hf": ("hf", {"norm_eps": 1e-12}, "linear, 5 classes"),
    "torchvision": ("torchvision.pth", {}, "linear, 5 classes"),
    "dino": ("dino.pth", {"classes": 0}, "none"),
    "mae": ("mae.pth", {"pool": "mean_norm"}, "linear, 5 classes"),
}


AMBIGUOUS_LAYOUTS = ("timm", "dino")  # whose files, as written here, do not specify the number of heads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_recognized(layout: str, tmp_path: Path) -> None:
    name, fields, head = LAYOUTS[layout]
    model = toy(**fields)
    how = vitrail.Preprocessing(image_size=32) if layout in ("vitrail", "hf") else None
    write(model, tmp_path / name, to=layout, preprocessing=how)
    known: dict[str, Any] = {} if layout in ("vitrail", "google", "hf") else {"heads": 2}
    found = inspect_file(tmp_path / name, **known)
    assert (found.layout, found.reason, found.head) == (layout, "", head)
    assert found.config == asdict(model.config)
    assert found.numbers == sum(parameter.numel() for parameter in model.parameters())
    assert found.kind == {".npz": "npz", ".pth": "pickle"}.get(Path(name).suffix, "safetensors")
    assert sum(group.count for group in found.groups) == len(found.tensors)
    assert max(group.count for group in found.groups) == SMALL["depth"]
    assert found.size > 4 * found.numbers
    assert not found.suspicious
    assert bool(found.assumed) == (layout in AMBIGUOUS_LAYOUTS)
    assert f"layout         {layout}\n" in str(found)
    json.dumps(asdict(found), allow_nan=False)


def test_nearest_preset_and_its_differences(tmp_path: Path) -> None:
    for name, fields, preset, differs in (
        ("ViT-Ti/16", {"classes": 37}, "vit_tiny_patch16_224", {"classes": 37}),
        ("ViT-Ti/16", {"image_size": (64, 32)}, "vit_tiny_patch16_224", {"image_size": (64, 32)}),
        ("ViT-Ti/16", {"depth": 1}, None, None),
        ("DeiT-Ti-distilled", {"dropout": 0.1}, "deit_tiny_distilled_patch16_224", {}),
    ):
        vitrail.save(vitrail.create(name, **fields), tmp_path / "own")
        found = inspect_file(tmp_path / "own")
        assert (found.preset, found.differs) == (preset, differs)
        expected = {"vit_tiny_patch16_224": f"vit, {preset} except ", None: "vit, not like any preset"}
        assert expected.get(preset, f"deit, {preset}\n") in str(found)


def test_contradictions_and_missing_preprocessing(tmp_path: Path) -> None:
    large = vitrail.Preprocessing(image_size=64)
    vitrail.save(toy(), tmp_path / "a", labels=list("abcde"), preprocessing=large, provenance={"by": "\x1b[31mme\n"})
    found = inspect_file(tmp_path / "a", heads=4)
    assert found.suspicious == (
        "preprocessing gives images of 64×64, the model expects 32×32",
        "heads is 2 in the file, not 4 as given",
    )
    assert "labels         5: a, b, c, d and 1 more\n" in str(found)
    assert "by=?[31mme?" in str(found)
    vitrail.save(toy(), tmp_path / "b")
    assert inspect_file(tmp_path / "b", image_size=[32, 32]).suspicious == (
        "the file does not specify its preprocessing",
    )
    gray = vitrail.Preprocessing(image_size=32, mean=(0.5,), std=(0.5,))
    vitrail.save(toy(), tmp_path / "c", preprocessing=gray)
    assert inspect_file(tmp_path / "c").suspicious == ("preprocessing gives images of 1 channels, the model expects 3",)


def test_warnings_and_ignored_tensors_of_the_reader(tmp_path: Path) -> None:
    tensors = {**weights(classes=0), "mask_token": torch.randn(1, 64)}
    torch.save({"teacher": tensors, "epoch": 3, "student": {}}, tmp_path / "run.pth")
    found = inspect_file(tmp_path / "run.pth")
    assert (found.wrapper, found.others, found.ignored) == ("teacher", ("epoch", "student"), ("mask_token",))
    assert (found.suspicious, found.assumed) == ((), {"heads": 1})
    assert "assumed        heads=1; not specified in the file; set heads=… to change it" in str(found)
    assert "tensors under 'teacher', other keys: epoch, student" in str(found)
    write(toy(), tmp_path / "hf", to="hf")
    card = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    card |= {"id2label": {"0": "a", "1": "b"}, "image_size": 64}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(card), "utf-8")
    assert any("2 labels for 5 classes" in each for each in inspect_file(tmp_path / "hf").suspicious)


def test_files_that_are_not_a_model_are_inspected(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["blocks.1.norm1.bias"]
    tensors["blocks.2.norm1.bias"] = torch.randn(65)
    found = inspect(tensors, tmp_path)
    assert (found.layout, found.family, found.head) == ("deit", "deit", None)
    assert "1 missing (blocks.1.norm1.bias); 1 of another shape (blocks.2.norm1.bias)" in found.reason
    assert [(group.count, group.shape) for group in found.groups if group.pattern == "blocks.#.norm1.bias"] == [
        (1, (64,)),
        (1, (65,)),
    ]
    found = inspect({**weights(), "neck.weight": torch.randn(3)}, tmp_path)
    assert (found.layout, found.family) == ("deit", None)
    assert "(neck.weight)" in str(found).replace("\n" + 15 * " ", " ")
    assert "are not those of a model of the layout google" in inspect(weights(), tmp_path, source="google").reason
    family = load_external_family(EXAMPLE)
    vitrail.save(family.build(family.presets["resmlp_tiny"]), tmp_path / "resmlp", family=family)
    found = inspect_file(tmp_path / "resmlp")
    assert found.family == family.name
    assert "if you trust it, add `trust_code`" in found.reason


def test_unknown_layouts(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", a=np.arange(6.0).reshape(2, 3), t=np.array(3))
    found = inspect_file(tmp_path / "some.npz")
    assert (found.layout, found.kind, found.numbers, found.dtypes) == (None, "npz", 7, {"float64": 1, "int64": 1})
    assert "layout         unknown\n" in str(found)
    save_file({}, tmp_path / "empty.safetensors")
    found = inspect_file(tmp_path / "empty.safetensors")
    assert "contains no tensors" in found.reason
    assert "tensors        0 with 0 values: none\n" in str(found)


def test_packed_dtypes(tmp_path: Path) -> None:
    packed = torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    small = torch.randn(2, 8).to(torch.float8_e4m3fn)
    torch.save({"a": packed, "b": packed.clone(), "c": small, "d": small.clone()}, tmp_path / "weights.pth")
    assert inspect_file(tmp_path / "weights.pth").suspicious == (
        "identical tensors: c = d",
        "mixed dtypes: 2 float4_e2m1fn_x2, 2 float8_e4m3fn",
    )


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file(weights(), whole)
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "text.pth").write_text("weights")
    torch.save({"model": weights(), "run": Harmful()}, tmp_path / "code.pth")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Harmful()))
    for name in ("cut.safetensors", "text.pth", "code.pth", "plain.pkl", "nowhere.pth", "."):
        with pytest.raises(CheckpointError) as error:
            inspect_file(tmp_path / name)
        assert "\n" not in str(error.value)
    mistakes: list[dict[str, Any]] = [{"source": "tim"}, {"hedas": 3}, {"classes": 3}, {"path": "x"}]
    for wrong in mistakes:
        with pytest.raises(ConfigError, match="unknown"):
            inspect_file(whole, **wrong)


def test_real_weights(shared: Callable[[str], Path]) -> None:
    found = inspect_file(shared("weights/deit_tiny_patch16_224.pth"))
    assert (found.layout, found.family, found.preset, found.differs) == ("deit", "deit", "deit_tiny_patch16_224", {})
    assert (found.numbers, found.dtypes, found.suspicious) == (5_717_416, {"float32": 152}, ())
    assert [g.count for g in found.groups if (g.pattern, g.shape) == ("blocks.#.attn.qkv.weight", (576, 192))] == [12]
    found = inspect_file(shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"))
    assert (found.layout, found.family, found.preset, found.differs) == ("timm", "vit", "vit_tiny_patch16_224", {})
    assert (found.suspicious, found.assumed) == ((), {})  # known from its name
    assert "assumed        nothing" in str(found)


def test_real_weights_of_a_convnet(shared: Callable[[str], Path]) -> None:
    found = inspect_file(shared("weights/resnet20-12fca82f.th"))
    assert (found.layout, found.preset, len(found.tensors), found.suspicious) == ("akamaster", "resnet20_cifar", 97, ())
    assert [group.count for group in found.groups if group.pattern == "module.layer2.#.conv1.weight"] == [1, 2]


def test_a_file_of_unknown_layout(tmp_path: Path) -> None:
    torch.save({"body.0.weight": torch.randn(4, 4), "body.0.bias": torch.randn(4)}, tmp_path / "weights.pth")
    found = inspect_file(tmp_path / "weights.pth")
    assert (found.layout, len(found.tensors), found.suspicious) == (None, 2, ())
    assert "has an unknown layout" in found.reason


def test_batch_counters_of_a_convnet_are_not_suspicious(tmp_path: Path) -> None:
    model = randomize_batch_norms(add_weight_noise(vitrail.create("resnet20_cifar")))
    vitrail.save(model, tmp_path / "model.th", to="akamaster")
    found = inspect_file(tmp_path / "model.th")
    assert (found.layout, found.preset, found.differs) == ("akamaster", "resnet20_cifar", {})
    assert found.head == "linear, 10 classes"
    assert not found.suspicious
    vitrail.save(
        randomize_batch_norms(add_weight_noise(vitrail.create("resnet18", stages=(1, 1, 1, 1)))), tmp_path / "own"
    )
    assert inspect_file(tmp_path / "own").preset is None
