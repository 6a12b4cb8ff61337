"""A momentum teacher: a copy of what is trained that follows its moving average (He 2019, Grill 2020, Caron 2021)."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # torch has no public base


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
