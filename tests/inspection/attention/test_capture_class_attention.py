"""CaiT: mixed heads and a class token that joins late; undefined methods are refused with the reason."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.attention_models import SIZE, VIT_FIELDS, count_hooks, random_image_batch
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.image_items import ImageItem
from vitrail.inspection.attention.capture import (
    capture_attention,
    capture_tokens,
    compute_classifier_token_weights,
    find_attention_layers,
)
from vitrail.inspection.attention.rollout import gradient_rollout
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.patch_removal import can_drop_tokens, predict_without_patches
from vitrail.inspection.model_figures import look
from vitrail.layers import attention as layers
from vitrail.layers.attention import merge_heads
from vitrail.models.cait import TalkingHeads
from vitrail.report.model_report import build_model_report

HOW = vitrail.Preprocessing(image_size=SIZE)
NO_SHARES = "its heads are mixed after the softmax, so attention rows do not sum to 1"


def cait(**fields: Any) -> Any:
    return add_weight_noise(vitrail.create("cait_xxs24_224", **{**VIT_FIELDS, "layer_scale": 0.5, **fields}), std=0.3)


def explainer(**fields: Any) -> Explainer:
    return Explainer(cait(**fields), preprocessing=HOW)


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8))


@contextmanager
def by_autograd() -> Generator[list[Tensor]]:
    """Attention weights of every layer, with gradients from autograd."""
    captured, talk = list[Tensor](), TalkingHeads.weigh

    def kept(weights: Tensor) -> Tensor:
        weights.retain_grad()
        captured.append(weights)
        return weights

    def weigh(self: TalkingHeads, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        return kept(talk(self, q, k, mask))

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
        return kept(layers.attention_weights(q, k, mask)) @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TalkingHeads, "weigh", weigh)
        patch.setattr(layers, "attention", attention)
        yield captured


@pytest.mark.parametrize("size", [SIZE, (64, 16)])
def test_maps_times_v_equal_the_heads_outputs(size: tuple[int, int]) -> None:
    model, given = cait(dynamic=True), dict[int, Tensor]()

    def write(number: int, _: Any, args: tuple[Tensor, ...]) -> None:
        given[number] = args[0].detach()

    for number, layer in enumerate(find_attention_layers(model)):
        layer.proj.register_forward_pre_hook(partial(write, number))
    with capture_attention(model, gradients=True) as captured:
        model(random_image_batch(size=size))
    patches = size[0] * size[1] // 256
    assert captured.patch_grid == (size[0] // 16, size[1] // 16)
    assert (captured.token_count, captured.prefix, captured.late_tokens) == (1 + patches, 1, 1)
    assert compute_classifier_token_weights(captured).tolist() == [[1.0] + [0.0] * patches]
    maps = captured.maps
    assert [each.shape[2:] for each in maps] == 3 * [(1 + patches, 1 + patches)] + 2 * [(1, 1 + patches)]
    for layer, weights in enumerate(maps):
        inner = weights[..., 1:, 1:] if layer < 3 else weights
        assert (merge_heads(inner @ captured.values[layer]) - given[layer]).abs().max() <= 1e-5
        assert given[layer].abs().max() > 0.05
        if layer < 3:
            assert (
                weights[..., 0, :].abs().sum() == weights[..., :, 0].abs().sum() == 0
            )  # the class token has not joined yet
            assert (inner.sum(-1) - 1).abs().max() > 0.05  # rows do not sum to 1
        else:
            assert (weights.sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_match_autograd(frozen: bool) -> None:
    model, pixels = cait(), random_image_batch()
    with by_autograd() as weights:
        model(pixels).amax(-1).sum().backward()
    expected = [each.grad for each in weights]
    model.zero_grad(set_to_none=True)
    model.requires_grad_(not frozen)
    with capture_attention(model, gradients=True) as captured:
        logits = model(pixels)
    found = captured.compute_gradients(logits.amax(-1).sum())
    assert len(found) == len(expected) == 5
    for layer, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert theirs is not None
        assert mine.shape == captured.maps[layer].shape
        assert (mine[..., -theirs.shape[2] :, -theirs.shape[3] :] - theirs).abs().max() <= 1e-5
        assert theirs.abs().max() > 1e-4


def test_gradient_rollout_matches_a_reference() -> None:
    """Relevance flows from the patches through their layers to the class token at the end."""
    subject, pixels = explainer(), random_image_batch(1)
    with capture_attention(subject.model, gradients=True) as captured:
        logits = subject.model(pixels)
    gradients = [each.numpy() for each in captured.compute_gradients(logits.max())]
    maps = [each.numpy() for each in captured.maps]
    result = np.eye(7)
    for layer, gradient in zip(maps, gradients, strict=True):
        step = np.zeros((7, 7))
        step[: layer.shape[2]] = np.maximum(gradient * layer, 0)[0].mean(0)
        result = result + step @ result
    np.testing.assert_allclose(gradient_rollout(maps, gradients)[0], result, rtol=1e-5, atol=1e-7)
    row = result[0, 1:] / result[0, 1:].sum()
    _, (found,) = subject.compute_maps(pixels, subject.resolve_options(ExplainOptions(method="grad-rollout")))
    np.testing.assert_allclose(found[0, 0].ravel(), row, rtol=1e-4)
    assert row.std() > 0.01


def test_half_precision_and_selected_heads() -> None:
    model = cait().bfloat16()
    with capture_attention(model, [0, -1], [1], gradients=True) as captured:
        logits = model(random_image_batch().bfloat16())
    assert [each.shape for each in captured.maps] == [(2, 1, 7, 7), (2, 1, 1, 7)]
    assert all(each.dtype == torch.float32 for each in captured.maps)
    assert [each.shape for each in captured.compute_gradients(logits.sum())] == [(2, 1, 7, 7), (2, 1, 1, 7)]
    assert count_hooks(model) == 0


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (ExplainOptions(), "method 'rollout' is undefined for this model"),
        (ExplainOptions(layer=1), "method 'rollout' is undefined for this model"),
        (ExplainOptions(method="attention", layer=2), "method 'attention' is undefined for this model"),
        (ExplainOptions(method="attention", layer="all"), "method 'attention' is undefined for this model"),
    ],
)
def test_undefined_methods_are_refused_with_the_reason(question: ExplainOptions, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explainer().resolve_options(question)
    assert str(caught.value) == f"{says}: {NO_SHARES}; use 'grad-rollout', or 'attention' of layer 3 or 4"


def test_supported_methods() -> None:
    subject = explainer()
    assert subject.default_method == "grad-rollout"
    assert subject.explain(photo()).options.method == "grad-rollout"
    captured = subject.explain(photo(), "attention", head="all")
    assert captured.maps.shape == (1, 2, 2, 3)
    np.testing.assert_allclose(captured.maps.sum((2, 3)), 1, rtol=1e-5)
    norms = subject.explain(photo(), "norms", layer="all").maps  # (layers, 1, h, w)
    assert norms.shape == (5, 1, 2, 3)
    np.testing.assert_allclose(norms[2], norms[3], rtol=1e-6)  # class attention does not change patches
    assert not np.allclose(norms[1], norms[2])
    assert explainer(classes=0).default_method == "attention"
    assert explainer(classes=0).explain(photo()).maps.shape == (1, 1, 2, 3)
    assert (
        Explainer(vitrail.create("vit_tiny_patch16_224", **VIT_FIELDS), preprocessing=HOW).default_method
        == "grad-rollout"
    )


def test_states_of_the_tokens() -> None:
    model = cait()
    with capture_tokens(model) as states, torch.no_grad():
        tokens = model.tokens(random_image_batch())
    assert [each.shape[1] for each in states] == [6, 6, 6, 6, 7, 7, 7]
    assert torch.equal(states[-1], tokens)
    assert torch.equal(states[3], states[5][:, 1:])


def test_patches_can_be_removed() -> None:
    model, pixels = cait(), random_image_batch()
    gone = np.array([[[True, False, False], [False, False, True]], [[False, True, False], [True, False, False]]])
    assert can_drop_tokens(model)
    other = torch.where(torch.from_numpy(np.kron(gone, np.ones((1, 16, 16)))[:, None] > 0), pixels + 9, pixels)
    torch.testing.assert_close(
        predict_without_patches(model, other, gone), predict_without_patches(model, pixels, gone)
    )
    assert not torch.allclose(predict_without_patches(model, pixels, gone), model(pixels), atol=1e-3)


@pytest.mark.parametrize("classes", [5, 0])
def test_look_and_report(classes: int, tmp_path: Path) -> None:
    subject = explainer(classes=classes)
    result = look(subject, [photo(n) for n in range(5)], batch=2)
    expected = {
        "position_similarity",
        "filters",
        "token_norms",
        "patch_pca",
        "alignment",
        *(["occlusion"] if classes else []),
    }
    assert {figure.name for figure in result.figures} == expected
    assert result.notes[0] == f"attention distance: not defined, since {NO_SHARES}"
    norms = result["token_norms"].arrays["norms"]  # (S, B, N)
    assert norms.shape == (6, 5, 7)
    assert np.isnan(norms[:4, :, 0]).all()
    assert np.isfinite(norms[4:]).all()
    assert np.isfinite(norms[..., 1:]).all()
    assert result["token_norms"].save(tmp_path, (".png",))[0].stat().st_size > 1000  # also with a late class token
    _, _, sections = build_model_report(
        subject, "a model", [ImageItem(photo(n), f"photo {n}") for n in range(2)], explained=1
    )
    assert "What the model looked at" in [section.title for section in sections]


def test_queries_by_layer() -> None:
    """The class token is not a query before it joins, and the only query afterwards."""
    subject = explainer(depth=2)  # and two layers of class attention
    image = np.zeros((*SIZE, 3))
    for layer in (0, 1, "all"):
        with pytest.raises(
            ConfigError, match=f"^layer {layer} comes before the class token joins; expected 2 to 3, or -1$"
        ):
            subject.explain(image, "grad-rollout", layer=layer)
    says = "^token '0,1' is not a query in layer 3, where only the class token is; use 'class'$"
    with pytest.raises(ConfigError, match=says):
        subject.explain(image, "attention", layer=3, token="0,1")
    assert subject.explain(image, "attention", layer=3, token="class").map.sum() > 0
