from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_train_fit import assert_same, create_runs, train_toy_model
from timm.optim.lars import Lars as TimmLars
from torch import Tensor, nn

from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.train.lars import Lars

SHAPES = ((6, 4), (6,), (3, 2, 3, 3))


def make_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take_steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int = 4) -> list[Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 10.0 / (step + 1)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_update_matches_timm_without_weight_decay() -> None:
    """timm adapts the learning rate of biases as well, if at all, so they are in a group of their own."""
    ours, theirs, start = make_weights(), make_weights(), make_weights()
    mine = take_steps(Lars([{"params": ours}], 10.0, momentum=0.8), ours)
    groups = [
        {"params": [each for each in theirs if each.ndim > 1], "always_adapt": True},
        {"params": [each for each in theirs if each.ndim == 1]},
    ]
    its = take_steps(cast(Any, TimmLars)(groups, lr=10.0, momentum=0.8), theirs)
    for one, other, before in zip(mine, its, start, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert (one - before).norm() > 1e-2


def test_update_follows_the_formula_with_weight_decay() -> None:
    """w ← w - lr · v; v ← m · v + η |w| / |g + λw| · (g + λw); a bias has v ← m · v + g, whatever its group says."""
    trained, expected = make_weights(), [each.detach().double() for each in make_weights()]
    found = take_steps(Lars([{"params": trained, "weight_decay": 0.3}], 10.0, momentum=0.8, trust=0.01), trained)
    velocity = [torch.zeros_like(each) for each in expected]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for weight, each in zip(expected, velocity, strict=True):
            gradient = torch.randn(weight.shape, generator=generator).double()
            if weight.ndim > 1:
                gradient += 0.3 * weight
                gradient *= 0.01 * weight.norm() / gradient.norm()
            each.mul_(0.8).add_(gradient)
            weight.sub_(10.0 / (step + 1) * each)
    for weight, reference in zip(found, expected, strict=True):
        assert torch.allclose(weight.double(), reference, atol=1e-5)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 1.0), (1.0, 0.0)])
def test_zero_weight_or_gradient_has_the_ratio_one(weight: float, gradient: float) -> None:
    zero = nn.Parameter(torch.full((2, 2), weight))
    zero.grad = torch.full((2, 2), gradient)
    untouched = nn.Parameter(torch.ones(2, 2))
    Lars([{"params": [zero, untouched]}], lr=0.5).step()
    assert torch.equal(zero, torch.full((2, 2), weight - 0.5 * gradient))
    assert torch.equal(untouched, torch.ones(2, 2)), "it has no gradient"


def test_run_learns_and_resumes_bit_identically(tmp_path: Path) -> None:
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer="lars", lr=0.1, weight_decay=1e-4, warmup=0.5, layer_decay=0.9),
        loop=LoopSettings(epochs=4, batch=8, save_every=3),
    )
    uninterrupted, stopped = create_runs(tmp_path)
    result = train_toy_model(recipe, uninterrupted)
    assert result.evaluation is not None
    assert result.evaluation.top1 >= 0.5, "of four classes"
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=8)
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)
