"""The cost study finds known exponents and known memory. No times are asserted."""

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

from vitrail.base.errors import ConfigError
from vitrail.study import sequence_cost as costs
from vitrail.study.sequence_cost import (
    CLEAR_REFS_FILE,
    DEFAULT_TOKENS,
    FIT_FROM_TOKENS,
    MIN_ROUNDS,
    TOKEN_MIXERS,
    CostCell,
    CostRequest,
    CostResults,
    MixerStep,
    TokenMixer,
    find_nearest_valid_lengths,
    fit_exponent,
    is_valid_length,
    measure_call_seconds_and_bytes,
    measure_sequence_cost,
)
from vitrail.study.timing import PROGRESS_PARTS

FAR = (1024, 2304, 4096)
on_linux = pytest.mark.skipif(not CLEAR_REFS_FILE.exists(), reason="only Linux can reset the peak of a process")


class Work:
    """A clock that advances by n^power per call, slower in some rounds."""

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


def test_exponents_ignore_short_sequences() -> None:
    assert fit_exponent({n: 3e-9 * n**1.5 for n in FAR}) == pytest.approx(1.5)
    assert fit_exponent({64: 1.0, 576: 1.0, **{n: 3e-9 * n**2 for n in FAR}}) == pytest.approx(2)
    assert fit_exponent({64: 1.0, FIT_FROM_TOKENS: 2.0}) is None
    assert fit_exponent({}) is None


