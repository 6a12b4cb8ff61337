"""Gradients with respect to captured attention equal those of autograd through unfused attention."""

from typing import Any

import pytest
from support.attention_models import make_attention_model, random_image_batch, unfused_attention
from torch import Tensor

from vitrail.base.errors import VitrailError
from vitrail.inspection.attention.capture import capture_attention


def reference(model: Any, pixels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Maps and the gradients of the top logits, by autograd through unfused attention."""
    with unfused_attention() as weights:
        logits = model(pixels)
    logits.amax(-1).sum().backward()
    model.zero_grad(set_to_none=True)
    gradients = [each.grad for each in weights]
    return [each.detach() for each in weights], [each for each in gradients if each is not None]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        "learned stem",
        "relative with registers",
        "rotary",
        "mean",
        "map",
        "distilled",
        "hybrid",
        "cct",
        "cct with neighbors",
    ],
)
def test_gradients_match_autograd(case: str, frozen: bool) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    maps, gradients = reference(model, pixels)
    model.requires_grad_(not frozen)
    with capture_attention(model, gradients=True) as captured:
        logits = model(pixels)
    found = captured.compute_gradients(logits.amax(-1).sum())
    assert len(found) == len(gradients) == 3
    for layer, (mine, theirs) in enumerate(zip(found, gradients, strict=True)):
        rows = theirs.shape[2]
        assert mine.shape == captured.maps[layer].shape
        assert (captured.maps[layer][:, :, :rows] - maps[layer]).abs().max() <= 1e-5
        assert (mine[:, :, :rows] - theirs).abs().max() <= 1e-5
        assert theirs.abs().max() > 1e-3
        assert mine[:, :, rows:].abs().sum() == 0  # rows that were not computed
    assert found[2].shape[2] > gradients[2].shape[2] or case in ("mean", "map", "cct", "cct with neighbors")
    assert all(each.grad is None for each in model.parameters())
    assert all(each.requires_grad != frozen for each in model.parameters())
    assert pixels.grad is None
    assert not pixels.requires_grad


def test_gradients_of_selected_layers_and_heads() -> None:
    model, pixels = make_attention_model(), random_image_batch()
    _, gradients = reference(model, pixels)
    with capture_attention(model, [2, 0], [1], gradients=True) as captured:
        logits = model(pixels)
    for _ in range(2):  # several classes in turn
        last, first = captured.compute_gradients(logits.amax(-1).sum())
        assert last.shape == first.shape == (2, 1, 7, 7)
        assert (first - gradients[0][:, [1]]).abs().max() <= 1e-5
        assert (last[:, :, :1] - gradients[2][:, [1]]).abs().max() <= 1e-5


def test_gradients_with_keep() -> None:
    model, pixels = make_attention_model(), random_image_batch()
    _, gradients = reference(model, pixels)
    with capture_attention(model, keep=lambda weights, _: weights.mean().item(), gradients=True) as captured:
        logits = model(pixels)
    assert all(isinstance(each, float) for each in captured.maps)
    found = captured.compute_gradients(logits.amax(-1).sum())
    assert (found[0] - gradients[0]).abs().max() <= 1e-5
    assert found[2].shape == (2, 2, 7, 7)


def test_gradients_with_activation_checkpointing() -> None:
    model, pixels = make_attention_model(), random_image_batch()
    _, gradients = reference(model, pixels)
    for block in model.blocks:
        block.recompute = True
    with capture_attention(model, gradients=True) as captured:
        logits = model(pixels)
        found = captured.compute_gradients(logits.amax(-1).sum())
    for mine, theirs in zip(found, gradients, strict=True):
        assert (mine[:, :, : theirs.shape[2]] - theirs).abs().max() <= 1e-5


def test_gradients_without_capturing_them_are_an_error() -> None:
    model = make_attention_model()
    with capture_attention(model) as captured:
        logits = model(random_image_batch())
    with pytest.raises(VitrailError, match="run a forward pass with gradients enabled inside"):
        captured.compute_gradients(logits.sum())
