"""Batches of sentence pairs: a function of seed and step, about equal numbers of tokens, exact means over parts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.text.batches import EncodedPairs, PairBatches, TokenRows, cut_equally, load_validation_batches
from vitrail.data.text.pairs import SentencePairs, open_pairs
from vitrail.data.text.tokenizer import END, PAD, START, TextTokenizer

LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=60)


def make_pairs(lengths: Sequence[tuple[int, int]]) -> EncodedPairs:
    """Pairs of these lengths whose tokens are all different."""
    numbers = iter(range(4, 10**6))
    sources, targets = ([[next(numbers) for _ in range(pair[side])] for pair in lengths] for side in (0, 1))
    return EncodedPairs(
        sources=TokenRows.join(sources),
        targets=TokenRows.join(targets),
        indices=np.arange(len(lengths)),
        pad=PAD,
        start=START,
        end=END,
    )


def random_lengths(count: int, seed: int = 0, longest: int = 30) -> list[tuple[int, int]]:
    return [tuple(row) for row in np.random.default_rng(seed).integers(1, longest, (count, 2)).tolist()]


def make_batches(lengths: Sequence[tuple[int, int]], tokens: int, most: int = 1000, seed: int = 0) -> PairBatches:
    return PairBatches(pairs=make_pairs(lengths), batch_tokens=tokens, max_sentences=most, seed=seed)


@given(lengths=LENGTHS, extra=st.integers(0, 100), most=st.integers(1, 12), epoch=st.integers(0, 3))
def test_every_pair_is_in_one_batch_of_an_epoch(
    lengths: list[tuple[int, int]], extra: int, most: int, epoch: int
) -> None:
    longest = max(source + target + 2 for source, target in lengths)
    batches = make_batches(lengths, longest + extra, most)
    steps = batches.steps_per_epoch
    rows = [batches.rows_at(step) for step in range(epoch * steps, (epoch + 1) * steps)]
    assert np.sort(np.concatenate(rows)).tolist() == [*range(len(lengths))]
    for each in rows:
        assert 1 <= len(each) <= most


@given(lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=20, max_size=80))
def test_batches_have_about_equal_numbers_of_tokens(lengths: list[tuple[int, int]]) -> None:
    """The number differs from the mean by less than the longest pair has."""
    counts = make_pairs(lengths).token_counts
    batches = make_batches(lengths, 2 * int(counts.max()))
    mean = counts.sum() / batches.steps_per_epoch
    assert batches.steps_per_epoch == -(-int(counts.sum()) // (2 * int(counts.max())))
    for rows in batches.plan_epoch(0):
        assert abs(counts[rows].sum() - mean) < counts.max()


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=60), data=st.data())
def test_no_part_is_empty(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    starts = cut_equally(np.array(weights), parts).tolist()
    assert starts[0] == 0
    assert all(one < other for one, other in zip(starts, [*starts[1:], len(weights)], strict=True))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    lengths = random_lengths(300)
    batches, again = make_batches(lengths, 200), make_batches(lengths, 200)
    steps = batches.steps_per_epoch
    for step in (5 * steps + 1, 3, 2 * steps, 0, steps - 1, 5 * steps + 1):  # as after resuming, in any order
        assert np.array_equal(batches.rows_at(step), again.rows_at(step))
    assert not np.array_equal(batches.rows_at(0), make_batches(lengths, 200, seed=1).rows_at(0))
    resumed = list(make_batches(lengths, 200).load(range(7, 9)))
    for one, other in zip(list(batches.load(range(9)))[7:], resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.tensors)


def test_epochs_have_other_batches_in_another_order() -> None:
    batches = make_batches(random_lengths(300), 200)
    first, second = ([tuple(sorted(rows.tolist())) for rows in batches.plan_epoch(epoch)] for epoch in (0, 1))
    assert len(first) == len(second) == batches.steps_per_epoch
    assert len({*first} & {*second}) < len(first) / 4
    longest = [max(batches.pairs.targets.lengths[list(rows)]) for rows in first]
    assert longest != sorted(longest)


@given(lengths=LENGTHS, accumulate=st.integers(1, 3), world=st.integers(1, 3), step=st.integers(0, 5))
def test_parts_are_the_whole_step_and_their_shares_are_exact(
    lengths: list[tuple[int, int]], accumulate: int, world: int, step: int
) -> None:
    batches = make_batches(lengths, 200)
    parts = [
        list(batches.load(range(step, step + 1), accumulate=accumulate, rank=rank, world=world))
        for rank in range(world)
    ]
    (whole,) = batches.load(range(step, step + 1))
    assert {len(each) for each in parts} == {accumulate}
    flat = [batch for each in parts for batch in each]
    counted = [batch for batch in flat if batch["share"] > 0]
    assert sorted(index for batch in counted for index in batch["indices"].tolist()) == sorted(
        whole["indices"].tolist()
    )
    tokens = [int((batch["target_out"] != PAD).sum()) for batch in counted]
    assert sum(tokens) == (whole["target_out"] != PAD).sum()
    for batch, count in zip(counted, tokens, strict=True):
        assert batch["share"].item() == pytest.approx(count * len(flat) / sum(tokens))
    assert sum(batch["share"].item() for batch in flat) == pytest.approx(len(flat))
    assert whole["share"].item() == 1
    assert all(batch.size == len(batch["indices"]) >= 1 for batch in flat)


def mean_loss(batch: Any) -> torch.Tensor:
    """A mean over real tokens, with logits that depend on the tokens of the row."""
    logits = torch.sin(batch["target_in"][..., None] * torch.arange(1.0, 8.0))
    losses = F.cross_entropy(logits.flatten(0, 1), batch["target_out"].flatten() % 7, reduction="none")
    kept = (batch["target_out"] != PAD).flatten()
    return (losses * kept).sum() / kept.sum()


@pytest.mark.parametrize(("accumulate", "world"), [(1, 2), (3, 1), (2, 2), (1, 40)])
def test_the_mean_over_parts_is_the_mean_over_tokens(accumulate: int, world: int) -> None:
    batches = make_batches(random_lengths(200), 300)
    for step in range(3):
        (whole,) = batches.load(range(step, step + 1))
        parts = [
            batch
            for rank in range(world)
            for batch in batches.load(range(step, step + 1), accumulate=accumulate, rank=rank, world=world)
        ]
        mean = torch.stack([mean_loss(batch) * batch["share"] for batch in parts]).mean()
        assert torch.allclose(mean, mean_loss(whole), rtol=1e-5)


def test_rows_have_start_and_end_and_are_padded_at_the_end() -> None:
    pairs = make_pairs([(2, 1), (1, 3), (0, 0)])  # 4 5, 6 | 7, 8 9 10 | nothing
    batch = pairs.make_batch(np.array([1, 0, 2]))
    assert batch["source"].tolist() == [[6, END, PAD], [4, 5, END], [END, PAD, PAD]]
    assert batch["target_in"].tolist() == [[START, 8, 9, 10], [START, 7, PAD, PAD], [START, PAD, PAD, PAD]]
    assert batch["target_out"].tolist() == [[8, 9, 10, END], [7, END, PAD, PAD], [END, PAD, PAD, PAD]]
    assert batch["indices"].tolist() == [1, 0, 2]
    assert batch.size == 3
    assert {each.dtype for name, each in batch.tensors.items() if name != "share"} == {torch.int64}


@given(rows=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=12), data=st.data())
def test_padded_rows_equal_those_of_a_loop(rows: list[list[int]], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if rows else []
    first, last = data.draw(st.tuples(st.none() | st.just(7), st.none() | st.just(9)))
    padded = TokenRows.join(rows).pad(np.array(chosen, np.int64), pad=5, first=first, last=last)
    plain = [[*([first] * (first is not None)), *rows[each], *([last] * (last is not None))] for each in chosen]
    longest = max(map(len, plain), default=padded.shape[1])
    assert padded.shape == (len(chosen), longest)
    assert padded.tolist() == [[*row, *[5] * (longest - len(row))] for row in plain]


def test_long_pairs_are_left_out_and_counted() -> None:
    tokenizer = TextTokenizer.train_bpe(["a b c d e f"] * 5, 30)
    pairs = SentencePairs(["a", "a b c", "a b", "c"], ["b", "b", "b c d e", "c d"], "train")
    kept = EncodedPairs.encode(pairs, tokenizer, length=4)  # three words and the end token
    assert kept.indices.tolist() == [0, 1, 3]
    assert kept.notes == ("train: 1 pair longer than 4 tokens left out",)
    assert kept.make_batch(np.array([1, 2]))["indices"].tolist() == [1, 3]
    assert (kept.pad, kept.start, kept.end) == (PAD, START, END)
    assert len(EncodedPairs.encode(pairs, tokenizer)) == 4
    with pytest.raises(DataError, match=r"train: all 4 pairs are longer than 1 tokens; expected a larger `length`"):
        EncodedPairs.encode(pairs, tokenizer, length=1)


def test_wrong_sizes_give_one_line() -> None:
    with pytest.raises(ConfigError, match="`batch_tokens` is 10; expected at least 12, as the longest pair has"):
        make_batches([(5, 5), (1, 1)], 10)
    with pytest.raises(ConfigError, match="`batch` is 0; expected at least 1 sentence"):
        make_batches([(5, 5)], 100, 0)
    with pytest.raises(DataError, match="there are no training pairs"):
        make_batches([], 100)


@given(lengths=LENGTHS, batch=st.integers(1, 9), world=st.integers(1, 3), limit=st.none() | st.integers(1, 70))
def test_validation_has_every_pair_once_sorted_by_length(
    lengths: list[tuple[int, int]], batch: int, world: int, limit: int | None
) -> None:
    pairs = make_pairs(lengths)
    found = list[int]()
    for rank in range(world):
        batches = list(load_validation_batches(pairs, batch=batch, rank=rank, world=world, limit=limit))
        counts: list[NDArray[np.int64]] = [pairs.token_counts[each["indices"].numpy()] for each in batches]
        assert all(each.size <= batch for each in batches)
        assert np.array_equal(np.concatenate(counts or [np.zeros(0)]), np.sort(np.concatenate(counts or [np.zeros(0)])))
        found += [index for each in batches for index in each["indices"].tolist()]
    assert sorted(found) == [*range(len(lengths))][:limit]


def test_an_epoch_of_multi30k_is_planned_fast_with_little_padding(shared: Callable[[str], Path]) -> None:
    """With words instead of pieces, which take longer to make than to plan."""
    train = open_pairs(shared("text/multi30k"), "de-en").train
    words = zip(train.sources, train.targets, strict=True)
    pairs = make_pairs([(len(source.split()), len(target.split())) for source, target in words])
    batches = PairBatches(pairs=pairs, batch_tokens=1300, max_sentences=256)
    seconds = list[float]()
    for epoch in range(3):
        started = thread_time()
        plan = batches.make_plan(epoch)
        seconds.append(thread_time() - started)
        assert len(plan) == batches.steps_per_epoch
    assert min(seconds) < 0.1
    loaded = list(batches.load(range(0, batches.steps_per_epoch, 10)))
    real = sum(int((batch[name] != PAD).sum()) for batch in loaded for name in ("source", "target_out"))
    assert real / sum(batch[name].numel() for batch in loaded for name in ("source", "target_out")) > 0.96
