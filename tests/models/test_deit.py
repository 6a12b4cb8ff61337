"""DeiT: two tokens, two heads, one output."""

import math
from dataclasses import replace

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
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


def test_softmax_fuses_the_heads_as_the_paper_says() -> None:
    """Their mean probability, as logits; the mean of their logits may have another top class."""
    model = add_weight_noise(DeiT(replace(DISTILLED, answer="softmax")), std=1.0)
    tokens = 3 * torch.randn(64, 8, 16)
    by_label, by_teacher = model.head_logits(tokens)
    fused = model.logits(tokens)
    torch.testing.assert_close(fused.exp(), (by_label.softmax(-1) + by_teacher.softmax(-1)) / 2)
    assert (fused.argmax(-1) != (by_label + by_teacher).argmax(-1)).any()
    batch = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(model(batch), model.logits(model.tokens(batch)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="answer is 'softmax' for a DeiT without heads"):
        DeiT(replace(DISTILLED, answer="softmax", classes=0))


AUTHORS = ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224"]


@pytest.mark.parametrize("name", AUTHORS)
def test_presets_are_initialized_as_by_their_authors(name: str) -> None:
    """0.02 for tokens, positions, heads and the linear maps of blocks, torch's for patches; nothing is cut."""
    torch.manual_seed(0)
    model = vitrail.create(name, depth=1)
    patches = 1 / math.sqrt(3 * 16 * 16)  # bound of a uniform distribution
    for key, weight in model.named_parameters():
        if "norm" in key:
            assert (weight == (1.0 if key.endswith("weight") else 0.0)).all(), key
        elif key.endswith("gamma"):
            assert (weight == (1e-5 if name.startswith("cait") else 1e-4)).all(), key
        elif key.startswith("patch_embed"):
            assert weight.abs().max() <= patches, key
            assert weight.std().item() == pytest.approx(patches / math.sqrt(3), rel=0.15), key
        elif key.endswith("bias"):
            assert not weight.any(), key
        else:
            few = weight.numel() < 1000  # tokens, maps between heads
            assert weight.std().item() == pytest.approx(0.02, rel=0.4 if few else 0.03), key
            if not few:
                assert (weight.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, rel=0.15), key


def test_initial_weights_of_other_deits_are_those_of_a_vit() -> None:
    """In a config the field is off; weights that are read do not depend on it."""
    model = DeiT(DISTILLED)
    assert not model.cls_token.any()
    assert not model.get_parameter("head.weight").any()
    other = DeiT(replace(DISTILLED, initialization="deit"))
    other.load_state_dict(model.state_dict())
    batch = torch.randn(2, 3, 8, 12)
    assert torch.equal(model.eval()(batch), other.eval()(batch))


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
