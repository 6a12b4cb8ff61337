"""The two-layer perceptrons against their formulas."""

import math

import torch
from support.noisy_weights import add_weight_noise

from vitrail.layers.block import Mlp, SwiGlu


def test_gelu_exact_and_by_tanh() -> None:
    x = torch.linspace(-4, 4, 101)
    exact = torch.tensor([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(Mlp(1, 1).act(x), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Mlp(1, 1, tanh=True).act(x), tanh, rtol=1e-5, atol=1e-6)
    assert 1e-5 < (exact - tanh).abs().max() < 1e-3


def test_mlp_equals_the_formula() -> None:
    mlp, x = add_weight_noise(Mlp(6, 24)), torch.randn(2, 3, 6)
    hidden = torch.nn.functional.gelu(x @ mlp.fc1.weight.T + mlp.fc1.bias)
    torch.testing.assert_close(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)


def test_swiglu_gates_one_half_by_the_other() -> None:
    mlp = SwiGlu(6, 8)
    assert mlp.fc1.weight.shape == (16, 6)
    x = torch.randn(2, 3, 6)
    a, b = x @ mlp.fc1.weight[:8].T + mlp.fc1.bias[:8], x @ mlp.fc1.weight[8:].T + mlp.fc1.bias[8:]
    torch.testing.assert_close(mlp(x), mlp.fc2(a * a.sigmoid() * b))


def test_dropout_follows_both_layers() -> None:
    for mlp in (Mlp(6, 600, dropout=0.5), SwiGlu(6, 600, dropout=0.5)):
        x = torch.ones(1, 200, 6)
        out = mlp.train()(x)
        assert 0.4 < (out == 0).float().mean() < 0.6
        assert not torch.equal(out, mlp(x))
        assert torch.equal(mlp.eval()(x), mlp(x))
