"""Learnable memory: old logits to the bit, the task token by explicit attention, what is trained, files and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_checks import measure_export_difference
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.checkpoint import read, write
from vitrail.errors import ConfigError
from vitrail.models.memory_vit import MemoryViT, add_memory
from vitrail.models.vit import ViT, ViTConfig

TOY = ViTConfig(image_size=(16, 24), patch_size=8, width=16, depth=3, heads=2, classes=5)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


def make(memory: int = 4, classes: int = 3) -> tuple[Any, Any]:
    """A ViT, and the same with memory that is not zero."""
    vit = add_weight_noise(ViT(TOY), std=0.2)
    model = add_memory(vit, memory, classes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.5)
    return vit, model.eval()


@torch.no_grad()
def test_the_old_answer_is_the_same_to_the_bit() -> None:
    (vit, model), x = make(), images()
    assert torch.equal(model.old_logits(x), vit.logits(vit.tokens(x)))
    assert torch.equal(model.feature_maps(x)[0], vit.feature_maps(x)[0])
    assert model(x).shape == (2, 3)
    torch.testing.assert_close(model(x), model.logits(model.tokens(x)))


@torch.no_grad()
def test_the_task_token_attends_to_all_tokens_and_to_memory() -> None:
    _, model = make()
    block, x = model.blocks[1], torch.randn(1, 8, 16)
    task, old = x[:, 1:2], torch.cat([x[:, :1], x[:, 2:]], dim=1)
    everything = torch.cat([task, old, block.memory], dim=1)  # (1, 12, 16)
    expected = task + block.attn(block.norm1(everything))[:, :1]
    expected = expected + block.mlp(block.norm2(expected))
    torch.testing.assert_close(block(x)[:, 1:2], expected)


@pytest.mark.parametrize(("memory", "added"), [(1, 9_984), (5, 46_848)])
def test_parameters_that_are_added_and_trained(memory: int, added: int) -> None:
    with torch.device("meta"):
        model = vitrail.create("memory_vit_base_patch32_224", memory=memory, classes=10)
        plain = vitrail.create("ViT-B/32")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    head = 768 * 10 + 10
    assert sum(weight.numel() for weight in trained) == added + head
    assert (
        sum(each.numel() for each in model.parameters())
        == sum(each.numel() for each in plain.parameters()) + added + head
    )


def test_every_trained_weight_gets_a_gradient() -> None:
    _, model = make()
    model.train()(images()).square().sum().backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
        assert weight.grad is None or weight.grad.any(), name


def test_memory_learns_while_the_vit_stays_the_same() -> None:
    torch.manual_seed(0)
    vit, model = make()
    x, labels = torch.randn(12, 3, 16, 24), torch.arange(12) % 3
    before = model.old_logits(x)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, losses = torch.optim.Adam(trained, lr=0.05), list[float]()
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(model.old_logits(x), before)
    assert torch.equal(model.blocks[0].attn.qkv.weight, vit.blocks[0].attn.qkv.weight)


def test_save_and_load_with_other_classes(tmp_path: Path) -> None:
    _, model = make()
    write(model, tmp_path / "own")
    x, back = images(), read(tmp_path / "own")
    assert torch.equal(back.model(x), model(x))
    assert [weight.requires_grad for weight in back.model.parameters()] == [
        weight.requires_grad for weight in model.parameters()
    ]
    other = read(tmp_path / "own", classes=7)
    assert other.report.initialised == ("head.weight", "head.bias")
    assert torch.equal(other.model.old_logits(x), model.old_logits(x))


def test_deit_is_extended_and_other_models_are_refused() -> None:
    deit = vitrail.create("DeiT-Ti", image_size=32, depth=1)
    assert isinstance(add_memory(deit, 2, 3), MemoryViT)
    refused: dict[str, Any] = {
        "registers is 2; expected 0": ViT(replace(TOY, registers=2)),
        "pool is 'mean'; expected 'class'": ViT(replace(TOY, pool="mean")),
        "activation is 'gelu_tanh'; expected 'gelu'": ViT(replace(TOY, activation="gelu_tanh")),
        "cannot be added to a CaiT; expected a plain ViT or DeiT": vitrail.create("CaiT-XXS24", image_size=32, depth=1),
        "cannot be added to a ResNet": vitrail.create("resnet20_cifar"),
    }
    for message, model in refused.items():
        with pytest.raises(ConfigError, match=message):
            add_memory(model, 2, 3)
    with pytest.raises(ConfigError, match="memory is 0; expected more than 0"):
        add_memory(ViT(TOY), 0, 3)


@pytest.mark.slow
def test_exported_model_gives_the_same_logits(tmp_path: Path) -> None:
    _, model = make()
    assert measure_export_difference(model, tmp_path) < 1e-4
