"""The study of cost: exponents that are known come out, and memory that is known is found. No time is asserted."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_processes import PROCESSES
from support.figure_checks import check_figure
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.study import sequence_cost as costs
from vitrail.study.sequence_cost import (
    CLEAR_REFS_FILE,
    DEFAULT_TOKENS,
    MIN_ROUNDS,
    PROGRESS_PARTS,
    CostRequest,
    find_valid_lengths,
    is_valid_length,
    measure_call,
    measure_sequence_cost,
)
from vitrail.study.sequence_cost_results import (
    FIT_FROM_TOKENS,
    CostCell,
    CostResults,
    fit_exponent,
    format_three_digits,
)
from vitrail.study.token_mixers import TOKEN_MIXERS, MixerStep, TokenMixer

FAR = (1024, 2304, 4096)
on_linux = pytest.mark.skipif(not CLEAR_REFS_FILE.exists(), reason="only Linux tells the peak of a part of a program")


class Work:
    """Time that passes only when somebody works, n^power at a time; all of it slower in some rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slow, self.log = 0.0, 1.0, list[str]()
        monkeypatch.setattr(costs, "perf_counter", lambda: self.now)
        monkeypatch.setattr(costs, "thread_time", lambda: self.now)
        monkeypatch.setattr(costs, "CLEAR_REFS_FILE", Path("nowhere") / "at all")

    def mixer(self, name: str, power: float, seconds: float = 1e-6, scores: int = 0) -> TokenMixer:
        def run(tokens: int) -> Tensor:
            self.now += self.slow * seconds * tokens**power
            self.log.append(f"{name} {tokens}")
            return torch.zeros(())

        def build(q: Tensor, _: Tensor, __: Tensor) -> MixerStep:
            return MixerStep(partial(run, q.shape[2]), ())

        return TokenMixer(
            name=name, build=build, operations="n", steps="1", path="1", time=power, memory=1, scores=scores
        )


def test_exponents_are_of_long_sequences_alone() -> None:
    assert fit_exponent({n: 3e-9 * n**1.5 for n in FAR}) == pytest.approx(1.5)
    assert fit_exponent({64: 1.0, 576: 1.0, **{n: 3e-9 * n**2 for n in FAR}}) == pytest.approx(2)
    assert fit_exponent({64: 1.0, FIT_FROM_TOKENS: 2.0}) is None
    assert fit_exponent({}) is None


def test_known_exponents_come_out_whatever_else_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    powers = {"a": 2.0, "b": 1.0, "c": 1.5}
    mixers = [work.mixer(name, power, 1e-4 / 1024**power) for name, power in powers.items()]

    class Busier:
        """The second round takes ten times as long."""

        def shuffle(self, order: list[Any]) -> None:
            self.rounds = getattr(self, "rounds", 0) + 1
            work.slow = 10.0 if self.rounds == 2 else 1.0
            order.reverse()

    monkeypatch.setattr(random, "Random", lambda _: Busier())  # pyright: ignore[reportUnknownLambdaType]
    found = measure_sequence_cost(CostRequest(tokens=(64, *FAR), budget=12), mixers=mixers)
    assert found.rounds > MIN_ROUNDS
    for name, power in powers.items():
        spread = found.fit_time_exponent(name)
        assert spread is not None
        assert (spread.low, spread.median, spread.high) == pytest.approx((power, power, power))
        assert found.fit_memory_exponent(name) is None
    last = next(cell for cell in found.cells if (cell.mixer, cell.tokens) == ("a", 4096))
    assert last.seconds.median == pytest.approx(16e-4)
    assert max(last.rounds) == pytest.approx(16e-3)


def test_all_take_turns_for_as_long_as_the_budget_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    told = list[int]()
    mixers = [work.mixer("a", 1, 1 / 1024), work.mixer("b", 1, 1 / 1024)]
    found = measure_sequence_cost(CostRequest(tokens=(1024, 2304), budget=100), mixers=mixers, progress=told.append)
    once = 2 * (1 + 2.25)  # seconds of a round
    assert found.rounds == (100 - 2 * once) // once  # called twice before
    assert work.now <= 100
    assert sum(told) == PROGRESS_PARTS
    assert all(each > 0 for each in told)
    each_round = [set(work.log[8 + 4 * n : 12 + 4 * n]) for n in range(found.rounds)]
    assert all(len(each) == 4 for each in each_round)
    orders = {tuple(work.log[8 + 4 * n : 12 + 4 * n]) for n in range(found.rounds)}
    assert len(orders) > 1, "the order is shuffled"
    assert {len(cell.rounds) for cell in found.cells} == {found.rounds}


