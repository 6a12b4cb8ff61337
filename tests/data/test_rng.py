"""Counter-based random numbers: independent of the batch, uniform and uncorrelated."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.rng import make_view_keys, uniform_randoms


def test_a_million_keys_are_distinct() -> None:
    epochs, indices, replicas = np.meshgrid(np.arange(10), np.arange(50_000), np.arange(2))
    assert len(np.unique(make_view_keys(0, epochs, indices, replicas))) == 1_000_000


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**20))
def test_key_does_not_depend_on_the_batch(seed: int, epoch: int, index: int, replica: int) -> None:
    alone = make_view_keys(seed, epoch, index, replica)
    assert alone.shape == (1,)
    assert alone.dtype == np.uint64
    batch = make_view_keys(seed, epoch, [index + 1, index, 7], np.array([replica] * 3))
    assert batch[1] == alone[0]
    others = (make_view_keys(seed + 1, epoch, index, replica), make_view_keys(seed, epoch + 1, index, replica))
    others += (
        make_view_keys(seed, index + 1, epoch, replica),
        make_view_keys(seed, epoch, index, replica + 1),
        batch[:1],
    )
    assert all(other[0] != alone[0] for other in others)
    assert np.array_equal(uniform_randoms(batch, 5)[1, :3], uniform_randoms(alone, 3)[0])


def test_the_numbers_never_change() -> None:
    """A run can be resumed with a later version."""
    assert make_view_keys(1, 2, [3, 4], 5).tolist() == [3655974310320967256, 8968606003003012782]
    assert uniform_randoms(make_view_keys(1, 2, 3, 4), 2, 1).tolist() == [[0.05737001781575457, 0.9943141492982713]]


def test_numbers_are_uniform_and_uncorrelated() -> None:
    """Bounds are five standard errors of 200,000 draws."""
    n = 200_000
    here = uniform_randoms(make_view_keys(3, 0, np.arange(n), 0), 4)
    assert here.min() >= 0
    assert here.max() < 1
    assert np.abs(here.mean(0) - 0.5).max() < 5 * (1 / 12 / n) ** 0.5
    assert np.abs(here.var(0) - 1 / 12).max() < 5 * (1 / 180 / n) ** 0.5
    counts = np.histogram(here[:, 0], 100, (0, 1))[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 5 * 198**0.5  # chi squared
    first = here[:, 0]
    others = (
        here[:, 1],
        np.roll(first, 1),
        uniform_randoms(make_view_keys(3, 1, np.arange(n), 0), 1)[:, 0],
        uniform_randoms(make_view_keys(3, 0, np.arange(n), 1), 1)[:, 0],
        uniform_randoms(make_view_keys(4, 0, np.arange(n), 0), 1)[:, 0],
        uniform_randoms(make_view_keys(3, 0, np.arange(n), 0), 1, purpose=1)[:, 0],
    )
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / n**0.5
