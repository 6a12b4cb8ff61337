"""Two processes give the result of one, evaluate every image once, and end together."""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_distillation import student
from test_teacher import teacher
from test_train_fit import EVERYTHING, data, model
from torch import Tensor, nn

from vitrail import distributed
from vitrail.base.errors import ConfigError
from vitrail.base.machine import restore_threads
from vitrail.cli import build_app
from vitrail.distributed import (
    Ranks,
    SyncBatchNorm1d,
    is_lost_rank_error,
    join_process_group,
    open_store,
    set_sync_batch_norm_ranks,
)
from vitrail.train.fit import fit
from vitrail.train.restore import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = [str(Path({tests!r}) / each) for each in ("", "train", "tasks")]
from test_distributed import compute_with_ranks, train_in_folder
from vitrail.distributed import join_process_group, wrap_lost_rank_errors
from vitrail.base.errors import DataError, VitrailError

folder = Path({folder!r})
with join_process_group() as ranks:
    with join_process_group() as again:
        assert ranks == again, "a run in a group of its caller"
    train_in_folder(folder, ranks)
    torch.save(compute_with_ranks(ranks), folder / f"rank-{{ranks.rank}}.pt")
for failure in ("error", "kill"):
    try:
        with join_process_group() as ranks:
            if ranks.rank == 1 and failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if ranks.rank == 1:
                raise DataError("`data` has no cat.jpg")
            with wrap_lost_rank_errors(ranks, lambda: "; step 7 is saved"):
                ranks.all_reduce_sum(torch.ones(1))
    except VitrailError as error:
        (folder / f"{{failure}}-{{ranks.rank}}.txt").write_text(f"{{type(error).__name__}} {{error}}")
"""


def train_in_folder(folder: Path, ranks: Ranks) -> None:
    """With and without a teacher, and in bfloat16."""
    default = replace(EVERYTHING, loop=replace(EVERYTHING.loop, epochs=4, batch=8, accumulate=2))
    for name, made, taught in (
        ("plain", model(), None),
        ("distilled", student(), teacher()),
        ("bfloat16", model(), None),
    ):
        recipe = default.with_settings({"precision": "bfloat16"}) if name == "bfloat16" else default
        run = RunFolder(folder / name)
        result = fit(made, data(), recipe, run=run, ranks=ranks, device="cpu", teacher=taught)
        assert result.evaluation
        if ranks.is_first:
            weights = [float(each.double().sum()) for each in result.model.parameters()]
            found = {"records": result.records, "images": result.evaluation.images, "weights": weights}
            (run.folder / "result.json").write_text(json.dumps(found))


def make_rows(rank: int, *shape: int) -> Tensor:
    """Three rows on rank 0, five on rank 1; the mean is far from 0."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(3 + 2 * rank, *shape, generator=generator) + 5 * (rank + 1)).requires_grad_()


def make_loss_weights(rank: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(rank + 7))


def compute_with_ranks(ranks: Ranks) -> dict[str, Any]:
    """Results and gradients of all operations between processes, in this one."""
    found = dict[str, Any]()
    for name in ("gather", "sum"):
        values = make_rows(ranks.rank, 4) if name == "gather" else make_rows(0, 4)
        result = getattr(ranks, f"{name}_with_gradient")(values)
        (result * make_loss_weights(ranks.rank, result)).sum().backward()
        found[name] = (result.detach(), values.grad)
    for shape in ((4,), (4, 6)):
        norm = SyncBatchNorm1d(4)
        norm.ranks = ranks
        found[f"norm {shape}"] = run_norm(norm, make_rows(ranks.rank, *shape))
    found["head"] = train_head(SyncBatchNorm1d(6), make_rows(ranks.rank, 4)[:3], ranks)
    return found


