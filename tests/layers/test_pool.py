"""Attention pooling, one learned query."""

import torch
from support.noisy_weights import add_weight_noise

from vitrail.layers.pool import AttentionPool


def test_attention_pool_equals_weights_times_values() -> None:
    pool, x = AttentionPool(12, 3, 24), torch.randn(2, 7, 12)
    add_weight_noise(pool, std=0.3)
    weights = pool.weights(x)
    assert weights.shape == (2, 3, 1, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 1))
    _, _, v = pool.project(x)
    pooled = pool.proj((weights @ v).transpose(1, 2).flatten(2))[:, 0]
    torch.testing.assert_close(pool(x), pooled + pool.mlp(pool.norm(pooled)), rtol=1e-5, atol=1e-6)


def test_attention_pool_ignores_the_order_of_tokens() -> None:
    pool, x, order = add_weight_noise(AttentionPool(12, 3, 24), std=0.3), torch.randn(2, 7, 12), torch.randperm(7)
    torch.testing.assert_close(pool(x), pool(x[:, order]), rtol=1e-5, atol=1e-5)
