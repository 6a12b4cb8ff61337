"""The validation split of sentence pairs: reproducible, and no sentence in both parts."""

from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.text.sentence_split import choose_held_out_pairs, group_by_sentences

WORDS = st.sampled_from([f"w{number}" for number in range(12)])
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40)
SHARES = st.floats(0.01, 0.5)


def split(pairs: list[tuple[str, str]], share: float, seed: int = 0) -> list[bool]:
    return choose_held_out_pairs([one for one, _ in pairs], [other for _, other in pairs], seed=seed, share=share)


@given(pairs=PAIRS, share=SHARES, seed=st.integers(0, 99))
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


@given(pairs=PAIRS, share=SHARES, data=st.data())
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
