import json
from pathlib import Path

import pytest
import torch

from vitrail.errors import CheckpointError
from vitrail.train.run import Run
from vitrail.train.state import State, read_state, write_state


def state(step: int) -> State:
    return State({"model/weight": torch.full((3,), float(step)), "random/0/cpu": torch.get_rng_state()}, {"step": step})


def test_a_state_comes_back_as_it_went(tmp_path: Path) -> None:
    given = State(
        {"a/x": torch.randn(2, 3), "a/y": torch.tensor(3.5), "b/z": torch.arange(4, dtype=torch.uint8)}, {"n": 1}
    )
    write_state(given, tmp_path / "state.safetensors")
    back = read_state(tmp_path / "state.safetensors")
    assert back.numbers == {"n": 1}
    assert back.tensors.keys() == given.tensors.keys()
    assert all(torch.equal(back.tensors[name], each) for name, each in given.tensors.items())
    assert back.part("a").keys() == {"x", "y"}


@pytest.mark.parametrize("content", [b"", b"no state", b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_state_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(path)


def test_the_newest_states_stay(tmp_path: Path) -> None:
    run = Run.begun(tmp_path / "run", {"steps": 5})
    assert run.plan() == {"steps": 5}
    assert run.latest() is None
    for step in (9, 10, 100_000_000):
        run.save(state(step), step)
    assert [path.stem for path in run.states()] == ["step-00000010", "step-100000000"], "by number, not by letter"
    latest = run.latest()
    assert latest is not None
    assert latest.numbers["step"] == 100_000_000


def test_what_was_cut_off_is_no_state_and_goes_with_the_next_save(tmp_path: Path) -> None:
    run = Run.begun(tmp_path / "run", {})
    (run.folder / "checkpoints" / f".step-00000003.safetensors.{'ab' * 16}").write_bytes(b"half")
    (run.folder / "checkpoints" / ".tmpAbCdEf").write_bytes(b"half, by safetensors")
    assert run.states() == []
    run.save(state(4), 4)
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000004.safetensors"]


def test_a_log_cut_off_in_a_line_goes_on_from_a_step(tmp_path: Path) -> None:
    run = Run.begun(tmp_path / "run", {})
    for step in range(5):
        run.log({"step": step, "loss": 0.5})
    with (run.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [each["step"] for each in run.records()] == [0, 1, 2, 3, 4]
    run.forget_after(2)
    run.log({"step": 3})
    lines = (run.folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    Run.begun(tmp_path / "run", {}).log({"step": 1})
    with pytest.raises(CheckpointError, match="already holds a run"):
        Run.begun(tmp_path / "run", {})
    with pytest.raises(CheckpointError, match=r"holds no run\.json"):
        Run(tmp_path / "other").plan()
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Run(tmp_path / "run").plan()
