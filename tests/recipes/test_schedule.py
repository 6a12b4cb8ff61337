from dataclasses import replace
from itertools import pairwise
from math import cos, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.recipes.recipe import OptimizationSettings
from vitrail.recipes.schedule import Clock, Schedule, lr_factor, parse_schedule

COSINE = OptimizationSettings(final_lr=0.1)


@pytest.mark.parametrize(
    ("schedule", "closed_form"),
    [
        ("cosine", [0.1 + 0.45 * (1 + cos(pi * n / 80)) for n in range(80)]),
        ("linear", [1 - 0.9 * n / 80 for n in range(80)]),
        ("constant", [1.0] * 80),
    ],
)
def test_schedules_match_their_closed_forms_after_the_warm_up(schedule: str, closed_form: list[float]) -> None:
    settings = replace(COSINE, schedule=schedule)
    assert [lr_factor(step, 100, 20, settings) for step in range(20, 100)] == pytest.approx(closed_form)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [lr_factor(step, 100, 4, COSINE) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_inverse_square_root_matches_vaswani_2017() -> None:
    """Vaswani 2017, equation 3, for d_model 512 and 4000 steps of warm-up, as a share of its peak."""
    settings = OptimizationSettings(schedule="inverse_sqrt")

    def paper(t: int) -> float:
        return 512**-0.5 * min(t**-0.5, t * 4000**-1.5)

    for step in (0, 10, 3998, 3999, 4000, 5000, 99_999):
        assert lr_factor(step, 100_000, 4000, settings) == pytest.approx(paper(step + 1) / paper(4000))
    assert lr_factor(15, 100, 0, settings) == 1 / sqrt(16)


@given(
    st.integers(1, 500),
    st.integers(0, 600),
    st.sampled_from(["cosine", "linear", "constant", "inverse_sqrt"]),
    st.floats(0, 1),
)
def test_factors_are_between_zero_and_one_and_decrease_after_the_warm_up(
    steps: int, warmup: int, schedule: str, final: float
) -> None:
    settings = replace(COSINE, schedule=schedule, final_lr=final)
    shares = [lr_factor(step, steps, warmup, settings) for step in range(steps)]
    assert all(0 <= each <= 1 + 1e-12 for each in shares)
    after = shares[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


@pytest.mark.parametrize(
    ("schedule", "values"),  # at the first step, the end of the warm-up, the middle of the rest, and the last step
    [
        (Schedule(start=2.0), (2, 2, 2, 2)),
        (Schedule(start=2.0, end=1.0, shape="constant"), (2, 2, 2, 2)),
        (Schedule(start=2.0, end=1.0, shape="linear"), (2, 1.8, 1.4, 1.01)),
        (Schedule(start=0.0, end=1.0, shape="linear", warmup=2, warmup_start=5), (5, 0, 0.5, 0.9875)),
        (Schedule(start=0.0, end=1.0, warmup=2), (0, 0, 0.5, (1 - cos(pi * 79 / 80)) / 2)),
        (Schedule(start=0.0, end=1.0, shape="linear", by="epoch"), (0, 0.2, 0.6, 0.9)),
    ],
)
def test_schedule_at_first_warmed_up_middle_and_last_step(schedule: Schedule, values: tuple[float, ...]) -> None:
    clocks = [Clock(step=step, steps=100, steps_per_epoch=10) for step in (0, 20, 60, 99)]
    assert [schedule.at(clock) for clock in clocks] == pytest.approx(values)


def test_epoch_schedules_change_between_epochs_only() -> None:
    schedule = Schedule(start=1.0, end=0.0, by="epoch")
    values = [schedule.at(Clock(step=step, steps=50, steps_per_epoch=10)) for step in range(50)]
    assert [len(set(values[start : start + 10])) for start in range(0, 50, 10)] == [1] * 5
    assert len(set(values)) == 5


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    assert parse_schedule("1e-3", "weight_decay") == Schedule(start=0.001)
    assert parse_schedule({"start": 0.1, "end": "1e-3"}, "weight_decay") == Schedule(start=0.1, end=0.001)
