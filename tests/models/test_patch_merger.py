"""PatchMerger: the paper's formula by explicit sums, the cost of the second half, files, export and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import read, write
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.patch_merger import MergedViT, PatchMerger, PatchMergerConfig
from vitrail.models.vit import ViT, ViTConfig

TOY = PatchMergerConfig(image_size=(16, 24), patch_size=8, width=16, depth=3, heads=2, merged=4, classes=5)


PHOTO = np.random.default_rng(0).random((16, 24, 3))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (16, 24)))


@torch.no_grad()
def test_merged_tokens_are_those_of_the_paper() -> None:
    """Y = softmax(WᵀXᵀ)·X, with the softmax over the tokens, with loops."""
    layer, x = PatchMerger(8, 3, bias=False).double(), torch.randn(1, 5, 8, dtype=torch.float64)
    found = layer(x)[0]
    for merged in range(3):
        scores = [math.exp(float(layer.weight[merged] @ x[0, token])) for token in range(5)]
        expected = sum(score * x[0, token] for token, score in enumerate(scores)) / sum(scores)
        torch.testing.assert_close(found[merged], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(layer.weights(x).sum(-1), torch.ones(1, 3, dtype=torch.float64))


@torch.no_grad()
def test_the_rest_is_a_vit() -> None:
    """With a merger that copies the only token, it equals the ViT of the mean."""
    config = replace(TOY, image_size=8, merged=1)
    model: Any = add_weight_noise(MergedViT(config), std=0.2)
    fields: Any = {"image_size": 8, "patch_size": 8, "width": 16, "depth": 3, "heads": 2, "classes": 5}
    vit = ViT(ViTConfig(**fields, pool="mean", class_token=False)).eval()
    vit.load_state_dict({name: each for name, each in model.state_dict().items() if name != "merger.weight"})
    x = images(8, 8)
    torch.testing.assert_close(model(x), vit(x))


@pytest.mark.parametrize(("size", "width"), [("tiny", 192), ("small", 384), ("base", 768)])
def test_merging_costs_few_parameters_and_saves_half_of_the_work(size: str, width: int) -> None:
    with torch.device("meta"):
        model = vitrail.create(f"patch_merger_{size}_patch16_224")
        plain = vitrail.create(f"vit_{size}_patch16_224", pool="mean", class_token=False)
        macs = [vitrail.summarize(each).macs for each in (model, plain)]
    counts = [sum(weight.numel() for weight in each.parameters()) for each in (model, plain)]
    assert counts[0] - counts[1] == 8 * width
    assert 0.5 < macs[0] / macs[1] < 0.55


def test_shapes() -> None:
    model = MergedViT(TOY)
    assert model.merge_after == 1
    assert MergedViT(replace(TOY, merge_after=2)).merge_after == 2
    assert MergedViT(replace(TOY, classes=0))(images()).shape == (2, 16)


def test_save_and_load_at_another_size(tmp_path: Path) -> None:
    model = add_weight_noise(MergedViT(TOY))
    write(model, tmp_path / "own")
    x = images()
    assert torch.equal(read(tmp_path / "own").model(x), model(x))
    loaded = read(tmp_path / "own", image_size=(32, 48), classes=3)
    assert loaded.report.resized.keys() == {"pos_embed"}
    same = add_weight_noise(MergedViT(replace(TOY, dynamic=True)))
    same.load_state_dict(model.state_dict())
    larger = images(32, 48)
    torch.testing.assert_close(loaded.model.feature_maps(larger)[0], same.feature_maps(larger)[0])


def test_what_is_not_possible_is_refused() -> None:
    model = MergedViT(TOY)
    with pytest.raises(ConfigError, match="no sequence of tokens: its merged tokens have no place in the image"):
        model.tokens(images())
    how = Preprocessing(image_size=(16, 24))
    for layer in (1, 2, "all"):
        with pytest.raises(
            ConfigError, match=rf"^token '1,2' is not a query in layer {layer}: from layer 1 on, patches"
        ):
            vitrail.Explainer(model, preprocessing=how).explain(PHOTO, "attention", layer=layer, token="1,2")


def explain(model: MergedViT, *args: Any, **options: Any) -> NDArray[Any]:
    return (
        vitrail.Explainer(model, preprocessing=Preprocessing(image_size=(16, 24))).explain(PHOTO, *args, **options).maps
    )


def compute_weights_step_by_step(model: Any, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The attention of each layer, (H, N, N), and the merger's weights, (M, n), with gradients; and the logits."""
    maps, merging = list[Tensor](), torch.empty(0)
    x, _ = model.embed(x)
    for number, block in enumerate(model.blocks):
        if number == model.merge_after:
            merging = (x @ model.merger.weight.T).softmax(1).mT
            x = merging @ x
        q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        maps.append((q @ k.mT / math.sqrt(8)).softmax(-1))
        x = x + block.attn.proj((maps[-1] @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return maps, merging, model.head(model.norm(x).mean(1))


@pytest.fixture(scope="module")
def subject() -> Any:
    """A model of one block before the merger and two after it, and its weights for the photo."""
    torch.manual_seed(0)
    model = add_weight_noise(MergedViT(TOY), std=0.3)
    pixels = vitrail.Explainer(model, preprocessing=Preprocessing(image_size=(16, 24))).loaded.make_batch([PHOTO])
    return model, *compute_weights_step_by_step(model, pixels)


def test_attention_after_the_merger_is_that_to_the_patches_it_merged(subject: Any) -> None:
    model, maps, merging, _ = subject
    assert merging.sum(-1).detach().numpy() == pytest.approx(1, abs=1e-6)
    found = explain(model, "attention", layer="all", head="all")  # (L, H, h, w)
    for head in range(2):
        first, *later = (each[0, head] for each in maps)
        expected = [merging[0].mean(0) @ first, *(each.mean(0) @ merging[0] for each in later)]
        for layer in range(3):
            np.testing.assert_allclose(found[layer, head].ravel(), expected[layer].detach(), rtol=1e-4)
    patch = explain(model, "attention", layer=0, token="1,2")[0, 0]
    np.testing.assert_allclose(patch.ravel(), maps[0].mean(1)[0, 5].detach(), rtol=1e-4)
    assert explain(model, "heads").shape == (1, 2, 2, 3)


@pytest.mark.parametrize("end", [0, 1, 2])
def test_rollout_is_a_product_with_the_weights_of_the_merger(subject: Any, end: int) -> None:
    model, maps, merging, _ = subject
    mixed = [(torch.eye(each.shape[-1]) + each[0].mean(0)) / 2 for each in maps]
    product = merging[0] @ mixed[0]  # (M, n)
    for each in mixed[1 : end + 1]:
        product = each @ product
    assert product.sum(-1).detach().numpy() == pytest.approx(1, abs=1e-6)
    found = explain(model, "rollout", layer=end)[0, 0]
    np.testing.assert_allclose(found.ravel(), product.mean(0).detach(), rtol=1e-4)
    np.testing.assert_allclose(explain(model, "rollout", layer="all")[end, 0], found, rtol=1e-5)


def test_gradient_rollout_goes_through_the_weights_of_the_merger(subject: Any) -> None:
    model, maps, merging, logits = subject
    gradients = torch.autograd.grad(logits[0, 3], maps, retain_graph=True)
    first, *later = ((each * gradient).clamp(min=0)[0].mean(0) for each, gradient in zip(maps, gradients, strict=True))
    product = merging[0] @ (torch.eye(6) + first)
    for each in later:
        product = product + each @ product
    expected = (product - merging[0]).mean(0).detach()
    found = explain(model, of_class=3)  # grad-rollout is the default
    np.testing.assert_allclose(found[0, 0].ravel(), expected / expected.sum(), rtol=1e-3)
