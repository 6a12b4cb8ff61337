"""Batch norm over the samples of all processes, for projection heads. torch's SyncBatchNorm needs GPUs."""

from typing import cast

import torch
from torch import Tensor, nn

from vitrail.distributed import Ranks


class SyncBatchNorm1d(nn.BatchNorm1d):
    """nn.BatchNorm1d whose statistics in training are those of the joined batch of all processes.

    Set its processes with `set_sync_batch_norm_ranks`. In a single process it is nn.BatchNorm1d.
    """

    ranks = Ranks()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        if self.ranks.world_size == 1 or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype.itemsize < 4 else input
        axes = [axis for axis in range(x.ndim) if axis != 1]
        own = torch.cat([x.new_tensor([x.numel() / x.shape[1]]), x.mean(axes), x.var(axes, correction=0)])
        counts, means, variances = self.ranks.stack_with_gradient(own).split([1, x.shape[1], x.shape[1]], 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        self.update_running_statistics(mean.detach(), (variance * total / (total - 1)).detach())
        shape = (1, -1, *(1,) * (x.ndim - 2))
        scale = (variance + self.eps).rsqrt() * (1 if self.weight is None else self.weight)
        shift = 0 if self.bias is None else self.bias.view(shape)
        return ((x - mean.view(shape)) * scale.view(shape) + shift).to(input.dtype)

    def update_running_statistics(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased_variance)):
                cast(Tensor, running).lerp_(new.to(cast(Tensor, running).dtype), share)


def set_sync_batch_norm_ranks(module: nn.Module, ranks: Ranks) -> None:
    """Let every SyncBatchNorm1d in the module use the samples of these processes."""
    for each in module.modules():
        if isinstance(each, SyncBatchNorm1d):
            each.ranks = ranks
