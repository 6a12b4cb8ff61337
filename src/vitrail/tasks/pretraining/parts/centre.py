"""The centre of DINO: a moving average of the teacher's outputs, subtracted from them to prevent a collapse."""

import torch
from torch import Tensor, nn

from vitrail.distributed import Ranks


class Centre(nn.Module):
    """A moving average of rows (…, K), updated once per step from the rows of all micro-batches and processes.

    Rows are centred by the average of earlier steps: call `observe` for each micro-batch, `average` before the update
    of the weights, and `update` after it.
    """

    def __init__(self, width: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(width))
        self.value: Tensor
        self.total, self.count = torch.zeros(width), 0  # of the rows of this step, on this process
        self.mean: Tensor | None = None  # of the rows of this step, on all processes

    @torch.no_grad()
    def observe(self, rows: Tensor) -> None:
        rows = rows.flatten(0, -2).float()
        self.total = self.total.to(rows.device) + rows.sum(0)
        self.count += len(rows)

    def average(self, ranks: Ranks) -> None:
        sums = ranks.all_reduce_sum(torch.cat([self.total, self.total.new_tensor([self.count])]))
        self.mean = sums[:-1] / sums[-1]
        self.total, self.count = torch.zeros_like(self.total), 0

    @torch.no_grad()
    def update(self) -> None:
        if self.mean is not None:
            self.value.lerp_(self.mean, 1 - self.momentum)
