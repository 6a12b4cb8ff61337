"""Damaged and contested run folders: several processes, flipped bytes, special files, killed workers, SIGHUP."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_train_fit import EVERYTHING, NOISY, assert_same, data, model, train_toy_model

from vitrail.base.errors import CheckpointError, DataError, VitrailError
from vitrail.base.locks import InUseError
from vitrail.checkpoint.run_files import find_finished_run
from vitrail.data.batch import is_worker_death
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.train.callbacks import TrainingStart
from vitrail.train.fit import fit
from vitrail.train.loop import StoppedError
from vitrail.train.restore import load_newest_checkpoint_on_ranks, truncate_log
from vitrail.train.run_folder import RunFolder, create_numbered_folder
from vitrail.train.run_list import read_run_summaries, read_run_summary
from vitrail.train.training_state import HEADER_KEY, TrainingState, read_training_state, write_training_state

SAVING = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=1))
FORK = multiprocessing.get_context("fork")


class StepCallback:
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self.call = call

    def on_start(self, start: TrainingStart) -> None: ...
    def on_log(self, record: Mapping[str, float]) -> None: ...
    def on_finish(self) -> None: ...

    def on_step(self, step: int) -> None:
        self.call(step)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run with its last two checkpoints; do not modify it."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "intact", {"steps": 15, "model": {"name": "a"}})
    train_toy_model(SAVING, run)
    return run


@pytest.fixture
def run_copy(intact: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(intact.folder, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def get_error_message(call: Callable[[], object]) -> str:
    """The message of a VitrailError, or an empty string; any other error is a bug."""
    try:
        call()
    except VitrailError as error:
        return str(error)
    return ""


# several processes


def hold_lock_in_process(folder: Path, ready: Any, done: Any) -> None:
    with RunFolder(folder).hold_lock():
        ready.set()
        done.wait(60)


def test_second_process_is_refused_and_changes_nothing(run_copy: RunFolder) -> None:
    ready, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold_lock_in_process, args=(run_copy.folder, ready, done))
    process.start()
    assert ready.wait(60)
    before = read_files(run_copy.folder)
    message = rf"copy is in use by another process \(pid {process.pid}\); wait for it to finish, or start a new run in "
    with pytest.raises(InUseError, match=message):
        train_toy_model(SAVING, run_copy)
    with pytest.raises(VitrailError):
        RunFolder.create(run_copy.folder, {})
    assert read_run_summary(run_copy.folder).step == 15, "reading needs no lock"
    assert read_files(run_copy.folder) == before
    process.kill()  # its lock file remains, but is not locked
    process.join()
    train_toy_model(SAVING, run_copy)
    assert not (run_copy.folder / ".lock").exists()


def start_or_resume(folder: Path, workers: int) -> None:
    """Start the run, or resume it; exit code 3 if another process holds the lock."""
    try:
        with RunFolder(folder).hold_lock():
            if not (folder / "run.json").exists():
                RunFolder.create(folder, {})
            train_toy_model(SAVING, RunFolder(folder), workers=workers)
    except InUseError:
        os._exit(3)


@pytest.mark.timeout(3600)
def test_competing_killed_processes_give_the_result_of_one(intact: RunFolder, tmp_path: Path, kills: int) -> None:
    folder, chance, codes = tmp_path / "run", random.Random(0), list[int | None]()
    for round_ in range(max(kills // 10, 2)):
        processes = [FORK.Process(target=start_or_resume, args=(folder, each % 2)) for each in range(2 + round_ % 2)]
        for process in processes:
            process.start()
        while all(process.is_alive() for process in processes):  # the first to exit is one that was refused
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in processes:
            process.kill()
            process.join()
            codes.append(process.exitcode)
    train_toy_model(SAVING, RunFolder(folder))
    assert_same(intact, RunFolder(folder))
    assert set(codes) <= {0, 3, -signal.SIGKILL}
    assert 3 in codes


def create_folder_in_process(gate: Any, names: Any) -> None:
    gate.wait()
    names.put(str(create_numbered_folder("photos", "r")))


def test_concurrent_runs_get_different_numbered_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gate, names = FORK.Event(), FORK.Queue()
    processes = [FORK.Process(target=create_folder_in_process, args=(gate, names)) for _ in range(3)]
    for process in processes:
        process.start()
    gate.set()
    assert {names.get() for _ in processes} == {f"runs/photos-r-{number}" for number in (1, 2, 3)}
    for process in processes:
        process.join()


def test_folder_with_only_a_lock_file_is_free(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".lock").write_text("1 elsewhere\n")
    RunFolder.check_folder_is_free(tmp_path / "new")
    assert [run.name for run in read_run_summaries(tmp_path)] == ["new"]


@pytest.mark.parametrize("plan", ['{"mine": 1}', "[]", "not json", '{"request": {}, "steps": 5}'])
def test_folder_with_other_files_is_refused(plan: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(plan)
    if "request" in plan:
        (tmp_path / "thesis.txt").write_text("mine")
    before = read_files(tmp_path)
    with pytest.raises(CheckpointError, match="holds other files"):
        RunFolder.create(tmp_path, {})
    assert read_files(tmp_path) == before


def test_model_without_log_and_checkpoints_is_still_a_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    RunFolder.create(run.folder, {"again": True})  # as after a kill before the first step
    (run.folder / "model").mkdir()
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunFolder.check_folder_is_free(run.folder)


# damage


def flip_bit(content: bytes, chance: random.Random) -> bytes:
    position = chance.randrange(len(content))
    return content[:position] + bytes([content[position] ^ (1 << chance.randrange(8))]) + content[position + 1 :]


def truncate(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def states_equal(one: TrainingState | None, other: TrainingState | None) -> bool:
    return (
        one is not None
        and other is not None
        and dict(one.metadata) == dict(other.metadata)
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_damaged_checkpoint_falls_back_to_the_one_before(run_copy: RunFolder, mutations: int) -> None:
    chance = random.Random(0)
    before, last = run_copy.list_checkpoints()
    good, content = (read_training_state(before), read_training_state(last)), last.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    fell_back = 0
    for number in range(max(mutations // 20, 50)):
        part, rest = (content[:header], content[header:]) if number % 3 else (content, b"")
        last.write_bytes(truncate(content, chance) if number % 10 == 0 else flip_bit(part, chance) + rest)
        state = load_newest_checkpoint_on_ranks(run_copy)
        fell_back += states_equal(state, good[0])
        assert states_equal(state, good[0]) or states_equal(state, good[1])
        for aside in last.parent.glob("*.damaged"):
            aside.unlink()
    assert fell_back


def test_resume_from_the_checkpoint_before_is_bit_identical(intact: RunFolder, run_copy: RunFolder) -> None:
    last = run_copy.list_checkpoints()[-1]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    message = r"^step-00000015\.safetensors is damaged \(checksum mismatch\); resuming from step-00000014$"
    with pytest.warns(match=message):
        train_toy_model(SAVING, run_copy)
    assert_same(intact, run_copy)
    assert last.with_name(f"{last.name}.damaged").read_bytes() == content
    assert [path.stem for path in run_copy.list_checkpoints()] == ["step-00000014", "step-00000015"]


def test_nothing_changes_if_no_checkpoint_is_intact(run_copy: RunFolder) -> None:
    for path in run_copy.list_checkpoints():
        path.write_bytes(b"damaged")
    before = read_files(run_copy.folder)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .*step-00000015.*step-00000014.* start a new run"):
        train_toy_model(SAVING, run_copy)
    assert read_files(run_copy.folder) == before


def test_damaged_checkpoint_is_not_reported_as_good(run_copy: RunFolder) -> None:
    for path in run_copy.list_checkpoints()[1:]:
        path.unlink()

    def damage(step: int) -> None:
        run_copy.list_checkpoints()[-1].write_bytes(b"damaged")
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with pytest.raises(DataError, match="after step 15, there is no checkpoint to resume from"):
        fit(model(), data(), SAVING, run=run_copy, callbacks=StepCallback(damage), device="cpu")


def test_checkpoint_of_an_earlier_version_without_checksum_is_read(run_copy: RunFolder) -> None:
    path = run_copy.list_checkpoints()[-1]
    state = read_training_state(path)
    assert state.verified
    save_file(dict(state.tensors), path, {HEADER_KEY: json.dumps(dict(state.metadata))})
    old = load_newest_checkpoint_on_ranks(run_copy)
    assert states_equal(old, state)
    assert old is not None
    assert not old.verified


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer/head.weight/exp_avg", torch.zeros(7)),
        ("random/0/cpu", torch.zeros(3)),
        ("window/loss", torch.zeros(3)),
        ("model/head.weight", torch.zeros(1)),
    ],
)
def test_checkpoint_that_does_not_fit_is_a_one_line_error(run_copy: RunFolder, name: str, value: torch.Tensor) -> None:
    """Its checksum is correct: anyone who writes a file can compute one."""
    path = run_copy.list_checkpoints()[-1]
    state = read_training_state(path)
    write_training_state(TrainingState({**state.tensors, name: value}, state.metadata), path)
    with pytest.raises(CheckpointError, match=r"not fit|checkpoint"):
        train_toy_model(SAVING, run_copy)


@pytest.mark.parametrize(
    "numbers", [{"seconds": "x"}, {"skipped": 7}, {"step": 15.0}, {"step": 10**30}, {"seconds": []}]
)
def test_metadata_of_other_types_is_a_one_line_error(run_copy: RunFolder, numbers: dict[str, Any]) -> None:
    for path in run_copy.list_checkpoints()[:-1]:
        path.unlink()
    state = read_training_state(run_copy.list_checkpoints()[-1])
    write_training_state(TrainingState(state.tensors, {**state.metadata, **numbers}), run_copy.list_checkpoints()[-1])
    with pytest.raises(CheckpointError) as caught:
        train_toy_model(SAVING, run_copy)
    assert "\n" not in str(caught.value)


def test_flipped_bit_in_the_plan_is_detected(run_copy: RunFolder, mutations: int) -> None:
    path, plan, chance, found = run_copy.folder / "run.json", run_copy.load_plan(), random.Random(0), 0
    content = path.read_bytes()
    for _ in range(max(mutations // 20, 50)):
        path.write_bytes(flip_bit(content, chance))
        try:
            now = run_copy.load_plan()
        except CheckpointError:
            found += 1
            assert read_run_summary(run_copy.folder).state.startswith("damaged: run.json")
        else:
            assert {name: now.get(name) for name in plan} == plan, "only the key of the checksum may differ"
    assert found


BAD_LINES = (
    *("{", "[1]", "7", "null", "{}", '{"step": "x"}', '{"step": 1.5}', '{"step": true}', '{"step": NaN}'),
    *('{"step": -1}', '{"step": 1' + 400 * "0" + "}", '{"loss": 1}', 5000 * "[", "\x00\x00", '{"step": Infinity}'),
    '{"step": 1, "x": "' + 2**21 * "y" + '"}',
)


def test_damaged_log_lines_are_counted_and_left_out(intact: RunFolder, run_copy: RunFolder) -> None:
    path = run_copy.folder / "log.jsonl"
    lines = path.read_text().splitlines()
    damaged = "".join(
        f"{bad}\n{line}\n" for bad, line in zip(BAD_LINES, [*lines, *len(BAD_LINES) * [""]], strict=False)
    )
    path.write_text(damaged + "".join(f"{line}\n" for line in lines[len(BAD_LINES) :]) + '{"step": 15, "lo')
    assert "damaged lines" in read_run_summary(run_copy.folder).state
    with pytest.warns(
        match=r"lines of log\.jsonl are damaged and left out; the original is kept as log\.jsonl\.damaged"
    ):
        train_toy_model(SAVING, run_copy)
    assert_same(intact, run_copy)
    assert (run_copy.folder / "log.jsonl.damaged").read_text().startswith(damaged[:100])


@pytest.mark.filterwarnings("ignore:.*damaged and left out")
def test_flipped_bit_in_the_log_does_not_change_weights(intact: RunFolder, run_copy: RunFolder, mutations: int) -> None:
    path, chance = run_copy.folder / "log.jsonl", random.Random(0)
    content, last = path.read_bytes(), run_copy.list_checkpoints()[-1]
    for _ in range(max(mutations // 1000, 2)):
        path.write_bytes(flip_bit(content, chance))
        last.unlink()
        train_toy_model(SAVING, run_copy)
        assert states_equal(
            replace(read_training_state(last), metadata={}),
            replace(read_training_state(intact.list_checkpoints()[-1]), metadata={}),
        )


# special files


def make_named_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def make_socket(path: Path) -> None:
    current = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(current)


def make_full_folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


SPECIAL_FILES = (make_named_pipe, link_to_device, link_to_itself, link_to_nothing, make_socket, make_full_folder)
RUN_FILES = (
    "run.json",
    "log.jsonl",
    "checkpoints",
    "checkpoints/step-00000015.safetensors",
    ".lock",
    "model",
    "curves.png",
)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*damaged")
@pytest.mark.parametrize("kind", SPECIAL_FILES)
@pytest.mark.parametrize("name", RUN_FILES)
def test_special_file_is_a_one_line_error_and_does_not_block(
    run_copy: RunFolder, name: str, kind: Callable[[Path], None]
) -> None:
    path = run_copy.folder / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind(path)

    def resume() -> None:
        with run_copy.hold_lock():
            run_copy.load_plan()
            load_newest_checkpoint_on_ranks(run_copy)
            truncate_log(run_copy, 15)

    for ask in (read_run_summary, read_run_summaries, find_finished_run, RunFolder.check_folder_is_free):
        assert "\n" not in get_error_message(lambda ask=ask: ask(run_copy.folder))
    message = get_error_message(resume)
    assert "\n" not in message
    assert message or "step-" in name or kind is make_full_folder


# what is deleted


def test_only_files_of_the_run_are_deleted(run_copy: RunFolder) -> None:
    folder = run_copy.folder / "checkpoints"
    other_files = [
        ".keep",
        ".tmpfoo",
        ".tmpabcdef.txt",
        "step-1.safetensors",
        ".step-00000003.safetensors.abc",
        "x.damaged",
    ]
    for name in other_files:
        (folder / name).write_text("mine")
    (folder / ".tmpAAAAAA").mkdir()
    (folder / "step-00000001.safetensors").symlink_to(folder / ".keep")
    state = read_training_state(run_copy.list_checkpoints()[-1])
    run_copy.save_checkpoint(TrainingState(state.tensors, {**state.metadata, "step": 16}), 16)
    assert all((folder / name).read_text() == "mine" for name in other_files)
    assert (folder / ".tmpAAAAAA").is_dir()
    assert (folder / "step-00000001.safetensors").is_symlink()
    assert not (folder / "step-00000014.safetensors").exists()


def test_nothing_is_deleted_through_a_link(run_copy: RunFolder, tmp_path: Path) -> None:
    state = read_training_state(run_copy.list_checkpoints()[-1])
    (run_copy.folder / "checkpoints").rename(tmp_path / "theirs")
    (run_copy.folder / "checkpoints").symlink_to(tmp_path / "theirs")
    before = read_files(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        run_copy.save_checkpoint(state, 16)
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        train_toy_model(SAVING, run_copy)
    assert read_files(tmp_path / "theirs") == before


def test_nothing_is_written_through_a_linked_log(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    (tmp_path / "theirs").write_text("mine\n")
    (run.folder / "log.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="cannot write"):
        run.append_to_log({"step": 1})
    assert (tmp_path / "theirs").read_text() == "mine\n"


# requests from untrusted files


def read_request(given: Any) -> Request:
    return Request.from_json(given, "run").with_trusted_code((), "run")


def test_request_of_other_types_is_a_one_line_error() -> None:
    good = Request(data="photos", recipe=Recipe(name="r")).to_json()
    for name in (*good, "unknown"):
        for value in (5, [], {}, float("nan"), "", "\0", {"name": 3}, [[]], None):
            given: Any = {**good, name: value}
            assert "\n" not in get_error_message(partial(read_request, given))


# signals and workers


def train_and_send_sighup(folder: Path, ignored: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # the tests may run under nohup

    def send(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGHUP)

    recipe = replace(SAVING, loop=replace(SAVING.loop, save_every=100))
    try:
        fit(model(), data(), recipe, run=RunFolder(folder), callbacks=StepCallback(send), device="cpu")
    except StoppedError as error:
        os._exit(error.exit_code if "stopped by SIGHUP after step 7" in str(error) else 1)


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_saves_a_checkpoint_unless_it_is_ignored(ignored: bool, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    process = FORK.Process(target=train_and_send_sighup, args=(run.folder, ignored))
    process.start()
    process.join()
    assert process.exitcode == (0 if ignored else 129)
    assert [path.stem for path in run.list_checkpoints()] == [f"step-{15 if ignored else 7:08}"]


def test_closed_terminal_does_not_prevent_saving(tmp_path: Path) -> None:
    def raise_io_error(step: int) -> None:
        raise OSError(5, "Input/output error")

    run = RunFolder.create(tmp_path / "run", {})
    fit(model(), data(), SAVING, run=run, callbacks=StepCallback(raise_io_error), device="cpu")
    assert run.list_checkpoints()


def test_killed_data_worker_is_a_one_line_error_and_the_run_resumes(intact: RunFolder, tmp_path: Path) -> None:
    def kill(step: int) -> None:
        if step == 6:
            worker = multiprocessing.active_children()[0]
            os.kill(worker.pid or 0, signal.SIGKILL)
            while True:  # until torch reports it, which may happen at any point
                time.sleep(0.01)

    recipe = replace(SAVING, loop=replace(SAVING.loop, save_every=5))
    run = RunFolder.create(tmp_path / "run", {})
    message = (
        r"^one of 2 data workers was killed, .* fewer `workers`.* after step 6, the last good checkpoint is "
        r".*step-00000005\.safetensors: continue with `resume` .*run$"
    )
    with pytest.raises(DataError, match=message):
        fit(model(**NOISY), data(), recipe, run=run, workers=2, callbacks=StepCallback(kill), device="cpu")
    train_toy_model(SAVING, run)
    assert_same(intact, run)


def test_dead_worker_is_found_in_the_cause_of_an_error() -> None:
    dead = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    above = CheckpointError("cannot write")
    above.__cause__ = dead
    assert is_worker_death(above)
    assert not is_worker_death(RuntimeError("another"))
