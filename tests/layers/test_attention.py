"""Attention equals explicit sums, the fused kernel equals weights times values, and masks leak nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.noisy_weights import add_weight_noise
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import (
    Attention,
    SelfAttention,
    attention,
    attention_weights,
    causal_mask,
    join_masks,
    merge_heads,
)
from vitrail.layers.positions import RelativePositions, RotaryPositions

sizes = st.integers(1, 6)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ/√K)·v for one head, with loops."""
    rows: list[list[float]] = []
    for query in q.tolist():
        scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) for key in k.tolist()]
        exponentials = [math.exp(score) for score in scores]
        weights = [e / sum(exponentials) for e in exponentials]
        rows.append([sum(w * x for w, x in zip(weights, column, strict=True)) for column in v.T.tolist()])
    return torch.tensor(rows)


@settings(max_examples=40, deadline=None)
@given(queries=sizes, keys=sizes, key_width=sizes, value_width=sizes)
def test_attention_equals_the_formula(queries: int, keys: int, key_width: int, value_width: int) -> None:
    q, k, v = torch.randn(queries, key_width), torch.randn(keys, key_width), torch.randn(keys, value_width)
    fused = attention(q[None, None], k[None, None], v[None, None])[0, 0]
    torch.testing.assert_close(fused, by_hand(q, k, v), rtol=1e-5, atol=1e-5)


def some_masks() -> dict[str, Tensor | None]:
    boolean = torch.rand(2, 1, 5, 7) > 0.4
    boolean[..., 0] = True
    return {
        "none": None,
        "boolean": boolean,
        "additive": torch.randn(5, 7),
        "causal": causal_mask(5, 7),
        "causal and boolean": join_masks(causal_mask(5, 7), boolean),
        "additive and causal": join_masks(torch.randn(5, 7), causal_mask(5, 7)),
        "additive and additive": join_masks(torch.randn(5, 7), torch.randn(2, 3, 5, 7)),
        "one query sees nothing": torch.arange(5)[:, None] != torch.full((1, 7), 2),
    }


@pytest.mark.parametrize("kind", some_masks())
def test_fused_attention_equals_weights_times_values(kind: str) -> None:
    mask = some_masks()[kind]
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    weights = attention_weights(q, k, mask)
    torch.testing.assert_close(attention(q, k, v, mask), weights @ v, rtol=1e-5, atol=1e-6)
    totals = weights.sum(-1)
    if kind == "one query sees nothing":
        assert (totals[:, :, 2] == 0).all()
        totals[:, :, 2] = 1
    torch.testing.assert_close(totals, torch.ones(2, 3, 5))


def test_joined_masks_hide_what_either_hides() -> None:
    boolean, additive = torch.rand(5, 5) > 0.5, torch.randn(5, 5)
    assert join_masks(None, boolean) is boolean
    assert join_masks(boolean, None) is boolean
    both = join_masks(additive, boolean)
    assert both is not None
    assert torch.equal(both.isneginf(), ~boolean)
    assert torch.equal(both[boolean], additive[boolean])
    other = join_masks(boolean, additive)
    assert other is not None
    assert torch.equal(other, both)


def test_causal_mask_with_fewer_queries_is_that_of_decoding() -> None:
    assert torch.equal(causal_mask(2, 5), causal_mask(5, 5)[-2:])


def test_causal_mask_leaks_nothing() -> None:
    layer = add_weight_noise(SelfAttention(12, 3))
    x = torch.randn(2, 6, 12)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, 12)
    mask = causal_mask(6, 6)
    assert torch.equal(layer(x, mask=mask)[:, :4], layer(changed, mask=mask)[:, :4])
    assert not torch.equal(layer(x, mask=mask)[:, 4:], layer(changed, mask=mask)[:, 4:])


def test_attention_without_positions_is_permutation_equivariant() -> None:
    layer, x, order = add_weight_noise(SelfAttention(12, 3)), torch.randn(2, 6, 12), torch.randperm(6)
    torch.testing.assert_close(layer(x)[:, order], layer(x[:, order]), rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 3), queries=sizes, inputs=sizes, widths=st.tuples(sizes, sizes, sizes, sizes, sizes))
