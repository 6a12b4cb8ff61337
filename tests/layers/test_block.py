"""A block equals its equations: z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'."""

import pytest
import torch
from support.noisy_weights import add_weight_noise

from vitrail.layers.block import Activation, Block


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("layer_scale", [None, 0.1])
def test_block_equals_the_equations_of_the_paper(activation: Activation, layer_scale: float | None) -> None:
    block = Block(12, 3, 24, activation=activation, layer_scale=layer_scale)
    add_weight_noise(block)
    z = torch.randn(2, 5, 12)
    middle = block.ls1(block.attn(block.norm1(z))) + z
    torch.testing.assert_close(block(z), block.ls2(block.mlp(block.norm2(middle))) + middle)
    torch.testing.assert_close(block(z, queries=2), block(z)[:, :2], rtol=1e-5, atol=1e-6)


def test_norm_uses_the_biased_deviation() -> None:
    block, z = Block(12, 3, 24), torch.randn(2, 5, 12)
    by_hand = (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    torch.testing.assert_close(block.norm1(z), by_hand, rtol=1e-5, atol=1e-6)


def test_recomputed_activations_give_equal_gradients() -> None:
    block, z = (
        add_weight_noise(Block(12, 3, 24, dropout=0.1, attention_dropout=0.1, stochastic_depth=0.3)).train(),
        torch.randn(4, 5, 12),
    )
    gradients: list[list[torch.Tensor]] = []
    calls: list[bool] = []

    def note(*_: object) -> None:
        calls.append(block.recompute)

    block.attn.register_forward_hook(note)
    for recompute in (False, True):
        block.recompute = recompute
        torch.manual_seed(1)
        block.zero_grad()
        block(z).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(block.parameters()))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
    assert calls == [False, True, True], "the second call computes it again in the backward pass"
