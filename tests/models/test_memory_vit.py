"""Learnable memory: old logits to the bit, the task token by explicit attention, what is trained, files and errors."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.inspection.explain.explain_files import check_by_occlusion
from vitrail.layers.attention import SelfAttention
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
    plain = SelfAttention(16, 2)
    plain.load_state_dict(block.attn.state_dict())
    expected = task + plain(block.norm1(everything))[:, :1]
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
    assert other.report.initialized == ("head.weight", "head.bias")
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


PHOTOS = [np.random.default_rng(n).random((16, 24, 3)) for n in range(2)]


@pytest.fixture(scope="module")
def subject() -> Any:
    """An explainer, and the weights of its layers for the first photo, (H, 12, 12): class, task, memory, patches."""
    torch.manual_seed(0)
    vit, model = make()
    explainer = vitrail.Explainer(model, preprocessing=vitrail.Preprocessing(image_size=(16, 24)))
    (x, _), maps = model.embed(explainer.loaded.make_batch(PHOTOS[:1])), list[Tensor]()
    for block in model.blocks:
        seen = block.norm1(torch.cat([x[:, :2], block.memory, x[:, 2:]], dim=1))
        q, k, _ = block.attn.qkv(seen).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT)[0] / 8**0.5
        weights = torch.eye(12).repeat(2, 1, 1)  # memory keeps what it gets
        weights[:, 1] = scores[:, 1].softmax(-1)
        old = [0, *range(6, 12)]  # neither the task token nor memory
        for query in old:
            weights[:, query, 1:6] = 0
            weights[:, query, old] = scores[:, query, old].softmax(-1)
        maps.append(weights.detach())
        x = block(x)
    return explainer, vit, torch.stack(maps)


@torch.no_grad()
def test_maps_of_the_task_token_have_memory_and_the_others_are_of_the_old_vit(subject: Any) -> None:
    explainer, vit, expected = subject
    pixels = explainer.loaded.make_batch(PHOTOS[:1])
    with capture_attention(explainer.model) as captured, capture_attention(vit) as old:
        explainer.model(pixels)
        vit(pixels)
    found = torch.stack(captured.maps)[:, 0]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 2, 12))
    rows = [0, *range(6, 12)]
    torch.testing.assert_close(found[:, :, rows][..., rows], torch.stack(old.maps)[:, 0])
    assert captured.prefix == 6


def test_attention_and_the_share_of_memory(subject: Any) -> None:
    explainer, _, weights = subject
    found = explainer.explain(PHOTOS[0], "attention", layer="all", head="all")
    task = weights[:, :, 1].numpy()  # (L, H, 12)
    patches = task[..., 6:] / task[..., 6:].sum(-1, keepdims=True)
    np.testing.assert_allclose(found.maps, patches.reshape(3, 2, 2, 3), rtol=1e-4)
    np.testing.assert_allclose(found.memory, task[..., 2:6].sum(-1), rtol=1e-4)
    assert found.titles[1][0] == f"layer 1, head 0, memory {task[1, 0, 2:6].sum():.0%}"
    assert f"On average, {task[..., 2:6].sum(-1).mean():.1%} of the attention is on memory" in found.figure.caption
    patch = explainer.explain(PHOTOS[0], "heads", layer=1, token="1,0")
    seen = weights[1, :, 9, 6:].numpy()
    np.testing.assert_allclose(patch.maps[0].reshape(2, 6), seen / seen.sum(-1, keepdims=True), rtol=1e-4)
    assert patch.memory is not None
    assert not patch.memory.any()  # patches do not attend to it
    assert explainer.explain(PHOTOS[0], "norms").memory is None


def test_rollout_is_the_product_of_all_layers_and_ends_in_memory(subject: Any) -> None:
    explainer, _, weights = subject
    product = torch.eye(12)
    for layer in weights:
        product = (torch.eye(12) + layer.mean(0)) / 2 @ product
    row, found = product[1].numpy(), explainer.explain(PHOTOS[0], "rollout")
    np.testing.assert_allclose(found.map.ravel(), row[6:] / row[6:].sum(), rtol=1e-4)
    np.testing.assert_allclose(found.memory, [[row[2:6].sum()]], rtol=1e-4)


def test_gradients_are_those_of_the_probabilities(subject: Any) -> None:
    """Changing one probability changes the logit by its gradient: finite differences in float64."""
    explainer, _, _ = subject
    model = copy.deepcopy(explainer.model).double()
    pixels = explainer.loaded.make_batch(PHOTOS[:1]).double()
    with capture_attention(model, gradients=True) as captured:
        score = model(pixels)[0, 1]
        gradients = captured.compute_gradients(score)
    values = captured.values[1]  # (1, 2, 12, 8)
    for query, key in ((1, 4), (1, 8), (7, 0)):  # from the task token to memory and to a patch, between old tokens

        def nudge(_: Any, given: tuple[Tensor], query: int = query, key: int = key) -> Tensor:
            outputs = given[0].clone()
            outputs[0, query, 8:] += 1e-5 * values[0, 1, key]  # A·v of head 1
            return outputs

        with torch.no_grad(), model.blocks[1].attn.proj.register_forward_pre_hook(nudge):
            change = (model(pixels)[0, 1] - score).item() / 1e-5
        assert gradients[1][0, 1, query, key].item() == pytest.approx(change, rel=1e-3, abs=1e-7)


def test_figures_and_the_check_by_occlusion(subject: Any) -> None:
    explainer, _, _ = subject
    figures = vitrail.look(explainer, PHOTOS)
    assert {each.name for each in figures.figures} >= {"attention_distance", "token_norms", "occlusion"}
    explained = explainer.explain(PHOTOS[0])
    assert explained.options.method == "grad-rollout"
    assert 0 < check_by_occlusion(explainer, PHOTOS[0], explained).without_most < 1