def train_head(norm: nn.BatchNorm1d, rows: Tensor, ranks: Ranks) -> list[Tensor]:
    """The weights of a projection head after three steps, as a Trainer takes them."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3))
    set_sync_batch_norm_ranks(head, ranks)
    forward, optimizer = ranks.wrap_in_ddp(head, torch.device("cpu")), torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        forward(rows.detach()).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in head.state_dict().values()]


def run_norm(norm: nn.BatchNorm1d, rows: Tensor) -> dict[str, Any]:
    norm(rows.detach() * 2 + 1)
    result = norm(rows)
    (result * torch.linspace(-1, 1, 4).view(4, *(1,) * (rows.ndim - 2)) * result.square()).sum().div(100).backward()
    given = dict(norm.named_buffers()) | {name: each.grad for name, each in norm.named_parameters()}
    return {"result": result.detach(), "rows": rows.grad, **given, "eval": norm.eval()(rows.detach())}


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of two processes that srun seems to have started; the second ends by SIGKILL."""
    folder = tmp_path_factory.mktemp("two")
    make_run_folders(folder)
    program = folder / "program.py"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder)))
    environ = dict(os.environ, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1", MASTER_PORT=str(find_free_port()))
    pipe, words = subprocess.PIPE, [sys.executable, str(program)]
    processes = [
        subprocess.Popen(words, env={**environ, "SLURM_PROCID": str(rank)}, stderr=pipe, text=True) for rank in range(2)
    ]
    printed = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, -9], "".join(printed)[-3000:]
    return folder


def make_run_folders(folder: Path) -> None:
    for kind in ("plain", "distilled", "bfloat16"):
        (folder / kind / "checkpoints").mkdir(parents=True)


def test_two_processes_give_the_result_of_one(two: Path, tmp_path: Path) -> None:
    make_run_folders(tmp_path)
    with restore_threads():
        torch.set_num_threads(1)
        train_in_folder(tmp_path, Ranks())
    exact = ("loss", "val_loss", "val_top1", "accuracy")
    for kind, names, rounding in (("plain", exact, 1), ("distilled", exact, 1), ("bfloat16", exact[:2], 500)):
        mine, its = (json.loads((folder / kind / "result.json").read_text()) for folder in (tmp_path, two))
        assert mine["images"] == its["images"] == 24
        assert len(mine["records"]) == len(its["records"]) >= 20
        for one, other in zip(mine["records"], its["records"], strict=True):
            assert one["step"] == other["step"]
            for name in names:
                assert one.get(name) == pytest.approx(other.get(name), abs=1e-5 * rounding), (kind, one)
        assert mine["weights"] == pytest.approx(its["weights"], abs=1e-3 * rounding), kind


def test_gradients_flow_between_processes(two: Path) -> None:
    found = [torch.load(two / f"rank-{rank}.pt") for rank in range(2)]
    joined = torch.cat([make_rows(rank, 4) for rank in range(2)])
    for rank, rows in enumerate((slice(0, 3), slice(3, 8))):
        result, gradient = found[rank]["gather"]
        assert torch.equal(result, joined)
        expected = make_loss_weights(0, joined) + make_loss_weights(1, joined)
        assert torch.allclose(gradient, expected[rows], atol=1e-6)
        value = make_rows(0, 4)
        expected = make_loss_weights(0, value) + make_loss_weights(1, value)
        result, gradient = found[rank]["sum"]
        assert torch.allclose(result, value * 2)
        assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 6)])
def test_batch_norm_over_two_processes_is_that_of_the_joined_batch(two: Path, shape: tuple[int, ...]) -> None:
    rows = torch.cat([make_rows(rank, *shape).detach() for rank in range(2)]).requires_grad_()
    expected = run_norm(nn.BatchNorm1d(4), rows)
    first, second = (torch.load(two / f"rank-{rank}.pt")[f"norm {shape}"] for rank in range(2))
    assert expected.keys() == first.keys()
    for name, value in expected.items():
        if name in ("result", "rows", "eval"):
            found = torch.cat([first[name], second[name]])
        elif name in ("weight", "bias"):
            found = first[name] + second[name]  # gradients
        else:
            found = second[name]
        assert torch.allclose(found, value, rtol=1e-6, atol=1e-6), name


