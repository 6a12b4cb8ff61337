"""What the page asks for is remembered within a bound, and is that of its own photo while others are classified."""

import threading
from collections.abc import Sequence

import pytest

from vitrail.data.photos import PHOTO_FOLDER
from vitrail.serve.model_table import host_model
from vitrail.serve.page_routes import ENTRY_BYTES, AnswerCache

PHOTOS = [(PHOTO_FOLDER / f"{name}.jpg").read_bytes() for name in ("cat", "coffee")]
SENTENCES = [b"Ich habe viel zu tun.", b"Wo ist der Bahnhof?"]


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


@pytest.mark.parametrize(("name", "inputs"), [("cct_cifar10", PHOTOS), ("transformer_tatoeba", SENTENCES)])
def test_explanations_do_not_see_predictions_of_other_threads(name: str, inputs: Sequence[bytes]) -> None:
    """Explanations read layers by hooks, while other threads run the same model."""
    model = host_model(name, name, {"streams": 1})
    assert model.explorer is not None
    alone = [model.explorer.explore(each, {"part": "all"}) for each in inputs]
    settings, first = model.served.parse_settings({}), model.served.inputs[0].name
    item, outputs = model.served.prepare(first, model.served.example, settings), [model.served.outputs[0].name]
    done = threading.Event()

    def predict() -> None:
        while not done.is_set():
            model.served.run(item, outputs)

    other = threading.Thread(target=predict)
    other.start()
    try:
        for _ in range(5):
            assert [model.explorer.explore(each, {"part": "all"}) for each in inputs] == alone
    finally:
        done.set()
        other.join()
