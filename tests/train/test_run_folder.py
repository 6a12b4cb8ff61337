import json
from pathlib import Path

import pytest
import torch

from vitrail.base.errors import CheckpointError
from vitrail.train.restore import load_newest_checkpoint_on_ranks, truncate_log
from vitrail.train.run_folder import RunFolder, name_run
from vitrail.train.training_state import TrainingState, read_training_state, write_training_state


def state(step: int) -> TrainingState:
    return TrainingState(
        {"model/weight": torch.full((3,), float(step)), "random/0/cpu": torch.get_rng_state()}, {"step": step}
    )


@pytest.mark.parametrize(
    ("data", "recipe", "name"),
    [
        ("fashion", "fashion", "fashion"),
        ("/data/photos", "finetune", "photos"),
        ("photos", "linear-probe", "photos-linear-probe"),
        ("cifar10", "cifar10-cpu", "cifar10-cpu"),
        ("own", "own", "own"),
        ("/", "scratch", "data"),
    ],
)
def test_names_of_runs(data: str, recipe: str, name: str) -> None:
    assert name_run(data, recipe) == name


def test_training_state_round_trip(tmp_path: Path) -> None:
    given = TrainingState(
        {"a/x": torch.randn(2, 3), "a/y": torch.tensor(3.5), "b/z": torch.arange(4, dtype=torch.uint8)}, {"n": 1}
    )
    write_training_state(given, tmp_path / "state.safetensors")
    restored = read_training_state(tmp_path / "state.safetensors")
    assert restored.metadata == {"n": 1}
    assert restored.tensors.keys() == given.tensors.keys()
    assert all(torch.equal(restored.tensors[name], each) for name, each in given.tensors.items())
    assert restored.tensors_with_prefix("a").keys() == {"x", "y"}


@pytest.mark.parametrize("content", [b"", b"not a state", b"\x08\0\0\0\0\0\0\0{}      "])
def test_damaged_state_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_training_state(path)


def test_newest_two_checkpoints_remain(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"steps": 5})
    assert run.load_plan() == {"steps": 5}
    assert load_newest_checkpoint_on_ranks(run) is None
    for step in (9, 10, 100_000_000):
        run.save_checkpoint(state(step), step)
    assert [path.stem for path in run.list_checkpoints()] == ["step-00000010", "step-100000000"], (
        "sorted by number, not as text"
    )
    latest = load_newest_checkpoint_on_ranks(run)
    assert latest is not None
    assert latest.metadata["step"] == 100_000_000


def test_unfinished_checkpoints_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    (run.folder / "checkpoints" / f".step-00000003.safetensors.{'ab' * 16}").write_bytes(b"half")
    (run.folder / "checkpoints" / ".tmpAbCdEf").write_bytes(b"half, by safetensors")
    assert run.list_checkpoints() == []
    run.save_checkpoint(state(4), 4)
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000004.safetensors"]


def test_truncated_log_continues_from_a_step(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    for step in range(5):
        run.append_to_log({"step": step, "loss": 0.5})
    with (run.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [each["step"] for each in run.read_records()] == [0, 1, 2, 3, 4]
    truncate_log(run, 2)
    run.append_to_log({"step": 3})
    lines = (run.folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {}).append_to_log({"step": 1})
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", {})
    with pytest.raises(CheckpointError, match=r"is not a run: it has no run\.json"):
        RunFolder(tmp_path / "other").load_plan()
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        RunFolder(tmp_path / "run").load_plan()
