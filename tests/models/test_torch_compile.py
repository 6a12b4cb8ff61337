"""torch.compile, torch.export and recomputed activations work with every family."""

from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail

TOYS: dict[str, dict[str, Any]] = {
    "vit": {"name": "vit_tiny_patch16_224", "width": 32, "heads": 2},
    "vit, relative": {"name": "vit_tiny_patch16_224", "width": 32, "heads": 2, "positions": "relative"},
    "vit, rotary, mean": {
        "name": "vit_tiny_patch16_224",
        "width": 32,
        "heads": 2,
        "positions": "rotary",
        "pool": "mean",
    },
    "vit, map": {"name": "vit_tiny_patch16_224", "width": 32, "heads": 2, "pool": "map", "registers": 2},
    "deit": {"name": "deit_tiny_distilled_patch16_224", "width": 32, "heads": 2},
    "cait": {"name": "cait_xxs24_224", "width": 32, "heads": 2},
    "hybrid": {"name": "vit_tiny_r_s16_p8_224", "width": 32, "heads": 2},
    "linformer": {"name": "linformer_tiny_patch16_224", "width": 32, "heads": 2, "shared": "layers"},
    "axial": {"name": "axial_tiny_patch16_224", "width": 32, "heads": 2},
}


def toy(key: str, depth: int = 2) -> Any:
    fields = dict(TOYS[key])
    return add_weight_noise(vitrail.create(fields.pop("name"), image_size=64, depth=depth, classes=5, **fields))


FAST = ("vit, map", "hybrid", "axial")  # pooling by attention, convolutions, attention along axes
FAST_AND_SLOW = [key if key in FAST else pytest.param(key, marks=pytest.mark.slow) for key in TOYS]


@pytest.mark.parametrize("key", FAST_AND_SLOW)
def test_compile_without_a_graph_break(key: str) -> None:
    model, images = toy(key, depth=1), torch.randn(2, 3, 64, 64)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # a minute of compiling C++
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch's compiler
def test_compile_with_inductor_forward_and_backward() -> None:
    model, images = toy("vit").train(), torch.randn(2, 3, 64, 64)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    gradients: list[list[torch.Tensor]] = []
    for each in (model, compiled):
        model.zero_grad()
        each(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        for parameter in model.parameters():
            parameter.grad = None
    assert len(gradients[0]) == len(list(model.parameters()))
    for eager, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("key", FAST_AND_SLOW)
def test_export_with_any_batch(key: str) -> None:
    model = toy(key)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 64, 64),), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 5):
        images = torch.randn(size, 3, 64, 64)
        torch.testing.assert_close(program(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", ["vit", "deit", "hybrid"])
def test_recomputed_activations_give_equal_gradients(key: str) -> None:
    model, images = toy(key).train(), torch.randn(2, 3, 64, 64)
    gradients: list[list[torch.Tensor]] = []
    calls: list[bool] = []

    def note(*_: object) -> None:
        calls.append(model.blocks[0].recompute)

    model.blocks[0].attn.register_forward_hook(note)
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == len(list(model.parameters()))
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))
    assert calls == [False, True, True]
