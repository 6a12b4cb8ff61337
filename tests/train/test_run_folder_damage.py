"""Run folders under attack: several owners, flipped bytes, special files, names of others, killed workers, hang-ups."""

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
from test_train_fit import EVERYTHING, NOISY, assert_same, data, model, trained

from vitrail.checkpoint.run_files import find_finished_run
from vitrail.data.loader import is_worker_death
from vitrail.errors import CheckpointError, DataError, VitrailError
from vitrail.locks import InUseError
from vitrail.train.callbacks import TrainingStart
from vitrail.train.fit import fit
from vitrail.train.loop import StoppedError
from vitrail.train.recipe import Recipe
from vitrail.train.request import Request
from vitrail.train.resume import load_newest_checkpoint_on_ranks, truncate_log
from vitrail.train.run_folder import RunFolder, create_numbered_folder
from vitrail.train.run_list import read_run_summaries, read_run_summary
from vitrail.train.training_state import HEADER_KEY, TrainingState, read_training_state, write_training_state

SAVING = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=1))
FORK = multiprocessing.get_context("fork")


class Watching:
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int], object]) -> None:
        self.call = call

    def on_start(self, start: TrainingStart) -> None: ...
    def on_log(self, record: Mapping[str, float]) -> None: ...
    def on_finish(self) -> None: ...

    def on_step(self, step: int) -> None:
        self.call(step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing happened to, with its last two checkpoints; to be read, not changed."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "whole", {"steps": 15, "model": {"name": "a"}})
    trained(SAVING, run)
    return run


@pytest.fixture
def copy(whole: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(whole.folder, tmp_path / "copy")
    return RunFolder(tmp_path / "copy")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(call: Callable[[], object]) -> str:
    """The message where it is refused, else nothing; any other error is ours."""
    try:
        call()
    except VitrailError as error:
        return str(error)
    return ""


# owners


def hold(folder: Path, ready: Any, done: Any) -> None:
    with RunFolder(folder).hold_lock():
        ready.set()
        done.wait(60)


def test_a_second_owner_is_told_whose_it_is_and_changes_nothing(copy: RunFolder) -> None:
    ready, done = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(copy.folder, ready, done))
    process.start()
    assert ready.wait(60)
    before = contents(copy.folder)
    message = rf"copy is in use by another process \(pid {process.pid}\); wait for it to finish, or start a new run in "
    with pytest.raises(InUseError, match=message):
        trained(SAVING, copy)
    with pytest.raises(VitrailError):
        RunFolder.create(copy.folder, {})
    assert read_run_summary(copy.folder).step == 15, "who only reads does not ask"
    assert contents(copy.folder) == before
    process.kill()  # leaves its lock file, which means nothing
    process.join()
    trained(SAVING, copy)
    assert not (copy.folder / ".lock").exists()


def compete(folder: Path, workers: int) -> None:
    """Starts the run if there is none, else resumes it; 3 where another process has it."""
    try:
        with RunFolder(folder).hold_lock():
            if not (folder / "run.json").exists():
                RunFolder.create(folder, {})
            trained(SAVING, RunFolder(folder), workers=workers)
    except InUseError:
        os._exit(3)


@pytest.mark.timeout(3600)
def test_several_processes_on_one_folder_with_kills_end_as_one_would(
    whole: RunFolder, tmp_path: Path, kills: int
) -> None:
    folder, chance, codes = tmp_path / "run", random.Random(0), list[int | None]()
    for round_ in range(max(kills // 10, 2)):
        processes = [FORK.Process(target=compete, args=(folder, each % 2)) for each in range(2 + round_ % 2)]
        for process in processes:
            process.start()
        while all(process.is_alive() for process in processes):  # the first to end is one that was refused
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.3))
        for process in processes:
            process.kill()
            process.join()
            codes.append(process.exitcode)
    trained(SAVING, RunFolder(folder))
    assert_same(whole, RunFolder(folder))
    assert set(codes) <= {0, 3, -signal.SIGKILL}
    assert 3 in codes


def take(gate: Any, names: Any) -> None:
    gate.wait(60)
    names.put(str(create_numbered_folder("photos", "r")))


def test_starts_without_a_folder_get_different_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gate, names = FORK.Event(), FORK.Queue()
    processes = [FORK.Process(target=take, args=(gate, names)) for _ in range(3)]
    for process in processes:
        process.start()
    gate.set()
    assert {names.get(timeout=60) for _ in processes} == {f"runs/photos-r-{number}" for number in (1, 2, 3)}
    for process in processes:
        process.join()


def test_the_lock_is_nothing_that_a_run_holds(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".lock").write_text("1 elsewhere\n")
    RunFolder.check_folder_is_free(tmp_path / "new")
    assert [run.name for run in read_run_summaries(tmp_path)] == ["new"]


@pytest.mark.parametrize("plan", ['{"mine": 1}', "[]", "not json", '{"request": {}, "steps": 5}'])
def test_a_folder_with_files_of_others_is_not_begun_in_whatever_its_run_json_says(plan: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(plan)
    if "request" in plan:
        (tmp_path / "thesis.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="holds other files"):
        RunFolder.create(tmp_path, {})
    assert contents(tmp_path) == before


def test_a_model_without_its_log_and_checkpoints_is_still_a_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    RunFolder.create(run.folder, {"again": True})  # as after a kill before the first step
    (run.folder / "model").mkdir()
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunFolder.check_folder_is_free(run.folder)


# damage


def flipped(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def same(one: TrainingState | None, other: TrainingState | None) -> bool:
    return (
        one is not None
        and other is not None
        and dict(one.metadata) == dict(other.metadata)
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    )


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_damage_to_the_last_checkpoint_falls_back_or_changes_nothing(copy: RunFolder, mutations: int) -> None:
    chance = random.Random(0)
    before, last = copy.list_checkpoints()
    good, content = (read_training_state(before), read_training_state(last)), last.read_bytes()
    header = int.from_bytes(content[:8], "little") + 8
    fell_back = 0
    for number in range(max(mutations // 20, 50)):
        part, rest = (content[:header], content[header:]) if number % 3 else (content, b"")
        last.write_bytes(cut(content, chance) if number % 10 == 0 else flipped(part, chance) + rest)
        state = load_newest_checkpoint_on_ranks(copy)
        fell_back += same(state, good[0])
        assert same(state, good[0]) or same(state, good[1])
        for aside in last.parent.glob("*.damaged"):
            aside.unlink()
    assert fell_back


def test_a_run_that_fell_back_ends_as_if_nothing_had_been_damaged(whole: RunFolder, copy: RunFolder) -> None:
    last = copy.list_checkpoints()[-1]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    message = r"^step-00000015\.safetensors is damaged \(checksum mismatch\); resuming from step-00000014$"
    with pytest.warns(match=message):
        trained(SAVING, copy)
    assert_same(whole, copy)
    assert last.with_name(f"{last.name}.damaged").read_bytes() == content
    assert [path.stem for path in copy.list_checkpoints()] == ["step-00000014", "step-00000015"]


def test_where_no_checkpoint_is_good_nothing_is_touched(copy: RunFolder) -> None:
    for path in copy.list_checkpoints():
        path.write_bytes(b"damaged")
    before = contents(copy.folder)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .*step-00000015.*step-00000014.* start a new run"):
        trained(SAVING, copy)
    assert contents(copy.folder) == before


def test_a_damaged_checkpoint_is_never_called_good(copy: RunFolder) -> None:
    for path in copy.list_checkpoints()[1:]:
        path.unlink()

    def damage(step: int) -> None:
        copy.list_checkpoints()[-1].write_bytes(b"damaged")
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with pytest.raises(DataError, match="after step 15, there is no checkpoint to resume from"):
        fit(model(), data(), SAVING, run=copy, callback=Watching(damage), device="cpu")


def test_a_checkpoint_of_an_earlier_version_has_no_checksum(copy: RunFolder) -> None:
    path = copy.list_checkpoints()[-1]
    state = read_training_state(path)
    assert state.verified
    save_file(dict(state.tensors), path, {HEADER_KEY: json.dumps(dict(state.metadata))})
    old = load_newest_checkpoint_on_ranks(copy)
    assert same(old, state)
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
def test_a_checkpoint_that_does_not_fit_is_one_line(copy: RunFolder, name: str, value: torch.Tensor) -> None:
    """With a checksum that does: whoever wrote it can compute one."""
    path = copy.list_checkpoints()[-1]
    state = read_training_state(path)
    write_training_state(TrainingState({**state.tensors, name: value}, state.metadata), path)
    with pytest.raises(CheckpointError, match=r"not fit|checkpoint"):
        trained(SAVING, copy)


@pytest.mark.parametrize(
    "numbers", [{"seconds": "x"}, {"skipped": 7}, {"step": 15.0}, {"step": 10**30}, {"seconds": []}]
)
def test_numbers_of_other_kinds_are_one_line(copy: RunFolder, numbers: dict[str, Any]) -> None:
    for path in copy.list_checkpoints()[:-1]:
        path.unlink()
    state = read_training_state(copy.list_checkpoints()[-1])
    write_training_state(TrainingState(state.tensors, {**state.metadata, **numbers}), copy.list_checkpoints()[-1])
    with pytest.raises(CheckpointError) as caught:
        trained(SAVING, copy)
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_in_the_plan_is_found(copy: RunFolder, mutations: int) -> None:
    path, plan, chance, found = copy.folder / "run.json", copy.load_plan(), random.Random(0), 0
    content = path.read_bytes()
    for _ in range(max(mutations // 20, 50)):
        path.write_bytes(flipped(content, chance))
        try:
            now = copy.load_plan()
        except CheckpointError:
            found += 1
            assert read_run_summary(copy.folder).state.startswith("damaged: run.json")
        else:
            assert {name: now.get(name) for name in plan} == plan, "at most the name of the checksum"
    assert found


BAD_LINES = (
    *("{", "[1]", "7", "null", "{}", '{"step": "x"}', '{"step": 1.5}', '{"step": true}', '{"step": NaN}'),
    *('{"step": -1}', '{"step": 1' + 400 * "0" + "}", '{"loss": 1}', 5000 * "[", "\x00\x00", '{"step": Infinity}'),
    '{"step": 1, "x": "' + 2**21 * "y" + '"}',
)


def test_damaged_lines_of_a_log_are_counted_and_left_out(whole: RunFolder, copy: RunFolder) -> None:
    path = copy.folder / "log.jsonl"
    lines = path.read_text().splitlines()
    spoiled = "".join(
        f"{bad}\n{line}\n" for bad, line in zip(BAD_LINES, [*lines, *len(BAD_LINES) * [""]], strict=False)
    )
    path.write_text(spoiled + "".join(f"{line}\n" for line in lines[len(BAD_LINES) :]) + '{"step": 15, "lo')
    assert "damaged lines" in read_run_summary(copy.folder).state
    with pytest.warns(
        match=r"lines of log\.jsonl are damaged and left out; the original is kept as log\.jsonl\.damaged"
    ):
        trained(SAVING, copy)
    assert_same(whole, copy)
    assert (copy.folder / "log.jsonl.damaged").read_text().startswith(spoiled[:100])


@pytest.mark.filterwarnings("ignore:.*damaged and left out")
def test_a_flipped_bit_in_the_log_changes_no_weights(whole: RunFolder, copy: RunFolder, mutations: int) -> None:
    path, chance = copy.folder / "log.jsonl", random.Random(0)
    content, last = path.read_bytes(), copy.list_checkpoints()[-1]
    for _ in range(max(mutations // 1000, 2)):
        path.write_bytes(flipped(content, chance))
        last.unlink()
        trained(SAVING, copy)
        assert same(
            replace(read_training_state(last), metadata={}),
            replace(read_training_state(whole.list_checkpoints()[-1]), metadata={}),
        )


# special files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def full_folder(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


KINDS = (fifo, device, loop, dangling, listening, full_folder)
PLACES = (
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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_a_file_is_one_line_and_never_waited_for(
    copy: RunFolder, place: str, kind: Callable[[Path], None]
) -> None:
    path = copy.folder / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind(path)

    def resume() -> None:
        with copy.hold_lock():
            copy.load_plan()
            load_newest_checkpoint_on_ranks(copy)
            truncate_log(copy, 15)

    for ask in (read_run_summary, read_run_summaries, find_finished_run, RunFolder.check_folder_is_free):
        assert "\n" not in refusal(lambda ask=ask: ask(copy.folder))
    message = refusal(resume)
    assert "\n" not in message
    assert message or "step-" in place or kind is full_folder


# what is deleted


def test_only_what_a_run_wrote_is_deleted(copy: RunFolder) -> None:
    folder = copy.folder / "checkpoints"
    theirs = [".keep", ".tmpfoo", ".tmpabcdef.txt", "step-1.safetensors", ".step-00000003.safetensors.abc", "x.damaged"]
    for name in theirs:
        (folder / name).write_text("mine")
    (folder / ".tmpAAAAAA").mkdir()
    (folder / "step-00000001.safetensors").symlink_to(folder / ".keep")
    state = read_training_state(copy.list_checkpoints()[-1])
    copy.save_checkpoint(TrainingState(state.tensors, {**state.metadata, "step": 16}), 16)
    assert all((folder / name).read_text() == "mine" for name in theirs)
    assert (folder / ".tmpAAAAAA").is_dir()
    assert (folder / "step-00000001.safetensors").is_symlink()
    assert not (folder / "step-00000014.safetensors").exists()


def test_nothing_is_deleted_through_a_link(copy: RunFolder, tmp_path: Path) -> None:
    state = read_training_state(copy.list_checkpoints()[-1])
    (copy.folder / "checkpoints").rename(tmp_path / "theirs")
    (copy.folder / "checkpoints").symlink_to(tmp_path / "theirs")
    before = contents(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        copy.save_checkpoint(state, 16)
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        trained(SAVING, copy)
    assert contents(tmp_path / "theirs") == before


def test_nothing_is_written_through_a_linked_log(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    (tmp_path / "theirs").write_text("mine\n")
    (run.folder / "log.jsonl").symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="cannot write"):
        run.append_to_log({"step": 1})
    assert (tmp_path / "theirs").read_text() == "mine\n"


# requests of others


def trust_nothing(given: Any) -> Request:
    return Request.from_json(given, "run").with_trusted_code((), "run")


def test_a_request_of_other_kinds_is_one_line() -> None:
    good = Request(data="photos", recipe=Recipe(name="r")).to_json()
    for name in (*good, "unknown"):
        for value in (5, [], {}, float("nan"), "", "\0", {"name": 3}, [[]], None):
            given: Any = {**good, name: value}
            assert "\n" not in refusal(partial(trust_nothing, given))


# signals and workers


def hang_up(folder: Path, ignored: bool) -> None:
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def send(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGHUP)

    recipe = replace(SAVING, loop=replace(SAVING.loop, save_every=100))
    try:
        fit(model(), data(), recipe, run=RunFolder(folder), callback=Watching(send), device="cpu")
    except StoppedError as error:
        os._exit(error.exit_code if "stopped by SIGHUP after step 7" in str(error) else 1)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_saves_unless_it_is_ignored(ignored: bool, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    process = FORK.Process(target=hang_up, args=(run.folder, ignored))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if ignored else 129)
    assert [path.stem for path in run.list_checkpoints()] == [f"step-{15 if ignored else 7:08}"]


def test_a_terminal_that_is_gone_does_not_keep_a_run_from_being_saved(tmp_path: Path) -> None:
    def gone(step: int) -> None:
        raise OSError(5, "Input/output error")

    run = RunFolder.create(tmp_path / "run", {})
    fit(model(), data(), SAVING, run=run, callback=Watching(gone), device="cpu")
    assert run.list_checkpoints()


def test_a_killed_data_worker_is_one_line_and_the_run_resumes(whole: RunFolder, tmp_path: Path) -> None:
    def kill(step: int) -> None:
        if step == 6:
            worker = multiprocessing.active_children()[0]
            os.kill(worker.pid or 0, signal.SIGKILL)
            time.sleep(5)  # until torch says so, which it does at any point

    recipe = replace(SAVING, loop=replace(SAVING.loop, save_every=5))
    run = RunFolder.create(tmp_path / "run", {})
    message = (
        r"^one of 2 data workers was killed, .* fewer `workers`.* after step 6, the last good checkpoint is "
        r".*step-00000005\.safetensors: continue with `resume` .*run$"
    )
    with pytest.raises(DataError, match=message):
        fit(model(**NOISY), data(), recipe, run=run, workers=2, callback=Watching(kill), device="cpu")
    trained(SAVING, run)
    assert_same(whole, run)


def test_a_dead_worker_is_known_below_other_errors() -> None:
    dead = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    above = CheckpointError("cannot write")
    above.__cause__ = dead
    assert is_worker_death(above)
    assert not is_worker_death(RuntimeError("another"))
