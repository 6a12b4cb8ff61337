"""The variables of each launcher give the place of a process, or one line about what is missing."""

from dataclasses import replace

import pytest

from vitrail.base.errors import ConfigError
from vitrail.distributed import Launch, read_launcher_environment, read_local_rank

MASTER = "MASTER_ADDR=node7 MASTER_PORT=1234"
SHELL_OF_SBATCH = "SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4 SLURM_JOB_NODELIST=gpu[07-09]"
STEP = f"{SHELL_OF_SBATCH} SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=4"
TASK_2 = STEP.replace("PROCID=0", "PROCID=2").replace("LOCALID=0", "LOCALID=1")


def parse(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("HOME=/root", None),
        ("RANK=0 WORLD_SIZE=1", None),
        ("RANK= WORLD_SIZE=", None),
        ("WORLD_SIZE=1", None),
        (SHELL_OF_SBATCH, None),  # `vitrail train` without srun is one process
        (f"{SHELL_OF_SBATCH} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1", None),  # the shell of salloc
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", None),
        (f"RANK=0 WORLD_SIZE=1 {TASK_2}", None),  # torchrun with one process in each task
        (f"RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 {MASTER}", Launch(1, 4, 1, "node7", 1234, False)),
        (f"RANK=0 WORLD_SIZE=4 {MASTER}", Launch(0, 4, 0, "node7", 1234, True)),
        (
            f"RANK=0 WORLD_SIZE=4 {MASTER} TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2",
            Launch(0, 4, 0, "node7", 1234, False, 2),
        ),
        (f"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 {MASTER} {TASK_2}", Launch(5, 8, 1, "node7", 1234, False)),  # in srun
        (f"WORLD_SIZE=4 {MASTER} {TASK_2}", Launch(2, 4, 1, "node7", 1234, False)),
        (f"{TASK_2} {MASTER}", Launch(2, 4, 1, "node7", 1234, False)),
        (TASK_2, Launch(2, 4, 1, "gpu07", 0, False)),
        (f"{TASK_2} SLURM_STEP_NODELIST=gpu12,gpu14", Launch(2, 4, 1, "gpu12", 0, False)),
        (f"{TASK_2} SLURM_STEP_NODELIST=r1-gpu[2,4]-ib,x", Launch(2, 4, 1, "r1-gpu2-ib", 0, False)),
        (f"{TASK_2} SLURM_STEP_NUM_NODES=1", Launch(2, 4, 1, "127.0.0.1", 0, False)),
        (f"{STEP} SLURM_STEP_NUM_NODES=1", Launch(0, 4, 0, "127.0.0.1", 0, True)),
        (f"{TASK_2} PMI_RANK=2 PMI_SIZE=4", Launch(2, 4, 1, "gpu07", 0, False)),  # srun with MPI
        (f"RANK=2 WORLD_SIZE=4 {TASK_2}", Launch(2, 4, 1, "gpu07", 0, False)),
        (
            f"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
            f"{SHELL_OF_SBATCH} SLURM_STEP_NUM_TASKS=1",
            Launch(1, 2, 1, "127.0.0.1", 0, False),
        ),
        (
            f"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 {MASTER}",
            Launch(3, 4, 0, "node7", 1234, False),
        ),
        ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", Launch(0, 2, 0, "127.0.0.1", 0, True)),
    ],
)
def test_place_of_a_process(words: str, expected: Launch | None) -> None:
    found = read_launcher_environment(parse(words))
    if found is not None and expected is not None and expected.port == 0:  # derived from the job
        assert 15000 <= found.port < 30000
        assert found == replace(expected, port=found.port)
    else:
        assert found == expected


def test_tasks_of_a_step_share_a_port_and_steps_do_not() -> None:
    ports = [
        launch.port
        for words in (STEP, TASK_2, STEP.replace("STEP_ID=3", "STEP_ID=4"), STEP.replace("JOB_ID=9", "JOB_ID=10"))
        if (launch := read_launcher_environment(parse(words)))
    ]
    assert ports[0] == ports[1]
    assert len(set(ports)) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (f"WORLD_SIZE=4 {MASTER}", "WORLD_SIZE=4"),
        (f"RANK=1 {MASTER}", "RANK=1"),
        (f"RANK=4 WORLD_SIZE=4 {MASTER}", "RANK is 4"),
        (f"RANK=0 WORLD_SIZE=0 {MASTER}", "WORLD_SIZE, which is 0"),
        (f"RANK=one WORLD_SIZE=4 {MASTER}", "RANK is not a number"),
        (f"RANK=-1 WORLD_SIZE=4 {MASTER}", "RANK is not a number"),
        (f"RANK=1 WORLD_SIZE=4.0 {MASTER}", "WORLD_SIZE is not a number"),
        ("WORLD_SIZE=many", "WORLD_SIZE is not a number"),
        (f"RANK=1 WORLD_SIZE=4 LOCAL_RANK=x {MASTER}", "LOCAL_RANK is not a number"),
        ("RANK=1 WORLD_SIZE=4", "MASTER_ADDR"),
        ("RANK=1 WORLD_SIZE=4 MASTER_ADDR=node7", "MASTER_PORT is missing"),
        ("RANK=1 WORLD_SIZE=4 MASTER_ADDR=node7 MASTER_PORT=99999", "1 to 65535"),
        ("SLURM_PROCID=1 SLURM_NTASKS=4", "SLURM_PROCID=1, SLURM_NTASKS=4"),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4", "SLURM_STEP_NUM_TASKS=4"),  # no node is named
        ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2", "OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_processes_that_cannot_join_are_an_error(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT") as error:
        read_launcher_environment(parse(words))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("words", "rank"), [("LOCAL_RANK=3 SLURM_LOCALID=1", 3), ("SLURM_LOCALID=1", 1), ("A=1", 0)])
def test_local_rank_in_a_group_of_the_caller(words: str, rank: int) -> None:
    assert read_local_rank(parse(words)) == rank
