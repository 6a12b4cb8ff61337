"""In a single process; two processes are in tests/test_distributed.py."""

import pickle
from copy import deepcopy

import torch
from torch import nn

from vitrail.distributed import Ranks
from vitrail.tasks.sync_batch_norm import SyncBatchNorm1d, set_sync_batch_norm_ranks


def test_single_process_gives_the_bits_of_batch_norm() -> None:
    mine, its = SyncBatchNorm1d(4, momentum=0.2), nn.BatchNorm1d(4, momentum=0.2)
    for step in range(3):
        rows = [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).requires_grad_() for _ in range(2)]
        found, expected = mine(rows[0]), its(rows[1])
        found.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        assert torch.equal(found, expected)
        assert rows[0].grad is not None
        assert rows[1].grad is not None
        assert torch.equal(rows[0].grad, rows[1].grad)
    assert mine.state_dict().keys() == its.state_dict().keys()
    assert all(torch.equal(each, its.state_dict()[name]) for name, each in mine.state_dict().items())


def test_ranks_reach_every_norm_and_survive_copies() -> None:
    task = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm1d(4), nn.Sequential(SyncBatchNorm1d(4)))
    set_sync_batch_norm_ranks(task, Ranks(1, 2, 1))
    for copy in (deepcopy(task), pickle.loads(pickle.dumps(task))):
        norms = [each for each in copy.modules() if isinstance(each, SyncBatchNorm1d)]
        assert [each.ranks for each in norms] == [Ranks(1, 2, 1)] * 2
    rows = torch.randn(3, 4)
    assert torch.isfinite(task.eval()(rows)).all(), "evaluation does not wait for other processes"
    assert nn.BatchNorm1d not in map(type, task)
