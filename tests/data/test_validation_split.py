"""The validation split of images and of sentence pairs: reproducible, and stable when some are added."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.base.errors import ConfigError
from vitrail.data.validation_split import (
    check_val_share,
    choose_held_out_pairs,
    choose_validation_mask,
    group_by_sentences,
    hash_name,
)

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=5)
SHARES = st.floats(0.01, 0.99)
WORDS = st.sampled_from([f"w{number}" for number in range(12)])
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40)
PAIR_SHARES = st.floats(0.01, 0.5)


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


def split(pairs: list[tuple[str, str]], share: float, seed: int = 0) -> list[bool]:
    return choose_held_out_pairs([one for one, _ in pairs], [other for _, other in pairs], seed=seed, share=share)


@given(pairs=PAIRS, share=PAIR_SHARES, seed=st.integers(0, 99))
def test_no_sentence_is_in_both_parts_and_at_most_half_is_held_out(
    pairs: list[tuple[str, str]], share: float, seed: int
) -> None:
    held_out = split(pairs, share, seed)
    for side in (0, 1):
        train, val = (
            {pair[side] for pair, held in zip(pairs, held_out, strict=True) if held == part} for part in (0, 1)
        )
        assert not train & val
    assert sum(held_out) <= max(1, round(len(pairs) * share))
    assert sum(held_out) <= len(pairs) // 2


@given(pairs=PAIRS, share=PAIR_SHARES, data=st.data())
def test_order_and_direction_do_not_matter(pairs: list[tuple[str, str]], share: float, data: st.DataObject) -> None:
    chosen = {pair for pair, held in zip(pairs, split(pairs, share), strict=True) if held}
    mixed = data.draw(st.permutations(pairs))
    again = {pair for pair, held in zip(mixed, split(mixed, share), strict=True) if held}
    back = [(other, one) for one, other in pairs]
    reverse = {pair[::-1] for pair, held in zip(back, split(back, share), strict=True) if held}
    assert chosen == again == reverse


def test_the_share_is_reached_if_no_sentence_repeats() -> None:
    pairs = [(f"a{number}", f"b{number}") for number in range(200)]
    assert sum(split(pairs, 0.1)) == 20
    assert sum(split(pairs, 0.5)) == 100
    assert sum(split(pairs, 1e-6)) == 1
    assert sum(split(pairs[:1], 0.5)) == 0
    assert sum(split(pairs, 0)) == 0
    assert split(pairs, 0.1) != split(pairs, 0.1, seed=1)


def test_pairs_are_grouped_along_chains_of_equal_sentences() -> None:
    groups = group_by_sentences(["a", "b", "b", "c", "d"], ["1", "1", "2", "3", "3"])
    assert groups[0] == groups[1] == groups[2] != groups[3] == groups[4]
    assert len({*group_by_sentences(["Hotel", "x"], ["y", "Hotel"])}) == 1
