"""Names of prefix tokens, the tokens that the head reads, and token states after each block."""

import pytest
import torch
from support.attention_models import make_attention_model, random_image_batch

from vitrail.inspection.attention.capture import (
    capture_attention,
    capture_tokens,
    compute_classifier_token_weights,
)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("learned stem", ("class",)),
        ("learned with registers", ("class", "register0", "register1")),
        ("mean without class token", ()),
        ("distilled", ("class", "distill")),
        ("hybrid", ("class",)),
        ("cct", ()),
    ],
)
def test_names_of_prefix_tokens(case: str, names: tuple[str, ...]) -> None:
    assert make_attention_model(case).prefix_tokens == names


def test_registers_without_a_class_token() -> None:
    model = make_attention_model("mean", class_token=False, registers=2)
    assert model.prefix_tokens == ("register0", "register1")


@pytest.mark.parametrize("case", ["learned with registers", "mean", "mean, then norm", "map", "distilled", "cct"])
def test_tokens_that_the_head_reads(case: str) -> None:
    """Change one token at a time: the logits change only if the head reads it."""
    model, pixels = make_attention_model(case), random_image_batch()
    with capture_attention(model) as captured, torch.no_grad():
        tokens = model.tokens(pixels)
        answer = model.logits(tokens)
        shares = compute_classifier_token_weights(captured)
        assert shares.shape[1] == captured.token_count == tokens.shape[1]
        assert (shares.sum(-1) - 1).abs().max() <= 1e-5
        for number in range(captured.token_count):
            other = tokens.clone()
            other[:, number] += torch.randn(tokens.shape[-1])
            assert torch.equal(model.logits(other), answer) == bool((shares[:, number] == 0).all())


@pytest.mark.parametrize("case", ["map", "map with class token and registers", "cct"])
def test_weights_of_attention_pooling(case: str) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    with capture_attention(model) as captured, torch.no_grad():
        tokens = model.tokens(pixels)
        model.logits(tokens)
    assert captured.pool_shares is not None
    assert torch.equal(compute_classifier_token_weights(captured), captured.pool_shares)
    patches = tokens[:, captured.prefix :]
    if case == "cct":
        expected = torch.softmax(patches @ model.attn_pool.weight[0] + model.attn_pool.bias, dim=1)
        assert (model.attn_pool(patches) - (expected[:, :, None] * patches).sum(1)).abs().max() <= 1e-5
    else:
        pool = model.attn_pool
        q, k = pool.q(pool.latent).view(2, 8), pool.kv(patches)[..., :16].view(2, 6, 2, 8)
        expected = (torch.einsum("hk,bnhk->bhn", q, k) / 8**0.5).softmax(-1).mean(1)
    assert (captured.pool_shares[:, captured.prefix :] - expected).abs().max() <= 1e-5
    assert captured.pool_shares[:, : captured.prefix].abs().sum() == 0


@pytest.mark.parametrize("answer", ["both", "class", "distill"])
def test_tokens_read_by_a_distilled_head(answer: str) -> None:
    model = make_attention_model("distilled", answer=answer)
    with capture_attention(model, []) as captured, torch.no_grad():
        model(random_image_batch())
    expected = {"both": [0.5, 0.5], "class": [1.0, 0.0], "distill": [0.0, 1.0]}[answer]
    assert compute_classifier_token_weights(captured)[0, :2].tolist() == expected


@pytest.mark.parametrize("case", ["learned stem", "learned layers", "mean", "distilled", "hybrid", "cct"])
def test_token_states(case: str) -> None:
    model = make_attention_model(case)
    with capture_tokens(model) as states, torch.no_grad():
        model(random_image_batch(1))
        tokens = model.tokens(random_image_batch())
    assert len(states) == 5  # embedding, three blocks, norm: of the last pass alone
    assert torch.equal(states[-1], tokens)
    assert torch.equal(model.norm(states[-2]), tokens)
    with torch.no_grad():
        if case != "learned layers":
            assert torch.equal(model.blocks[0](states[0], (2, 3)), states[1])
        assert torch.equal(
            model.blocks[2](states[2] + (model.tables((2, 3))[2] if "layers" in case else 0), (2, 3)), states[3]
        )
    with capture_tokens(model, lambda each: each.square().sum(-1)) as lengths, torch.no_grad():
        model.tokens(random_image_batch())
    assert all(torch.equal(mine, each.square().sum(-1)) for mine, each in zip(lengths, states, strict=True))