def test_projection_head_in_two_processes_is_trained_as_in_one(two: Path) -> None:
    rows = torch.cat([make_rows(rank, 4)[:3] for rank in range(2)])
    expected = train_head(nn.BatchNorm1d(6), rows, Ranks())
    for rank in range(2):
        for mine, its in zip(torch.load(two / f"rank-{rank}.pt")["head"], expected, strict=True):
            assert torch.allclose(mine, its, rtol=1e-6, atol=1e-6)


def test_error_of_one_process_ends_the_other_with_the_same_reason(two: Path) -> None:
    """At once: without that, the other waits for half an hour, which is longer than a test may take."""
    assert (two / "error-1.txt").read_text() == "DataError `data` has no cat.jpg"
    kind, message = (two / "error-0.txt").read_text().split(" ", 1)
    assert kind == "LostRankError"
    assert message == "rank 1 of 2 processes failed: `data` has no cat.jpg; step 7 is saved"


def test_killed_process_ends_the_other_with_one_line(two: Path) -> None:
    kind, message = (two / "kill-0.txt").read_text().split(" ", 1)
    assert kind == "LostRankError"
    assert message.startswith("rank 1 of 2 processes ended")
    assert message.endswith("; step 7 is saved")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[pair.cc:537] Read error [127.0.0.1]:11149: Connection reset by peer. GLHF!", True),
        ("[pair.cc:553] Connection closed by peer [10.0.0.7]:36744.", True),
        ("[unbound_buffer.cc:81] Timed out waiting 3600000ms for recv operation to complete", True),
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exited", True),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", False),
        ("DataLoader timed out after 5 seconds", False),
    ],
)
def test_lost_connections_are_told_from_other_errors(message: str, lost: bool) -> None:
    assert is_lost_rank_error(RuntimeError(message)) == lost
    assert not is_lost_rank_error(ConfigError(message))


@pytest.mark.parametrize(
    ("rank", "used", "named"), [(0, False, "1 of 2 processes"), (1, False, "rank 1 of 2"), (0, True, "in use")]
)
def test_process_does_not_wait_for_ever(
    rank: int, used: bool, named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "JOIN_SECONDS", 0.3)
    port = find_free_port()
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    server = socket.create_server(("0.0.0.0", port)) if used else socket.socket()
    with server, pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as error, join_process_group():
        pass
    open_store.cache_clear()
    assert named in str(error.value)
    assert capfd.readouterr().err == ""


def test_group_of_the_caller_needs_a_backend_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ConfigError, match="expected cpu:gloo,cuda:nccl"), join_process_group():
        pass


def test_stopped_torchrun_run_resumes_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a time budget, for which all processes must measure the same number of steps."""
    folder = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(
        "from vitrail.train import throughput\nthroughput.MIN_TIMED_SECONDS = 0.5\n"
        "from vitrail.cli import main\nmain()\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    words = ["train", "--minutes", "4", "--set", "depth=1", "--set", "width=12", "--out", str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*run, *words, "--eval-every", "0"], stdout=pipe, stderr=pipe, text=True)
    while process.poll() is None and not RunFolder(folder).read_records():
        time.sleep(0.01)
    process.terminate()
    out, err = process.communicate()
    assert f"--resume {folder}" in err, err[-2000:]
    assert out.count("10 classes") == 1, "only the first process prints"
    state = load_newest_checkpoint_on_ranks(RunFolder(folder))
    assert state is not None
    assert {"random/0/cpu", "random/1/cpu"} <= set(state.tensors)
    plan = RunFolder(folder).load_plan()
    assert plan["world"] == 2
    assert 0 < state.metadata["step"] < plan["steps"]
    plan["steps"] = state.metadata["step"] + 2  # so that resuming does not take the rest of the budget
    (folder / "run.json").write_text(json.dumps(plan))
    build_app()(["train", "--resume", str(folder)], exit_on_error=False, result_action="return_value")
    assert "world was 2 and is 1" in capsys.readouterr().out
    assert (folder / "model" / "model.safetensors").exists()


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
