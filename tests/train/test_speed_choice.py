"""The number of threads and the precision of a run: how they are chosen, recorded and restored."""

import json
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from test_train_fit import PLAIN, StopAt, data, model

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.machine import count_cores
from vitrail.cli import build_app
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.recipes.recipe import LoopSettings, Recipe
from vitrail.tasks.classification import Classification, classification_loss
from vitrail.tasks.image_task import open_image_source
from vitrail.train import speed_choice
from vitrail.train.fit import fit
from vitrail.train.plan import Plan
from vitrail.train.run_folder import RunFolder
from vitrail.train.speed_choice import (
    PrecisionChoice,
    ThreadChoice,
    choose_asked_or_recorded_threads,
    choose_fewest_fast_threads,
    choose_precision,
    choose_recorded_precision,
    choose_threads,
    has_clear_fastest_way,
    list_candidate_thread_counts,
    measure_step_seconds_by_precision,
    measure_step_seconds_by_threads,
    time_interleaved_steps,
)

LONG = replace(PLAIN, loop=LoopSettings(batch=8, epochs=100))
TINY = "--set image_size=28 --set patch_size=14 --set width=12 --set depth=1 --set heads=1 --set mlp_width=12"


class TrainingStartedError(Exception):
    """Raised instead of training."""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """As on a machine with two cores and no environment variables set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Seconds per step by number of threads, as if measured, whatever the length of the run."""
    monkeypatch.setattr(speed_choice, "is_short_run", lambda _: False)  # pyright: ignore[reportUnknownLambdaType]
    found = {2: [0.4, 0.4, 0.4], 1: [0.2, 0.2, 0.2]}
    monkeypatch.setattr(speed_choice, "measure_step_seconds_by_threads", lambda *_: found)  # pyright: ignore[reportUnknownLambdaType]
    return found


def make_plan(**changes: Any) -> Plan:
    given, recipe = changes.pop("given", None) or model(dropout=0.1), changes.pop("recipe", LONG)
    source = open_image_source(Classification(given), data(), recipe, Preprocessing(image_size=16, crop=1.0))
    return Plan(task=Classification(given), source=source, recipe=recipe, **changes)


def train(words: str) -> None:
    build_app()(["train", *words.split()], exit_on_error=False, print_error=False, result_action="return_value")


def test_faster_thread_count_is_chosen_and_reported(measured: dict[int, list[float]]) -> None:
    assert choose_threads(make_plan()) == ThreadChoice(1, "40 images/s, 2 threads 20")
    measured[2] = [0.1, 0.1, 0.3]
    assert str(choose_threads(make_plan())) == "threads 2: 80 images/s, 1 thread 40"


def test_more_threads_must_be_clearly_faster() -> None:
    assert choose_fewest_fast_threads({2: 101.0, 1: 100.0}) == 1
    assert choose_fewest_fast_threads({2: 103.0, 1: 100.0}) == 2
    assert choose_fewest_fast_threads({8: 100.0, 7: 130.0, 4: 128.0, 2: 90.0}) == 4


def test_candidates_are_all_cores_all_but_one_and_halves() -> None:
    assert list_candidate_thread_counts(2) == [2, 1]
    assert list_candidate_thread_counts(8) == [8, 7, 4, 2, 1]
    assert list_candidate_thread_counts(6) == [6, 5, 3, 1]


def test_measuring_stops_early_if_one_count_is_clearly_fastest() -> None:
    assert has_clear_fastest_way({2: [0.1, 0.1], 1: [0.2, 0.2]})
    assert not has_clear_fastest_way({2: [0.1, 0.18], 1: [0.2, 0.2]})
    assert not has_clear_fastest_way({2: [0.1], 1: [0.2]})


def test_slow_thread_counts_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 0.0, list[int]()

    def step(threads: int) -> None:
        nonlocal now
        steps.append(threads)
        now += {4: 0.05, 3: 0.04, 2: 1.0, 1: 9.0}[steps[-1]]

    monkeypatch.setattr(speed_choice, "perf_counter", lambda: now)
    blocks = time_interleaved_steps(step, [4, 3, 2, 1])
    assert steps.count(2) == 2
    assert 1 not in steps
    assert len(blocks[2]) == 1
    assert len(blocks[3]) == len(blocks[4]) > speed_choice.ROUNDS
    assert now < 2.5 + speed_choice.SECONDS


