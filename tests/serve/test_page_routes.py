"""What the page has asked for is remembered within a bound, keys included."""

from vitrail.serve.page_routes import ENTRY_BYTES, AnswerCache


def test_the_cache_is_bounded_for_small_answers_too() -> None:
    cache = AnswerCache(most=10 * (ENTRY_BYTES + 1))
    for number in range(100):
        cache.put(b"%d" % number, b"1")
    assert len(cache.answers) == 10
    assert (cache.get(b"0"), cache.get(b"99")) == (None, b"1")
    assert cache.get(b"90") is not None  # now the newest
    cache.put(b"100", b"1")
    assert (cache.get(b"91"), cache.get(b"90")) == (None, b"1")
    cache.put(b"large", b"1" * 10_000)
    assert cache.get(b"large") is None
    assert cache.held == 10 * (ENTRY_BYTES + 1)
