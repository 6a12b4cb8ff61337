"""DeiT: two tokens, two heads, one output."""

from dataclasses import replace

import pytest
import torch
from support.noisy_weights import add_weight_noise

from vitrail.base.errors import ConfigError
from vitrail.layers.positions import resample
from vitrail.models.deit import DeiT, DeiTConfig

TOY = DeiTConfig(image_size=(8, 12), patch_size=4, width=16, depth=2, heads=2, classes=5)
DISTILLED = replace(TOY, distilled=True)


def test_distilled_model_has_two_more_positions_than_patches() -> None:
    assert DeiT(DISTILLED).pos_embed.shape == (1, 2 + 6, 16)
    assert DeiT(TOY).pos_embed.shape == (1, 1 + 6, 16)
    assert DeiT(replace(TOY, prefix_positions=False)).pos_embed.shape == (1, 6, 16)


def test_output_is_the_mean_of_both_heads() -> None:
    model, batch = add_weight_noise(DeiT(DISTILLED)), torch.randn(2, 3, 8, 12)
    by_label, by_teacher = model.head_logits(model.encode(batch, queries=2))
    assert not torch.allclose(by_label, by_teacher)
    torch.testing.assert_close(model(batch), (by_label + by_teacher) / 2)
    tokens = model.tokens(batch)
    assert tokens.shape == (2, 8, 16)
    torch.testing.assert_close(by_label, model.head(tokens[:, 0]), rtol=1e-5, atol=1e-6)
    assert model.head_dist is not None
    torch.testing.assert_close(by_teacher, model.head_dist(tokens[:, 1]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(batch), model.logits(tokens), rtol=1e-5, atol=1e-6)
    assert model.train()(batch).shape == (2, 5)


def test_both_tokens_get_gradients_and_differ_initially() -> None:
    model = DeiT(DISTILLED)
    assert model.dist_token is not None
    assert not torch.equal(model.cls_token, model.dist_token)
    by_label, by_teacher = model.head_logits(add_weight_noise(model).tokens(torch.randn(2, 3, 8, 12)))
    (by_label.square().sum() + by_teacher.square().sum()).backward()
    for token in (model.cls_token, model.dist_token):
        assert token.grad is not None
        assert token.grad.abs().sum() > 0


def test_a_plain_model_has_one_head() -> None:
    model, batch = add_weight_noise(DeiT(TOY)), torch.randn(2, 3, 8, 12)
    (logits,) = model.head_logits(model.encode(batch, queries=1))
    assert torch.equal(logits, model(batch))


def test_dynamic_size_keeps_both_prefix_positions() -> None:
    model = add_weight_noise(DeiT(replace(DISTILLED, dynamic=True)))
    batch = torch.randn(2, 3, 16, 8)
    larger = DeiT(replace(DISTILLED, image_size=(16, 8)))
    state = model.state_dict()
    state["pos_embed"] = resample(state["pos_embed"], (2, 3), (4, 2))
    assert torch.equal(state["pos_embed"][:, :2], model.pos_embed[:, :2])
    larger.load_state_dict(state)
    assert torch.equal(model(batch), larger.eval()(batch))
    with pytest.raises(ConfigError, match=r"expected 8×12, which the model was built for"):
        DeiT(DISTILLED)(torch.randn(2, 3, 16, 8))


def test_model_without_head_returns_features() -> None:
    batch = torch.randn(2, 3, 8, 12)
    plain, distilled = (
        add_weight_noise(DeiT(replace(TOY, classes=0))),
        add_weight_noise(DeiT(replace(DISTILLED, classes=0))),
    )
    torch.testing.assert_close(plain(batch), plain.tokens(batch)[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(distilled(batch), distilled.tokens(batch)[:, :2].mean(1), rtol=1e-5, atol=1e-6)
