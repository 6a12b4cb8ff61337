"""A batch: named tensors, and the random keys that they were drawn from. It knows neither images nor labels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Examples of one step. They are the first axis of a tensor, or the second axis of a view with several crops."""

    tensors: Mapping[str, Tensor]
    keys: Mapping[str, NDArray[np.uint64]]  # by the name of a random tensor: one key per example, or per crop
    size: int  # examples
    skipped: tuple[str, ...] = ()  # one line per unreadable example: why

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: torch.device) -> "Batch":
        return replace(self, tensors={name: each.to(device, non_blocking=True) for name, each in self.tensors.items()})

    def pin_memory(self) -> "Batch":
        """Called by torch's DataLoader; pinned memory is copied to a GPU faster."""
        return replace(self, tensors={name: each.pin_memory() for name, each in self.tensors.items()})