def test_all_widths_of_attention_may_differ(
    heads: int, queries: int, inputs: int, widths: tuple[int, int, int, int, int]
) -> None:
    width, input_width, key_width, value_width, out_width = widths
    layer = Attention(
        width,
        heads,
        input_width=input_width,
        key_width=key_width * heads,
        value_width=value_width * heads,
        out_width=out_width,
    )
    x, y = torch.randn(2, queries, width), torch.randn(2, inputs, input_width)
    assert layer(x, y).shape == (2, queries, out_width)
    _, _, v = layer.project(x, y)
    assert layer.weights(x, y).shape == (2, heads, queries, inputs)
    torch.testing.assert_close(layer(x, y), layer.proj(merge_heads(layer.weights(x, y) @ v)), rtol=1e-5, atol=1e-5)


def test_attention_without_inputs_is_self_attention() -> None:
    one, fused = Attention(12, 3), SelfAttention(12, 3)
    fused.qkv.weight.data = torch.cat([one.q.weight, one.kv.weight])
    fused.qkv.bias.data = torch.cat([one.q.bias, one.kv.bias])
    fused.proj = one.proj
    x = torch.randn(2, 6, 12)
    torch.testing.assert_close(one(x), fused(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.weights(x), fused.weights(x), rtol=1e-5, atol=1e-6)


def test_multi_head_attention_equals_torch() -> None:
    ours, theirs = SelfAttention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    assert theirs.in_proj_weight is not None
    ours.qkv.weight, ours.qkv.bias = theirs.in_proj_weight, theirs.in_proj_bias
    ours.proj.weight, ours.proj.bias = theirs.out_proj.weight, theirs.out_proj.bias
    x = torch.randn(2, 6, 12)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weights(x), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("positions", ["none", "relative", "rotary"])
@pytest.mark.parametrize("bias", [True, False])
def test_fewer_queries_give_the_first_rows(positions: str, bias: bool) -> None:
    kinds = {"none": None, "relative": RelativePositions(8, (2, 3)), "rotary": RotaryPositions(8)}
    layer = add_weight_noise(SelfAttention(16, 2, bias=bias, positions=kinds[positions]))
    x = torch.randn(2, 8, 16)  # two prefix tokens, then a grid of 2×3
    for queries in (1, 2, 5):
        torch.testing.assert_close(
            layer(x, (2, 3), queries=queries), layer(x, (2, 3))[:, :queries], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["none", "relative", "rotary"])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_are_the_output(kind: str, masked: bool) -> None:
    kinds = {"none": None, "relative": RelativePositions(8, (2, 3)), "rotary": RotaryPositions(8)}
    layer = add_weight_noise(SelfAttention(16, 2, positions=kinds[kind]), std=0.3)
    x, mask = torch.randn(2, 7, 16), causal_mask(7, 7) if masked else None
    weights = layer.weights(x, (2, 3), mask)
    _, _, v, _ = layer.project(x, (2, 3), mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 7))
    assert not masked or (weights.triu(1) == 0).all()
    torch.testing.assert_close(layer(x, (2, 3), mask), layer.proj(merge_heads(weights @ v)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [None, (3, 3)])
def test_positions_need_the_grid_of_the_tokens(grid: tuple[int, int] | None) -> None:
    with pytest.raises(ConfigError, match=r"grid .* for 6 tokens; expected \(rows, columns\) of no more tokens"):
        SelfAttention(16, 2, positions=RotaryPositions(8))(torch.randn(1, 6, 16), grid)


def test_fully_masked_weights_in_half_precision_have_finite_gradients() -> None:
    large = torch.full((1, 1, 3, 64), 40.0).half()
    assert attention_weights(large, large).isfinite().all()
    q, mask = torch.randn(1, 1, 3, 8, requires_grad=True), torch.zeros(3, 3)
    mask[1] = -math.inf
    (attention_weights(q, q, mask) @ q).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_dropout_acts_only_in_training() -> None:
    layer, x = SelfAttention(12, 3, dropout=0.5), torch.randn(1, 40, 12)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
