"""Captions of images: batched as alone, cached as uncached, unreadable images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_notebook import FakeNotebook
from support.toy_captions import open_toy_captioner

from vitrail.base import progress
from vitrail.base.errors import ConfigError, DataError
from vitrail.data.captions.collages import CollageImages
from vitrail.data.images.image_items import ImageItem
from vitrail.models.base.text_contract import Memory
from vitrail.opening import Opened
from vitrail.predict.captioner import Captioner, write_captions
from vitrail.predict.search.settings import GREEDY, SearchSettings

IMAGES = [CollageImages("val", count=7).source(index) for index in range(7)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A captioner whose random weights write captions of several words."""
    found = open_toy_captioner(tmp_path_factory.mktemp("captioner") / "model")
    with torch.no_grad():
        for weight in found.model.parameters():
            weight.mul_(2.0)
    return found


def decode_without_cache(loaded: Opened, memory: Memory, length: int) -> list[int]:
    """Greedy search that reads the whole caption again for every word."""
    tokenizer, words = loaded.tokenizer, list[int]()
    for _ in range(length):
        target = torch.tensor([[tokenizer.start, *words]])
        logits = loaded.model.decoder.decode(memory, target)[0, -1]
        logits[[tokenizer.pad, tokenizer.start]] = -torch.inf
        words.append(int(logits.argmax()))
        if words[-1] == tokenizer.end:
            return words[:-1]
    return words


@torch.no_grad()
def test_cached_is_uncached(loaded: Opened) -> None:
    captioner = Captioner(loaded)
    lengths = set[int]()
    for image in IMAGES:
        memory = loaded.model.encode(loaded.make_batch([image]))
        found = captioner.caption(image, beam=1, length=12)
        assert list(found.ids) == decode_without_cache(loaded, memory, 12)
        lengths.add(len(found.ids))
    assert max(lengths) > 2


@torch.no_grad()
def test_padded_is_unpadded(loaded: Opened) -> None:
    tokenizer = loaded.tokenizer
    texts = ["a boot", "a dress above and right of a sneaker"]
    rows = [[tokenizer.start, *row] for row in tokenizer.encode(texts)]
    images, longest = loaded.make_batch(IMAGES[:2]), max(map(len, rows))
    padded = torch.tensor([row + [tokenizer.pad] * (longest - len(row)) for row in rows])
    together = loaded.model(images, padded)
    for number, row in enumerate(rows):
        alone = loaded.model(images[number : number + 1], torch.tensor([row]))
        torch.testing.assert_close(together[number, : len(row)], alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("search", [GREEDY, SearchSettings(beam=3), SearchSettings(temperature=1.0, seed=5)])
def test_batched_is_alone(loaded: Opened, search: SearchSettings) -> None:
    batched, alone = (
        [each.ids for each in Captioner(loaded, batch=batch).caption_all(IMAGES, search)] for batch in (4, 1)
    )
    assert batched == alone
    assert len(set(batched)) > 1


def test_progress_counts_the_images(loaded: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook.install(monkeypatch)
    monkeypatch.setattr(progress, "MIN_SECONDS", 0)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    assert len([*Captioner(loaded).caption_all(IMAGES, GREEDY)]) == len(IMAGES)
    assert f'value="{len(IMAGES)}" max="{len(IMAGES)}"' in notebook.shown[-2]
    shown = len(notebook.shown)
    assert [*Captioner(loaded).caption_all(IMAGES[:1], GREEDY, progress=False)]
    assert len(notebook.shown) == shown


def test_beam_search_finds_captions_at_least_as_probable_as_greedy_search(loaded: Opened) -> None:
    captioner = Captioner(loaded)
    found = captioner.caption(IMAGES[0], beam=4, n_best=3, alpha=0.0, length=8)
    assert len(found.alternatives) == 2
    scores = [found.score, *(each.score for each in found.alternatives)]
    assert scores == sorted(scores, reverse=True)
    assert found.to_json()["alternatives"][0] == {"caption": found.alternatives[0].text, "score": scores[1]}
    with pytest.raises(ConfigError, match="`n_best` is 5; expected at most `beam`, 4"):
        captioner.caption(IMAGES[0], n_best=5)


def test_captions_end_at_the_length_given(loaded: Opened) -> None:
    with torch.inference_mode():
        memory = loaded.model.encode(loaded.make_batch(IMAGES))
    for found in write_captions(loaded.model.decoder, loaded.tokenizer, memory, SearchSettings(beam=1, length=2)):
        assert len(found[0].tokens) + found[0].finished <= 2
    with pytest.raises(ConfigError, match="length"):
        SearchSettings(length=0)


def test_an_unreadable_image_is_an_error_at_its_place(loaded: Opened, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"not an image")
    captioner = Captioner(loaded, batch=2)
    items = [ImageItem(tmp_path / "bad.png", "bad.png"), *(ImageItem(each, "") for each in IMAGES[:2])]
    found = list(captioner.iterate(items, GREEDY))
    assert isinstance(found[0], DataError)
    assert [str(each) for each in found[1:]] == [str(captioner.caption(image, beam=1)) for image in IMAGES[:2]]
    only_bad = list(captioner.iterate(items[:1], GREEDY))
    assert isinstance(only_bad[0], DataError)
    with pytest.raises(DataError, match=r"bad\.png"):
        captioner.caption(str(tmp_path / "bad.png"))
    with pytest.raises(DataError, match=r"bad\.png"):
        list(captioner.caption_all([tmp_path / "bad.png"]))


def test_one_image_given_as_several_is_one_line(loaded: Opened) -> None:
    with pytest.raises(ConfigError, match="images is one str; expected several in a list"):
        list(Captioner(loaded).caption_all("photo.jpg"))
    with pytest.raises(ConfigError, match="batch"):
        Captioner(loaded, batch=0)


def test_images_of_any_kind_give_the_same_caption(loaded: Opened, tmp_path: Path) -> None:
    from PIL import Image

    photo = Image.fromarray(IMAGES[0][..., 0])
    photo.save(tmp_path / "a.png")
    captioner = Captioner(loaded)
    texts = {str(captioner.caption(each)) for each in (IMAGES[0], photo, tmp_path / "a.png", np.asarray(photo))}
    assert len(texts) == 1
    assert captioner.caption(tmp_path / "a.png").image == str(tmp_path / "a.png")
