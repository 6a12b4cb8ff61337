"""Read the environment variables that torchrun, Ray, Kubernetes, mpirun and srun set for the processes they start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from vitrail.base.errors import ConfigError

LAUNCHER_VARIABLES = (  # rank, number of processes, rank on this machine
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, Ray, Kubernetes
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec of MPICH and Intel MPI
    # srun. In the shell of salloc or sbatch, which is one process, SLURM_NTASKS is set, but this is not a step
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
OTHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_JOB_NODELIST")


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
