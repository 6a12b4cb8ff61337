"""A momentum teacher, which follows the moving average of what is trained (He 2019, Grill 2020, Caron 2021), and the
centering of its outputs.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # torch has no public base

from vitrail.distributed import Ranks


class MomentumTeacher(nn.ModuleDict):
    """Copies of the modules of a student, by name, without gradients. `follow` moves them towards the student.

    Dropout and stochastic depth are off, in training too. Batch norms then use the statistics of the batch, as those
    of the student do, and have running averages of their own.
    """

    def __init__(self, student: Mapping[str, nn.Module]) -> None:
        super().__init__({name: deepcopy(module) for name, module in student.items()})
        self.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:  # torch's signature
        super().train(False)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.train(mode)
        return self

    @torch.no_grad()
    def follow(self, student: Mapping[str, nn.Module], momentum: float) -> None:
        """Move every parameter towards that of the student: momentum · teacher + (1 − momentum) · student."""
        for name, module in student.items():
            for mine, its in zip(self[name].parameters(), module.parameters(), strict=True):
                mine.lerp_(its, 1 - momentum)

    def copy_student(self, student: Mapping[str, nn.Module]) -> None:
        """Become equal to the student, buffers included."""
        for name, module in student.items():
            self[name].load_state_dict(module.state_dict())


class Center(nn.Module):
    """A moving average of rows (…, K), updated once per step from the rows of all micro-batches and processes.

    Rows are centered by the average of earlier steps: call `observe` for each micro-batch, `average` before the update
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
