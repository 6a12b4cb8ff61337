"""The exported module takes pixels instead of normalized images and returns the outputs of the model."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_exports import (
    PREPROCESSING,
    TOY_FIELDS,
    make_toy_model,
    random_pixels,
    reference_probabilities,
    softmax_rows,
)
from torch import nn

from vitrail.base.errors import ConfigError
from vitrail.export.torch_modules import (
    ExportModule,
    PixelPatchEmbed,
    check_output_available,
    compute_logits_or_features,
)
from vitrail.layers.embed import PatchEmbed


@pytest.mark.parametrize("name", TOY_FIELDS)
def test_logits_from_pixels_match_the_model(name: str) -> None:
    """For every family; the normalization is folded into the first layer where that is exact."""
    model, pixels = make_toy_model(name), random_pixels()
    module = ExportModule(model, PREPROCESSING, fused=False)
    with torch.inference_mode():
        found = module(torch.from_numpy(pixels)).numpy()
    expected = reference_probabilities(model, pixels)
    assert np.ptp(expected, axis=1).min() > 0.05, "equal probabilities would agree with anything"
    assert np.abs(softmax_rows(found) - expected).max() < 1e-5
    assert module.folds_normalization == (type(getattr(model, "patch_embed", None)) is PatchEmbed)


def test_given_model_is_not_modified() -> None:
    model = make_toy_model("vit")
    before, weights = repr(model), deepcopy(model.state_dict())
    ExportModule(model, PREPROCESSING, fused=True)
    assert repr(model) == before
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize("bias", [True, False])
def test_pixel_patch_embed_includes_the_normalization(bias: bool) -> None:
    embed = PatchEmbed(8, (4, 2), 3)
    nn.init.normal_(embed.proj.weight)
    nn.init.normal_(embed.proj.bias)  # pyright: ignore[reportArgumentType]
    if not bias:
        embed.proj.bias = None
    preprocessing = replace(PREPROCESSING, mean=(0.1, 0.5, 0.9), std=(0.1, 0.5, 1.0))
    pixels = torch.from_numpy(random_pixels(2, (8, 6))).permute(0, 3, 1, 2).float()
    mean, std = (torch.tensor(each)[:, None, None] for each in (preprocessing.mean, preprocessing.std))
    with torch.inference_mode():
        expected = embed((pixels / 255 - mean) / std)
        found = PixelPatchEmbed(embed, preprocessing)(pixels)
    assert found.shape == expected.shape == (2, 6, 8)
    assert torch.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["vit", "map", "rotary", "distilled", "hybrid", "cct", "cait", "resnet", "regnety"])
def test_features_match_the_tokens(name: str) -> None:
    model, images = make_toy_model(name), torch.randn(2, 3, 48, 32)
    with torch.inference_mode():
        tokens = model.tokens(images)
        assert torch.equal(compute_logits_or_features(model, images, "tokens"), tokens)
        assert torch.allclose(
            compute_logits_or_features(model, images, "mean"), tokens[:, model.prefix :].mean(1), atol=1e-6
        )
        if "class" in model.prefix_tokens:
            assert torch.allclose(compute_logits_or_features(model, images, "class"), tokens[:, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("model", "output", "message"),
    [
        (make_toy_model("vit", classes=0), "logits", "has no head; expected one with classes"),
        (nn.Linear(2, 2), "tokens", "Linear has no tokens"),
        (make_toy_model("mean"), "class", "without a class token; use mean or tokens"),
        (make_toy_model("cct"), "class", "without a class token"),
        (make_toy_model("resnet"), "class", "without a class token"),
    ],
)
def test_unavailable_outputs_are_refused(model: Any, output: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_output_available(model, output)


def test_features_of_a_model_without_a_head() -> None:
    check_output_available(make_toy_model("vit", classes=0), "class")