def test_known_exponents_are_found_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rounds_fill_the_budget_in_shuffled_order(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    reported = list[int]()
    mixers = [work.mixer("a", 1, 1 / 1024), work.mixer("b", 1, 1 / 1024)]
    found = measure_sequence_cost(CostRequest(tokens=(1024, 2304), budget=100), mixers=mixers, progress=reported.append)
    once = 2 * (1 + 2.25)  # seconds per round
    assert found.rounds == (100 - 2 * once) // once  # two calls before the rounds
    assert work.now <= 100
    assert sum(reported) == PROGRESS_PARTS
    assert all(each > 0 for each in reported)
    each_round = [set(work.log[8 + 4 * n : 12 + 4 * n]) for n in range(found.rounds)]
    assert all(len(each) == 4 for each in each_round)
    orders = {tuple(work.log[8 + 4 * n : 12 + 4 * n]) for n in range(found.rounds)}
    assert len(orders) > 1, "the order is shuffled"
    assert {len(cell.rounds) for cell in found.cells} == {found.rounds}


def test_at_least_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    found = measure_sequence_cost(CostRequest(tokens=(1024,), budget=0.5), mixers=[work.mixer("a", 1, 1 / 1024)])
    assert found.rounds == MIN_ROUNDS


def test_slow_mixers_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
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
        "slow is left out at 4,096, 9,216 tokens: a call would take more than 0.1 s; increase the budget"
    )
    assert found.fit_time_exponent("slow") is None
    assert "–" in str(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_large_mixers_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    monkeypatch.setattr(costs, "read_available_bytes", lambda: 200e6)
    found = measure_sequence_cost(
        CostRequest(tokens=FAR, budget=9), mixers=[work.mixer("a", 1, scores=2), work.mixer("b", 1)]
    )
    assert [cell.tokens for cell in found.cells if cell.mixer == "a"] == [1024, 2304]
    assert found.notes[0] == "a is left out at 4,096 tokens: 0.2 GB is more than half of the available memory"


def test_without_proc_only_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    work = Work(monkeypatch)
    found = measure_sequence_cost(CostRequest(tokens=FAR, budget=1), mixers=[work.mixer("a", 1)])
    assert all(cell.memory is None for cell in found.cells)
    assert found.notes == ("memory is not measured: only Linux can reset the peak of a process",)
    assert "MB" not in str(found)
    (axes,) = found.figure().draw().axes
    assert axes.get_ylabel() == "time (ms)"


@on_linux
@pytest.mark.parametrize("megabytes", [1, 8, 64])
def test_memory_is_inputs_plus_peak_allocation(megabytes: int) -> None:
    with PROCESSES.Pool(1) as fresh:  # this process could reuse freed memory without growing
        memory = fresh.apply(memory_of_an_addition, (megabytes,))
    assert memory / 1e6 == pytest.approx(1 + megabytes, abs=0.4)


def memory_of_an_addition(megabytes: int) -> float:
    read = torch.zeros(250_000)

    def run() -> Tensor:
        once = torch.ones(megabytes * 125_000)  # half of it: two at the same time, twice
        twice = once + 1
        del once
        return twice.add_(1)

    MixerStep(run, (read,)).run()
    seconds, memory = measure_call_seconds_and_bytes(MixerStep(run, (read,)))
    assert seconds > 0
    return memory or 0


@on_linux
def test_memory_of_fused_attention_is_linear() -> None:
    with PROCESSES.Pool(1) as fresh:
        found = fresh.apply(memory_of_attention)
    fused, explicit = (fit_exponent(each) for each in found.values())
    assert fused is not None
    assert explicit is not None
    assert fused < 1.1
    assert explicit == pytest.approx(2, abs=0.15)
    inputs, scores = 3 * 4096 * 64 * 4, 4096**2 * 4
    assert found["full, explicit"][4096] == pytest.approx(inputs + 2 * scores, rel=0.05), "scores and their softmax"


def memory_of_attention() -> dict[str, dict[int, float]]:
    found = {each.name: dict[int, float]() for each in TOKEN_MIXERS[:2]}
    for tokens in FAR:
        q, k, v = torch.randn(3, 1, 1, tokens, 64).unbind()
        for each in TOKEN_MIXERS[:2]:
            step = each.build(q, k, v)
            step.run()
            found[each.name][tokens] = measure_call_seconds_and_bytes(step)[1] or 0
    return found


def test_threads_and_random_state_are_restored() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    measure_sequence_cost(CostRequest(tokens=(64,), width=4, budget=0.1))
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_exponents_match_theory() -> None:
    """CPU time of one thread, so it works on a busy machine."""
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
    return CostResults(cells=tuple(cells), **{**about, **changes})


def test_table_shows_theory_and_measurement() -> None:
    found = {name: tuple(cells) for name, *cells in a_study().table.format_cells()}
    assert found["full, fused"] == ("O(n²·d)", "O(1)", "O(1)", "n^2", "n^2.00", "2.00–2.00", "n^1", "n^1.00")
    assert found["axial *"][3:5] == ("n^1.5", "n^1.50")
    assert found["LSTM"][:3] == ("O(n·d²)", "O(n)", "O(n)")
    assert found["convolution"][:3] == ("O(k·n·d²)", "O(1)", "O(log_k n)")
    assert found["windowed"][:3] == ("O(r·n·d)", "O(1)", "O(n/r)")
    *_, time, memory = str(a_study()).split("\nlayer ")
    assert ["LSTM", "0.0960", "1.54", "3.46", "6.14"] in [line.split() for line in time.splitlines()]
    assert "16,777" in memory


def test_json_has_all_values() -> None:
    reported = json.loads(json.dumps(a_study().to_json(), allow_nan=False))
    axial = next(layer for layer in reported["layers"] if layer["name"] == "axial")
    assert axial["operations"] == "O(n·√n·d)"
    assert axial["time"]["theory"] == 1.5
    assert axial["time"]["here"]["median"] == pytest.approx(1.5)
    assert axial["memory"]["here"] == pytest.approx(1, abs=1e-3)
    assert len(reported["cells"]) == len(TOKEN_MIXERS) * 4
    assert reported["cells"][0]["rounds"] == pytest.approx([64**2 * 1e-6, 64**2 * 2e-6])


def test_figure_shows_time_memory_and_theory() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    figure = a_study().figure()
    check_figure(figure, "time (ms)", "memory (MB)", "tokens (dashed and in brackets: theory)")
    assert "axial 1.50 (1.5)" in figure.caption
    time, memory = figure.draw().axes
    for axes in (time, memory):
        assert len(axes.lines) == 2 * len(TOKEN_MIXERS)
        solid, dashed = (np.asarray(each.get_xydata()) for each in axes.lines[:2])
        assert solid[:, 0].tolist() == [64, *FAR]
        assert dashed[:, 0].tolist() == list(FAR)
        assert dashed[:, 1] == pytest.approx(solid[1:, 1])
    assert figure.arrays["seconds of axial"] == pytest.approx([1.5e-6 * n**1.5 for n in (64, *FAR)])


def test_figure_of_short_sequences() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    cells = [CostCell.from_seconds([1e-3], mixer=mixer.name, tokens=64, memory=10) for mixer in TOKEN_MIXERS[1:]]
    figure = CostResults(cells=tuple(cells), mixers=TOKEN_MIXERS, width=8, rounds=1).figure()
    check_figure(figure, "time (ms)", "memory (MB)")
    assert figure.caption.endswith("Exponents need two lengths of 1,024 tokens or more.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (64, 100)}, "`tokens` is 100; expected squares of multiples of 8 .* nearest: 64 or 256"),
        ({"tokens": (2048,)}, "nearest: 1600 or 2304"),
        ({"tokens": (0,)}, "nearest: 64"),
        ({"tokens": (10**6,)}, "nearest: 65536"),
        ({"tokens": ()}, "no sequence lengths were given"),
        ({"width": 0}, "`width` is 0; expected 1 to 1024"),
        ({"budget": 0.0}, "`budget` is 0 seconds; expected more than 0"),
        ({"budget": float("nan")}, "`budget` is nan seconds; expected more than 0"),
    ],
)
def test_invalid_requests(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostRequest(**changes)


def test_suggested_lengths_are_valid() -> None:
    assert all(map(is_valid_length, DEFAULT_TOKENS))
    for given in (-5, 1, 63, 65, 5000, 65536, 65537, 10**9):
        assert find_nearest_valid_lengths(given)
        assert all(map(is_valid_length, find_nearest_valid_lengths(given)))