def test_three_rounds_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    found = measure_sequence_cost(CostRequest(tokens=(1024,), budget=0.5), mixers=[work.mixer("a", 1, 1 / 1024)])
    assert found.rounds == MIN_ROUNDS


def test_what_would_take_too_long_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    mixers = [work.mixer("slow", 2, 0.01 / 1024**2), work.mixer("fast", 1, 0.01 / 1024)]
    found = measure_sequence_cost(
        CostRequest(tokens=(1024, 4096, 9216), budget=2), mixers=mixers
    )  # a call may take 0.1 s
    assert [(cell.mixer, cell.tokens) for cell in found.cells] == [
        ("slow", 1024),
        ("fast", 1024),
        ("fast", 4096),
        ("fast", 9216),
    ]
    assert found.notes[0] == (
        "slow is left out at 4,096, 9,216 tokens: a call would take more than 0.1 s: give more --budget"
    )
    assert found.fit_time_exponent("slow") is None
    assert "–" in str(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_what_would_fill_the_memory_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    monkeypatch.setattr(costs, "read_available_bytes", lambda: 200e6)
    found = measure_sequence_cost(
        CostRequest(tokens=FAR, budget=9), mixers=[work.mixer("a", 1, scores=2), work.mixer("b", 1)]
    )
    assert [cell.tokens for cell in found.cells if cell.mixer == "a"] == [1024, 2304]
    assert found.notes[0] == "a is left out at 4,096 tokens: 0.2 GB is more than half of the memory that is free"


def test_where_nobody_tells_the_peak_there_is_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    work = Work(monkeypatch)
    found = measure_sequence_cost(CostRequest(tokens=FAR, budget=1), mixers=[work.mixer("a", 1)])
    assert all(cell.memory is None for cell in found.cells)
    assert found.notes == ("memory is not measured: only Linux tells the peak of a part of a program",)
    assert "MB" not in str(found)
    (axes,) = found.figure().draw().axes
    assert axes.get_ylabel() == "ms"


@on_linux
@pytest.mark.parametrize("megabytes", [1, 8, 64])
def test_memory_is_what_is_read_and_the_most_that_is_allocated(megabytes: int) -> None:
    with PROCESSES.Pool(1) as fresh:  # ours has freed memory at hand, for which it would not grow
        memory = fresh.apply(memory_of_an_addition, (megabytes,))
    assert memory / 1e6 == pytest.approx(1 + megabytes, abs=0.4)


def memory_of_an_addition(megabytes: int) -> float:
    read = torch.zeros(250_000)

    def run() -> Tensor:
        once = torch.ones(megabytes * 125_000)  # half of it, twice at the same time, and again
        twice = once + 1
        del once
        return twice.add_(1)

    MixerStep(run, (read,)).run()
    seconds, memory = measure_call(MixerStep(run, (read,)))
    assert seconds > 0
    return memory or 0


@on_linux
def test_fused_attention_keeps_memory_linear_and_explicit_attention_does_not() -> None:
    with PROCESSES.Pool(1) as fresh:
        found = fresh.apply(memory_of_attention)
    fused, explicit = (fit_exponent(each) for each in found.values())
    assert fused is not None
    assert explicit is not None
    assert fused < 1.1
    assert explicit == pytest.approx(2, abs=0.15)
    inputs, scores = 3 * 4096 * 64 * 4, 4096**2 * 4
    assert found["full, explicit"][4096] == pytest.approx(inputs + 2 * scores, rel=0.05), "scores, and their softmax"


def memory_of_attention() -> dict[str, dict[int, float]]:
    found = {each.name: dict[int, float]() for each in TOKEN_MIXERS[:2]}
    for tokens in FAR:
        q, k, v = torch.randn(3, 1, 1, tokens, 64).unbind()
        for each in TOKEN_MIXERS[:2]:
            step = each.build(q, k, v)
            step.run()
            found[each.name][tokens] = measure_call(step)[1] or 0
    return found


def test_threads_and_numbers_of_others_are_as_before() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    measure_sequence_cost(CostRequest(tokens=(64,), width=4, budget=0.1))
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_the_exponents_are_those_of_the_theory() -> None:
    """Processor time of one thread, so a busy machine may measure it."""
    found = measure_sequence_cost(CostRequest(tokens=[n for n in DEFAULT_TOKENS if n >= FIT_FROM_TOKENS], budget=60))
    theory = {"full, fused": 2, "Linformer": 1, "axial": 1.5, "windowed": 1, "LSTM": 1, "convolution": 1}
    for name, power in theory.items():
        spread = found.fit_time_exponent(name)
        assert spread is not None, found.notes
        assert spread.median == pytest.approx(power, abs=0.25), name


def a_study(**changes: Any) -> CostResults:
    memory: Callable[[TokenMixer, int], int] = lambda mixer, n: int(1000 * n**mixer.memory)  # noqa: E731
    cells = [
        CostCell.from_seconds(
            [1e-6 * n**mixer.time, 2e-6 * n**mixer.time], mixer=mixer.name, tokens=n, memory=memory(mixer, n)
        )
        for mixer in TOKEN_MIXERS
        for n in (64, *FAR)
    ]
    about: dict[str, Any] = {"mixers": TOKEN_MIXERS, "width": 64, "rounds": 2, "notes": (), "seed": 0}
    return CostResults.from_cells(cells, **{**about, **changes})


def test_the_table_stands_beside_that_of_the_paper() -> None:
    heading, rows, sides = a_study().exponent_table()
    assert all(len(row) == len(heading) == len(sides) for row in rows)
    found = {row[0]: row[1:] for row in rows}
    assert found["full, fused"] == ("O(n²·d)", "O(1)", "O(1)", "n^2", "n^2.00", "2.00–2.00", "n^1", "n^1.00")
    assert found["axial *"][3:5] == ("n^1.5", "n^1.50")
    assert found["LSTM"][:3] == ("O(n·d²)", "O(n)", "O(n)")
    assert found["convolution"][:3] == ("O(k·n·d²)", "O(1)", "O(log_k n)")
    assert found["windowed"][:3] == ("O(r·n·d)", "O(1)", "O(n/r)")
    assert a_study().time_table()[1][5] == ("LSTM", "0.0960", "1.54", "3.46", "6.14")
    assert a_study().memory_table()[1][1][-1] == "16,777"
    assert [format_three_digits(number) for number in (0.01234, 1.234, 12.34, 123.4, 1234.5, 0)] == [
        *("0.0123", "1.23", "12.3", "123", "1,234", "0"),
    ]


def test_json_has_every_number() -> None:
    told = json.loads(json.dumps(a_study().to_json(), allow_nan=False))
    axial = next(layer for layer in told["layers"] if layer["name"] == "axial")
    assert axial["operations"] == "O(n·√n·d)"
    assert axial["time"]["theory"] == 1.5
    assert axial["time"]["here"]["median"] == pytest.approx(1.5)
    assert axial["memory"]["here"] == pytest.approx(1, abs=1e-3)
    assert len(told["cells"]) == len(TOKEN_MIXERS) * 4
    assert told["cells"][0]["rounds"] == pytest.approx([64**2 * 1e-6, 64**2 * 2e-6])


def test_the_picture_has_both_and_the_lines_of_the_theory() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    plate = a_study().figure()
    check_figure(plate, "ms", "MB", "tokens; dashed and in brackets: theory")
    assert "axial 1.50 (1.5)" in plate.caption
    time, memory = plate.draw().axes
    for axes in (time, memory):
        assert len(axes.lines) == 2 * len(TOKEN_MIXERS)
        solid, dashed = (np.asarray(each.get_xydata()) for each in axes.lines[:2])
        assert solid[:, 0].tolist() == [64, *FAR]
        assert dashed[:, 0].tolist() == list(FAR)
        assert dashed[:, 1] == pytest.approx(solid[1:, 1])
    assert plate.arrays["seconds of axial"] == pytest.approx([1.5e-6 * n**1.5 for n in (64, *FAR)])


def test_a_study_of_short_sequences_has_a_picture_too() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    cells = [CostCell.from_seconds([1e-3], mixer=mixer.name, tokens=64, memory=10) for mixer in TOKEN_MIXERS[1:]]
    plate = CostResults.from_cells(cells, mixers=TOKEN_MIXERS, width=8, rounds=1, notes=(), seed=0).figure()
    check_figure(plate, "ms", "MB")
    assert plate.caption.endswith("Exponents of time need two lengths of 1,024 tokens or more.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": (64, 100)}, "--tokens 100; expected squares of multiples of 8, .* nearest: 64 or 256"),
        ({"tokens": (2048,)}, "nearest: 1600 or 2304"),
        ({"tokens": (0,)}, "nearest: 64"),
        ({"tokens": (10**6,)}, "nearest: 65536"),
        ({"tokens": ()}, "no tokens; expected one length at least"),
        ({"width": 0}, "--width 0; expected 1 to 1024"),
        ({"budget": 0.0}, "--budget 0; expected more than 0 seconds"),
        ({"budget": float("nan")}, "--budget nan; expected more than 0 seconds"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CostRequest(**changes)


def test_the_nearest_lengths_fit() -> None:
    assert all(map(is_valid_length, DEFAULT_TOKENS))
    for given in (-5, 1, 63, 65, 5000, 65536, 65537, 10**9):
        assert find_valid_lengths(given)
        assert all(map(is_valid_length, find_valid_lengths(given)))
