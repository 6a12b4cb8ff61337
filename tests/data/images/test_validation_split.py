"""The validation split: reproducible, per class, and stable when images are added."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.errors import ConfigError
from vitrail.data.images.validation_split import check_val_share, choose_validation_mask, hash_name

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=5)
SHARES = st.floats(0.01, 0.99)


def make_images(counts: list[int]) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int64]]]:
    names = [f"{label}/{number}.jpg" for label, count in enumerate(counts) for number in range(count)]
    return names, np.repeat(np.arange(len(counts)), counts)


@given(counts=COUNTS, share=SHARES, seed=st.integers(0, 2**32))
def test_share_of_each_class_is_held_out(counts: list[int], share: float, seed: int) -> None:
    names, labels = make_images(counts)
    held = choose_validation_mask(names, labels, seed=seed, share=share)
    for label, count in enumerate(counts):
        mine = int(held[labels == label].sum())
        assert mine == 0 if count == 1 else 1 <= mine <= count - 1
        assert abs(mine - share * count) <= 1


@given(counts=COUNTS, share=SHARES, seed=st.integers(0, 2**32), data=st.data())
def test_order_of_images_does_not_matter(counts: list[int], share: float, seed: int, data: st.DataObject) -> None:
    names, labels = make_images(counts)
    order = data.draw(st.permutations(range(len(names))))
    held = choose_validation_mask(names, labels, seed=seed, share=share)
    again = choose_validation_mask([names[index] for index in order], labels[order], seed=seed, share=share)
    assert np.array_equal(held[order], again)


@given(
    count=st.integers(2, 40), share=SHARES, added=st.lists(st.text(min_size=1, max_size=5), max_size=10, unique=True)
)
def test_added_image_moves_at_most_one_other(count: int, share: float, added: list[str]) -> None:
    names = [f"0/{number}.jpg" for number in range(count)]
    before = choose_validation_mask(names, np.zeros(count, np.int64), seed=0, share=share)
    more = [*names, *(f"0/new {name}" for name in added)]
    after = choose_validation_mask(more, np.zeros(len(more), np.int64), seed=0, share=share)[:count]
    assert (before != after).sum() <= len(added)


def test_images_of_another_class_move_nothing() -> None:
    names, labels = make_images([20, 20])
    more, more_labels = make_images([20, 25])
    before = choose_validation_mask(names, labels, seed=0, share=0.3)
    after = choose_validation_mask(more, more_labels, seed=0, share=0.3)
    assert np.array_equal(before[:20], after[:20])


def test_split_depends_on_the_seed_and_never_changes() -> None:
    names, labels = make_images([100])
    splits = [choose_validation_mask(names, labels, seed=seed, share=0.2) for seed in (0, 0, 1)]
    assert np.array_equal(splits[0], splits[1])
    assert not np.array_equal(splits[0], splits[2])
    assert hash_name("cats/é.jpg", 0) == hash_name("cats/e\u0301.jpg", 0)  # as macOS stores it
    assert hash_name("cats/1.jpg", 0) == 5059923281127139319
    assert isinstance(hash_name("\udcff.jpg", 0), int)  # a name that is not valid UTF-8


def test_share_of_zero_and_one() -> None:
    names, labels = make_images([1, 5])
    assert not choose_validation_mask(names, labels, seed=0, share=0).any()
    assert choose_validation_mask(names, labels, seed=0, share=1).all()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "half", None])
def test_a_share_out_of_range_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"^val_share is [^\n]+; expected [^\n]+, from 0 to 1$"):
        check_val_share(share)
