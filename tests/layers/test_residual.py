"""Layer scale and stochastic depth."""

import torch

from vitrail.layers.block import LayerScale, StochasticDepth


def test_layer_scale_is_a_factor_per_channel() -> None:
    layer = LayerScale(4, 1e-5)
    layer.gamma.data = torch.tensor([1.0, 2.0, 0.0, -1.0])
    x = torch.randn(2, 3, 4)
    assert torch.equal(layer(x), x * torch.tensor([1.0, 2.0, 0.0, -1.0]))


def test_stochastic_depth_drops_samples_and_keeps_the_mean() -> None:
    layer, x = StochasticDepth(0.25), torch.ones(4000, 3, 2)
    out = layer.train()(x)
    per_sample = out.flatten(1)
    assert (per_sample == per_sample[:, :1]).all()
    torch.testing.assert_close(per_sample[:, 0].unique(), torch.tensor([0.0, 1 / 0.75]))
    assert abs(out.mean() - 1) < 0.03


def test_stochastic_depth_does_nothing_at_rate_zero_or_in_evaluation() -> None:
    x = torch.randn(2, 3, 4)
    assert StochasticDepth(0.0).train()(x) is x
    assert StochasticDepth(0.9).eval()(x) is x
