"""Distributed data-parallel training with torchrun. All communication between processes is here.

torchrun --nproc-per-node 8 -m vitrail train --data photos --model ViT-B/16
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from vitrail.loading import unusable_device_error


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process. Every method is a no-op in a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # rank on this machine, and index of its GPU

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def all_gather(self, value: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank; they must have the same shape."""
        if self.world_size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.world_size)]
        dist.all_gather(found, value)
        return found

    def all_gather_objects(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to all processes: batch norm statistics differ between them."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def broadcast_object(self, value: Any) -> Any:
        """The value of rank 0, on all processes."""
        if self.world_size == 1:
            return value
        holder = [value]
        dist.broadcast_object_list(holder)
        return holder[0]

    def wrap_in_ddp(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model in DistributedDataParallel, which averages gradients over all processes."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this process; `auto` is its GPU if there is one, otherwise the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise unusable_device_error(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", ranks.local_rank)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise unusable_device_error(name, error) from None
    return device


@contextmanager
def join_process_group() -> Generator[Ranks]:
    """Join the process group that torchrun started; without torchrun, a single process."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Ranks()
        return
    local = distributed_c10d.get_node_local_rank()
    if dist.is_initialized():  # by a caller with several runs: a destroyed group cannot be joined again
        yield Ranks(dist.get_rank(), dist.get_world_size(), local)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), local)
        with suppress(RuntimeError):  # other processes may have failed; they report it themselves
            dist.barrier()  # do not close connections while other processes still use them
    finally:
        dist.destroy_process_group()