def test_nothing_is_measured_if_the_choice_is_given_or_the_run_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        pytest.fail("steps were taken")

    monkeypatch.setattr(speed_choice, "measure_step_seconds_by_threads", forbidden)
    assert choose_threads(make_plan(), 3) == ThreadChoice(3, "as given")
    monkeypatch.setattr(speed_choice, "measure_one_step", lambda _: 0.1)  # pyright: ignore[reportUnknownLambdaType]
    assert choose_threads(make_plan(fixed_steps=99)) == ThreadChoice(2, "not measured for 99 steps")
    monkeypatch.setattr(speed_choice, "measure_one_step", forbidden)
    assert choose_threads(make_plan(fixed_steps=1)) == ThreadChoice(2, "not measured for 1 step")
    compiled = replace(LONG, loop=replace(LONG.loop, compile=True))
    assert choose_threads(make_plan(recipe=compiled)).threads == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_threads(make_plan(ranks=Ranks(world_size=2))).threads == max(1, count_cores() // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(make_plan()) == ThreadChoice(2, "OMP_NUM_THREADS is 2")
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    assert choose_threads(make_plan()).threads == 1


def test_measuring_changes_neither_model_nor_rng() -> None:
    plan = make_plan()
    before, chance = {name: each.clone() for name, each in plan.model.state_dict().items()}, torch.get_rng_state()
    first = next(plan.load_batches(range(1)))
    blocks = measure_step_seconds_by_threads(plan, [1])  # two would wait for each other next to other tests
    assert len(blocks[1]) == 1
    assert blocks[1][0] > 0
    assert all(torch.equal(each, before[name]) for name, each in plan.model.state_dict().items())
    assert all(weight.grad is None for weight in plan.model.parameters())
    assert torch.equal(torch.get_rng_state(), chance)
    assert torch.get_num_threads() == 2
    assert torch.equal(next(plan.load_batches(range(1)))["images"], first["images"])


def test_run_records_its_threads_and_resume_uses_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: dict[int, list[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = list[int]()

    def stop(*_: object, **__: object) -> None:
        seen.append(torch.get_num_threads())
        raise TrainingStartedError

    monkeypatch.setattr("vitrail.train.run.run_training", stop)
    with pytest.raises(TrainingStartedError):
        train(f"{TINY} --epochs 2 --out run")
    assert "threads 1: 500 images/s, 2 threads 250" in capsys.readouterr().out
    assert json.loads(Path("run/run.json").read_text())["threads"] == 1
    measured[2] = [0.01]
    with pytest.raises(TrainingStartedError):
        train("--resume run")
    assert "not bit-identical" not in capsys.readouterr().out
    with pytest.raises(TrainingStartedError):
        train("--resume run --threads 2")
    assert "threads was 1 and is 2: resuming, but not bit-identical" in capsys.readouterr().out
    assert seen == [1, 1, 2]
    assert torch.get_num_threads() == 2
    assert RunFolder(Path("run")).load_plan()["threads"] == 1


class RecordThreads(StopAt):
    """Records torch's number of threads at each step, and never stops."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seen = set[int]()

    def on_step(self, step: int) -> None:
        super().on_step(step)
        self.seen.add(torch.get_num_threads())


def test_fit_measures_threads_and_restores_those_of_the_caller(measured: dict[int, list[float]]) -> None:
    for given, used in ((None, 1), (2, 2)):
        callback = RecordThreads()
        result = fit(model(), data(), LONG, steps=10, callbacks=callback, device="cpu", threads=given)
        assert (callback.seen, result.threads) == ({used}, used)
        assert torch.get_num_threads() == 2
    with pytest.raises(KeyboardInterrupt):
        fit(model(), data(), LONG, steps=10, callbacks=StopAt(1), device="cpu")
    assert torch.get_num_threads() == 2
    for wrong in (0, True, "2", 10**6):
        with pytest.raises(ConfigError, match="threads"):
            fit(model(), data(), LONG, threads=cast(Any, wrong))


def test_fit_records_the_threads_of_a_run_and_resumes_with_them(
    tmp_path: Path, measured: dict[int, list[float]]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(model(), data(), LONG, steps=10, callbacks=StopAt(4), run=tmp_path / "run", device="cpu")
    assert RunFolder(tmp_path / "run").load_plan()["threads"] == 1
    measured[2] = [0.01]
    for given, used in ((None, 1), (2, 2)):
        assert fit(model(), data(), LONG, steps=10, run=tmp_path / "run", device="cpu", threads=given).threads == used
    own = RunFolder(tmp_path / "own")  # it has no run.json to record a number in
    assert fit(model(), data(), LONG, steps=10, run=own, device="cpu").threads == 2


def test_fit_takes_a_model_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = model()
    given.cached = given.head.weight * 2  # a tensor with a history
    assert choose_threads(make_plan(given=given)).reason.startswith("not measured: Classification cannot be copied")
    given.cached = (number for number in range(3))
    assert fit(given, data(), LONG, steps=10, device="cpu", progress=False).threads == 2


def test_measuring_threads_keeps_the_run_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed_choice, "list_candidate_thread_counts", lambda _: [1])  # pyright: ignore[reportUnknownLambdaType]
    words = f"{TINY} --set dropout=0.1 --epochs 1.7 --batch 100"
    train(f"{words} --out measured")
    train(f"{words} --threads 1 --out given")
    measured, given = (load_file(f"{name}/model/model.safetensors") for name in ("measured", "given"))
    assert all(torch.equal(weight, given[name]) for name, weight in measured.items())


def test_invalid_thread_counts_are_refused() -> None:
    for threads in (0, -1, 10**6):
        with pytest.raises(ConfigError, match=f"`threads` is {threads}; expected a number from 1"):
            choose_threads(make_plan(), threads)
    for recorded in (0, "2", True, 1e9, None):
        with pytest.raises(CheckpointError, match=r"run was trained on .* threads; expected a number from 1"):
            choose_asked_or_recorded_threads({"threads": recorded}, "auto", "run")
    assert choose_asked_or_recorded_threads({}, "auto", "run") == 2  # a run from before threads were recorded
    assert choose_asked_or_recorded_threads({"threads": 5}, "auto", "run") == 5
    assert choose_asked_or_recorded_threads({"threads": 5}, 3, "run") == 3
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Seconds per step by precision, as if measured on a CPU with instructions for bfloat16."""
    found = {"float32": [0.9, 0.9], "bfloat16": [0.5, 0.5]}
    monkeypatch.setattr(speed_choice, "find_bfloat16_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(speed_choice, "is_short_run", lambda _: False)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(speed_choice, "measure_step_seconds_by_precision", lambda _: found)  # pyright: ignore[reportUnknownLambdaType]
    return found


def in_precision(precision: str) -> Recipe:
    return LONG.with_settings({"precision": precision})


def test_the_faster_precision_is_chosen(fast_bfloat16: dict[str, list[float]]) -> None:
    assert str(choose_precision(make_plan())) == "precision bfloat16: 1.8 × float32 here"
    fast_bfloat16["bfloat16"] = [0.87, 0.87]
    assert str(choose_precision(make_plan())) == "precision float32: bfloat16 is 1 × as fast here"
    assert choose_precision(make_plan(recipe=in_precision("float32"))) == PrecisionChoice("float32")
    assert choose_precision(make_plan(recipe=in_precision("bfloat16"))) == PrecisionChoice("bfloat16")


@pytest.mark.usefixtures("fast_bfloat16")
def test_a_short_or_compiled_run_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = LONG.with_settings({"compile": True})
    assert str(choose_precision(make_plan(recipe=compiled))).startswith("precision float32: not measured, since")
    monkeypatch.setattr(speed_choice, "is_short_run", lambda _: True)  # pyright: ignore[reportUnknownLambdaType]
    choice = choose_precision(make_plan(fixed_steps=9))
    assert choice == PrecisionChoice("float32", "not measured for 9 steps")


def test_nothing_is_measured_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_choice, "start_trial", lambda _: pytest.fail("steps were taken"))  # pyright: ignore[reportUnknownLambdaType]
    assert choose_precision(make_plan()) == PrecisionChoice("float32")


def test_bfloat16_as_given_without_instructions_is_a_warning_with_its_speed(
    fast_bfloat16: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_choice, "find_bfloat16_instructions", str)
    fast_bfloat16["bfloat16"] = [7.2, 7.2]
    choice, about = choose_precision(make_plan(recipe=in_precision("bfloat16"))), "this CPU has no instructions for it"
    assert str(choice) == f"precision bfloat16: as given, but {about}: 0.12 × float32 here"
    monkeypatch.setattr(speed_choice, "is_short_run", lambda _: True)  # pyright: ignore[reportUnknownLambdaType]
    choice = choose_precision(make_plan(recipe=in_precision("bfloat16"), fixed_steps=9))
    assert str(choice) == f"precision bfloat16: as given, but {about}: expect it to be slow"


def test_float16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"`precision` is float16 on a CPU, .*; expected auto, bfloat16 or float32"):
        choose_precision(make_plan(recipe=in_precision("float16")))


class OnlyFloat32(torch.nn.Linear):
    """As a module from outside that does not support bfloat16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("not for BFloat16")
        return super().forward(input)


def test_a_model_that_fails_in_bfloat16_is_trained_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_choice, "find_bfloat16_instructions", lambda: "avx512_bf16")
    monkeypatch.setattr(speed_choice, "is_short_run", lambda _: False)  # pyright: ignore[reportUnknownLambdaType]
    given: Any = model()
    given.head = OnlyFloat32(given.head.in_features, given.head.out_features)
    choice = choose_precision(make_plan(given=given))
    assert choice.precision == "float32"
    assert choice.reason.startswith("bfloat16 failed: ")


def test_measuring_precision_takes_steps_in_both_and_changes_nothing() -> None:
    plan = make_plan()
    chance, before = torch.get_rng_state(), {name: each.clone() for name, each in plan.model.state_dict().items()}
    blocks = measure_step_seconds_by_precision(plan)
    assert list(blocks) == ["float32", "bfloat16"]
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(each, before[name]) for name, each in plan.model.state_dict().items())


@pytest.mark.usefixtures("fast_bfloat16")
def test_the_first_process_decides() -> None:
    class TwoRanks(Ranks):
        def broadcast_object(self, value: Any) -> Any:
            assert value is None, "only the first process measures"
            return PrecisionChoice("bfloat16", "as decided")

    plan = make_plan(ranks=TwoRanks(rank=1, world_size=2))
    assert choose_precision(plan).reason == "as decided"


@pytest.mark.usefixtures("measured", "fast_bfloat16")
def test_run_records_its_precision_and_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = list[str]()

    def stop(plan: Plan, *_: object, **__: object) -> None:
        seen.append(plan.chosen_precision)
        raise TrainingStartedError

    monkeypatch.setattr("vitrail.train.run.run_training", stop)
    with pytest.raises(TrainingStartedError):
        train(f"{TINY} --epochs 2 --out run")
    assert "precision bfloat16: 1.8 × float32 here" in capsys.readouterr().out
    recorded = json.loads(Path("run/run.json").read_text())
    assert (recorded["precision"], recorded["request"]["recipe"]["precision"]) == ("bfloat16", "auto")
    with pytest.raises(TrainingStartedError):
        train("--resume run")
    assert "not bit-identical" not in capsys.readouterr().out
    monkeypatch.setattr(speed_choice, "find_bfloat16_instructions", str)
    with pytest.raises(TrainingStartedError):
        train("--resume run")
    expected = "precision was bfloat16 and is float32, since this CPU has no instructions for it: resuming, but not"
    assert expected in capsys.readouterr().out
    assert seen == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.usefixtures("measured", "fast_bfloat16")
def test_a_run_that_was_given_bfloat16_stays_in_it_and_says_how_slow_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = list[str]()

    def stop(plan: Plan, *_: object, **__: object) -> None:
        seen.append(plan.chosen_precision)
        raise TrainingStartedError

    monkeypatch.setattr("vitrail.train.run.run_training", stop)
    with pytest.raises(TrainingStartedError):
        train(f"{TINY} --epochs 2 --precision bfloat16 --out run")
    assert "precision bfloat16: as given" not in capsys.readouterr().out
    monkeypatch.setattr(speed_choice, "find_bfloat16_instructions", str)
    with pytest.raises(TrainingStartedError):
        train("--resume run")
    assert "precision bfloat16: as given, but this CPU has no instructions for it" in capsys.readouterr().out
    assert seen == ["bfloat16", "bfloat16"]


@pytest.mark.usefixtures("measured", "fast_bfloat16")
def test_fit_records_its_precision(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(model(), data(), LONG, steps=10, callbacks=StopAt(4), run=tmp_path / "run", device="cpu")
    assert RunFolder(tmp_path / "run").load_plan()["precision"] == "bfloat16"
    own = tmp_path / "own"
    with pytest.raises(KeyboardInterrupt):  # a loss from outside may need float32
        fit(model(), data(), LONG, objective=classification_loss, callbacks=StopAt(4), run=own, device="cpu")
    assert RunFolder(own).load_plan()["precision"] == "float32"


@pytest.mark.parametrize("recorded", ["auto", 3, None])
def test_an_unknown_recorded_precision_is_refused(recorded: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"run was trained in the precision .*; expected one of float32, bfloat16"
    ):
        choose_recorded_precision(make_plan(), {"precision": recorded}, "run")
    assert choose_recorded_precision(make_plan(), {}, "run").chosen_precision == "float32"
