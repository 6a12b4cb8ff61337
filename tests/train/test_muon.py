import pytest
import torch
from torch import nn

from vitrail.train.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonalise_brings_singular_values_near_one_and_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalise(matrix) @ v.T
    assert found.diagonal().min() > 0.6
    assert found.diagonal().max() < 1.3
    assert (found - found.diagonal().diag()).abs().max() < 1e-4


def test_update_matches_torch() -> None:
    """Within the rounding of bfloat16, which torch uses."""
    mine, its = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
    its.load_state_dict(mine.state_dict())
    start = mine.weight.detach().clone()
    ours = Muon([{"params": [mine.weight]}], lr=0.02, momentum=0.9, weight_decay=0.1)
    theirs = torch.optim.Muon(
        [its.weight], lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        mine.weight.grad, its.weight.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    moved = (its.weight - start).norm()
    assert (mine.weight - its.weight).norm() < 0.02 * moved
    assert moved > 0.1


def test_parts_are_updated_separately_and_kernels_as_matrices() -> None:
    gradient = torch.randn(12, 2, 3, 3)
    stacked, first = nn.Parameter(torch.zeros(12, 2, 3, 3)), nn.Parameter(torch.zeros(4, 2, 3, 3))
    stacked.grad, first.grad = gradient.clone(), gradient[:4].clone()
    Muon([{"params": [stacked], "parts": 3}], lr=1.0).step()
    Muon([{"params": [first]}], lr=1.0).step()
    assert torch.allclose(stacked[:4], first, atol=1e-5)
    rms = first.square().mean().sqrt()
    assert 0.1 < rms < 0.3, "of the size of AdamW's updates"


def test_weight_without_gradient_does_not_change() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    Muon([{"params": [weight]}], lr=1.0).step()
    assert torch.equal(weight, torch.ones(2, 2))
