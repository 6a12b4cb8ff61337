"""Training in several processes, on one machine or more. All communication between them is here.

A process learns its rank from the environment variables of torchrun, Ray, Kubernetes, mpirun or srun:

torchrun --nproc-per-node 8 -m vitrail train --data photos --model ViT-B/16
srun --ntasks 8 vitrail train --data photos --model ViT-B/16
mpirun -n 8 vitrail train --data photos --model ViT-B/16
"""

import os
import re
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from ipaddress import ip_address
from itertools import count
from time import monotonic, sleep
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from vitrail.base.errors import ConfigError, VitrailError, describe_error, unusable_device_error

LAUNCHER_VARIABLES = (  # rank, number of processes, rank on this machine
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray, Kubernetes
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec of MPICH and Intel MPI
    # srun. In the shell of salloc or sbatch, which is one process, SLURM_NTASKS is set, but this is not a step
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
OTHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_JOB_NODELIST")
JOIN_SECONDS = 300.0  # until every process must have started
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # others may have to wait while one process evaluates or writes a checkpoint
PROBE_SECONDS = 2.0  # until another process must accept a connection
JOIN_NUMBERS = count()  # a process may join groups one after another; each has its own part of the store
LOST_CONNECTION = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|pair closure|timed out waiting \d+ ?ms"
    r"|ncclRemoteError|remote process exited|communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Launch:
    """Rank and world size of this process, and the address and port at which all processes connect to rank 0."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    opens_store: bool  # whether this process listens there; torchrun listens itself
    attempt: int = 0  # how often torchrun has restarted the processes


def read_launcher_environment(environ: Mapping[str, str]) -> Launch | None:
    """Read the variables of a launcher; None for a single process.

    They are an error if they show that there are several processes, but not how these can join each other.
    """
    env = {name: value.strip() for name, value in environ.items() if value.strip()}
    names = next((names for names in LAUNCHER_VARIABLES if names[0] in env and names[1] in env), None)
    if names is None:
        if "RANK" in env or read_number(env, "WORLD_SIZE", 1) > 1 or read_number(env, "SLURM_PROCID", 0) > 0:
            raise launch_error(env, "its rank or the number of processes is missing")
        return None
    rank, world_size = read_number(env, names[0]), read_number(env, names[1])
    if rank >= world_size:
        raise launch_error(env, f"{names[0]} is {rank}; expected less than {names[1]}, which is {world_size}")
    if world_size == 1:
        return None
    by_srun = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")) == (str(rank), str(world_size))
    by_mpi = not by_srun and names[0] != "RANK"
    address = env.get("MASTER_ADDR")
    if address is None and by_srun:
        address = find_first_slurm_node(env)
    if address is None and by_mpi and str(world_size) in [env.get(name) for name in LOCAL_SIZE_VARIABLES]:
        address = "127.0.0.1"
    if address is None:
        raise launch_error(env, "MASTER_ADDR, the machine of rank 0, is missing")
    job = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}" if by_srun else env.get("PMIX_NAMESPACE", "")
    free = 15000 + crc32(job.encode()) % 15000  # another port for each job; clients get higher ones
    port = read_number(env, "MASTER_PORT", free if by_srun or by_mpi else None)
    if not 0 < port < 2**16:
        raise launch_error(env, "MASTER_PORT is not a port, which is 1 to 65535")
    local = next((name for name in (names[2], "LOCAL_RANK") if name in env), "SLURM_LOCALID" if by_srun else "")
    opens_store = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = read_number(env, "TORCHELASTIC_RESTART_COUNT", 0)
    return Launch(rank, world_size, read_number(env, local, 0), address, port, opens_store, attempt)


def read_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    if not env.get(name, "").isdecimal():
        raise launch_error(env, f"{name} is {'not a number' if name in env else 'missing'}")
    return int(env[name])


def read_local_rank(environ: Mapping[str, str]) -> int:
    """The rank on this machine in a process group that the caller has joined; 0 if no variable is set."""
    found = [environ.get(names[2], "") for names in LAUNCHER_VARIABLES]
    return next((int(value) for value in found if value.isdecimal()), 0)


def find_first_slurm_node(env: Mapping[str, str]) -> str | None:
    """The machine of rank 0, the first of a list such as gpu[07-09,12]; srun itself may run on a login node."""
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_LAUNCH_NODE_IPADDR", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", listed)
    return "".join(part or "" for part in first.groups()) if first else None


def launch_error(env: Mapping[str, str], problem: str) -> ConfigError:
    names = (*(name for names in LAUNCHER_VARIABLES for name in names), *OTHER_VARIABLES)
    found = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    return ConfigError(
        f"this process cannot join the others that were started with it: {problem}. Found {found}; set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, or unset these variables to train in one process"
    )


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

    def sum_with_gradient(self, values: Tensor) -> Tensor:
        """Sum over all processes. In the backward pass, the gradients of all processes are summed too."""
        return values if self.world_size == 1 else cast(Tensor, SumOverRanks.apply(values))

    def stack_with_gradient(self, values: Tensor) -> Tensor:
        """The tensors of all processes, by rank; they must have the same shape: (…) -> (world size, …)."""
        return self.join_rows(values[None], [1] * self.world_size)

    def gather_with_gradient(self, rows: Tensor) -> Tensor:
        """The rows of all processes, by rank; their number may differ: (B, …) -> (sum of all B, …)."""
        counts = self.all_gather(torch.tensor(len(rows), device=rows.device))
        return self.join_rows(rows, [int(each) for each in counts])

    def join_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Concatenate the rows of all processes, as a sum in which each pads its own rows with zeros."""
        before, after = sum(counts[: self.rank]), sum(counts[self.rank + 1 :])
        return self.sum_with_gradient(F.pad(rows, (0, 0) * (rows.ndim - 1) + (before, after)))

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


class SumOverRanks(torch.autograd.Function):
    """all_reduce with a gradient; the one in torch.distributed.nn is deprecated."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SumOverRanks.forward(None, gradient)


def resolve_device(device: str | torch.device, ranks: Ranks) -> torch.device:
    """The device of this process; `auto` is its GPU if there is one, otherwise the CPU."""
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise unusable_device_error(name)
        if device.type == "cuda" and device.index is None:  # a launcher may show each process only its own GPU
            device = torch.device("cuda", ranks.local_rank % max(torch.cuda.device_count(), 1))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise unusable_device_error(name, error) from None
    return device


@contextmanager
def join_process_group() -> Generator[Ranks]:
    """Join the other processes that a launcher started; without a launcher, a single process.

    If another process ends early, this one raises a LostRankError, which names its rank and, if known, the reason.
    """
    if dist.is_initialized():  # by Ray, or by a caller with several runs
        if "cpu:" not in (backends := dist.get_backend_config()):
            raise ConfigError(f"the process group has the backend {backends}; expected cpu:gloo,cuda:nccl")
        yield Ranks(dist.get_rank(), dist.get_world_size(), read_local_rank(os.environ))
        return
    launch = read_launcher_environment(os.environ)
    if launch is None:
        yield Ranks()
        return
    shared_store = open_store(launch)
    store = PrefixStore(f"vitrail/{launch.attempt}/{next(JOIN_NUMBERS)}", shared_store)
    wait_for_all_processes(launch, store)
    ranks = Ranks(launch.rank, launch.world_size, launch.local_rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(resolve_device("cuda", ranks))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    liveness_socket, address = open_liveness_socket(launch)
    with liveness_socket:
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=COLLECTIVE_TIMEOUT
        )
        try:
            with Peers(ranks, store, launch, ranks.all_gather_objects(address)).explain_errors():
                yield ranks
            with suppress(RuntimeError):  # other processes may have failed; they report it themselves
                dist.barrier()  # do not close connections while other processes still use them
        finally:
            dist.destroy_process_group()


@cache  # for later groups of this process
def open_store(launch: Launch) -> Store:
    """Connect to the store that all processes share, once it can be reached: torch prints many lines for a failure."""
    where, deadline, pause = f"{launch.address}:{launch.port}", monotonic() + JOIN_SECONDS, 0.05
    while not launch.opens_store and (reason := find_connection_error(launch.address, launch.port)):
        if monotonic() > deadline:
            raise ConfigError(
                f"rank {launch.rank} of {launch.world_size} processes has not reached rank 0 at {where} after "
                f"{JOIN_SECONDS / 60:.0f} minutes: {reason}; start all processes, and set MASTER_ADDR to the machine "
                "of rank 0 and MASTER_PORT to a port of it that the others can reach"
            )
        sleep(pause := min(pause * 1.5, 1))
    try:
        socket.getaddrinfo(launch.address, launch.port)
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            launch.address,
            launch.port,
            launch.world_size,
            launch.opens_store,
            timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} processes cannot use {where}: {describe_error(error)}; set "
            "MASTER_ADDR to the machine of rank 0 and MASTER_PORT to a free port of it"
        ) from None


def wait_for_all_processes(launch: Launch, store: Store) -> None:
    arrived, deadline, pause = store.add("arrived", 1), monotonic() + JOIN_SECONDS, 0.05
    while arrived < launch.world_size:
        if monotonic() > deadline or find_connection_error(launch.address, launch.port):
            raise ConfigError(
                f"only {arrived} of {launch.world_size} processes have reached {launch.address}:{launch.port} within "
                f"{JOIN_SECONDS / 60:.0f} minutes; start all of them, or see why the others ended"
            )
        sleep(pause := min(pause * 1.5, 1))
        arrived = store.add("arrived", 0)


def open_liveness_socket(launch: Launch) -> tuple[socket.socket, tuple[str, int]]:
    """Listen on a port, so that others can test whether this process is alive: the system closes it when it ends."""
    with socket.create_connection((launch.address, launch.port), PROBE_SECONDS) as route:
        server, own = socket.create_server(("", 0), family=route.family), route.getsockname()[0]
    host = launch.address if ip_address(own).is_loopback else own  # of this machine, as seen from others
    return server, (host, server.getsockname()[1])


def find_connection_error(host: str, port: int) -> str | None:
    """Why a connection to this port fails; None if it succeeds."""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except OSError as error:
        return describe_error(error)
    return None


@dataclass(frozen=True)
class Peers:
    """The other processes of the group. The first error of any process is kept in the store, for all of them."""

    ranks: Ranks
    store: Store
    launch: Launch
    addresses: list[tuple[str, int]]

    @contextmanager
    def explain_errors(self) -> Generator[None]:
        """Share an error of this process with the others; if a connection is lost, find out which process has ended."""
        try:
            yield
        except BaseException as error:
            if not is_lost_rank_error(error):
                reason = str(error) if isinstance(error, VitrailError) else f"{type(error).__name__} {error}"
                self.share_first_error(f"rank {self.ranks.rank} of {self.ranks.world_size} processes failed: {reason}")
                raise
            loss = self.share_first_error(self.describe_lost_ranks(error))
            raise LostRankError(loss, error.state if isinstance(error, LostRankError) else "") from None

    def share_first_error(self, message: str) -> str:
        """Store the message if no process has failed before; return the first one, or this one without a store."""
        if find_connection_error(self.launch.address, self.launch.port) is None:
            with suppress(RuntimeError):
                return self.store.compare_set("error", "", message).decode()
        return message

    def describe_lost_ranks(self, error: BaseException) -> str:
        ended, deadline = list[int](), monotonic() + 1
        while not ended and monotonic() < deadline:  # the system closes the ports of a process one after another
            ended = [rank for rank, address in enumerate(self.addresses) if find_connection_error(*address)]
        if not ended:
            return f"the connection to another of {self.ranks.world_size} processes was lost: {describe_error(error)}"
        which = f"rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))} of {self.ranks.world_size} processes"
        return f"{which} ended without an error message, perhaps killed because memory ran out"


class LostRankError(VitrailError):
    """Another process ended before this one; `state` is how to resume, if the run has a folder."""

    def __init__(self, loss: str, state: str = "") -> None:
        super().__init__(loss + state)
        self.state = state


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether a connection was lost; gloo then raises a RuntimeError, NCCL its subclass DistBackendError."""
    lost = isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error)) is not None
    return lost or isinstance(error, LostRankError)


@contextmanager
def wrap_lost_rank_errors(ranks: Ranks, describe_state: Callable[[], str] = str) -> Generator[None]:
    """Turn torch's traceback for a lost connection into a one-line error that ends in the state of the run."""
    try:
        yield
    except RuntimeError as error:
        if ranks.world_size == 1 or not is_lost_rank_error(error):
            raise
        loss = f"the connection to another of {ranks.world_size} processes was lost: {describe_error(error)}"
        raise LostRankError(loss, describe_state()) from None


class SyncBatchNorm1d(nn.BatchNorm1d):
    """nn.BatchNorm1d whose statistics in training are those of the joined batch of all processes.

    Set its processes with `set_sync_batch_norm_ranks`. In a single process it is nn.BatchNorm1d. torch's SyncBatchNorm
    needs GPUs.
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
