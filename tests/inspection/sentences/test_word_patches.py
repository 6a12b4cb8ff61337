"""The attention of words over patches, its figures, and its scores on collages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from support.toy_captions import HOW, make_caption_task, make_tokenizer, open_toy_captioner

from vitrail.base.errors import ConfigError
from vitrail.base.figures import FigureFolder
from vitrail.data.captions.collages import CollageImages, PlacedGarment
from vitrail.data.images.image_items import ImageItem
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.inspection.sentences.known_attention import NounScores, find_hits, list_nouns, score_nouns, sum_inside
from vitrail.inspection.sentences.word_attention import (
    WordAttention,
    attend_words,
    describe_files,
    describe_image,
    find_patch_grid,
)
from vitrail.models.base.text_contract import Memory, TextAttention
from vitrail.predict.captioner import Captioner
from vitrail.predict.search.settings import GREEDY, SearchSettings

CPU = torch.device("cpu")


def draw_map(*places: tuple[int, int, float], grid: tuple[int, int] = (4, 4)) -> NDArray[Any]:
    """A map with values at (row, column)."""
    found = np.zeros(grid)
    for row, column, value in places:
        found[row, column] = value
    return found


def test_the_strongest_patch_decides_and_mass_is_summed() -> None:
    inside = PlacedGarment("bag", 0, 1).find_patches((4, 4))  # top right
    hit = draw_map((0, 3, 0.4), (3, 0, 0.3), (2, 2, 0.3))
    miss = draw_map((0, 3, 0.3), (1, 2, 0.3), (3, 0, 0.4))
    maps = np.stack([hit, miss])
    assert find_hits(maps, inside).tolist() == [True, False]
    assert sum_inside(maps, inside).tolist() == pytest.approx([0.4, 0.6])
    assert find_hits(maps[:, None, None], inside).shape == (2, 1, 1)


def test_the_layer_of_the_most_hits_is_chosen_by_the_mean_of_the_heads() -> None:
    strongest = np.array([[1.0, 1.0, 0.5], [0.2, 0.3, 0.9]])  # two heads, then their mean
    scores = NounScores(strongest=strongest, mass=strongest, correct=1, changed=1, nouns=10)
    assert scores.choose_layer() == 1


def test_nouns_are_found_with_their_tokens_and_patches() -> None:
    images = CollageImages("val", count=8)
    for tokenizer in (make_tokenizer(), TextTokenizer.train_bpe(CollageImages("train", count=50).list_sentences(), 40)):
        nouns = list(list_nouns(tokenizer, images, range(8), (4, 4)))
        assert [row for row, *_ in nouns] == [row for row in range(8) for _ in range(2)]
        for row, garment, places, inside in nouns:
            collage = images.collage(row)
            ids = tokenizer.encode([collage.sentence])[0]
            assert tokenizer.decode([ids[place] for place in places]) == collage.garments[garment].word
            assert inside.sum() == 4


class LookingDecoder(torch.nn.Module):
    """Attends to one patch with all heads of its last layer when it writes a token, and everywhere in the first."""

    no_maps_reason = ""

    def __init__(self, patches: list[int]) -> None:
        super().__init__()
        self.patches = patches

    def attention_maps(self, memory: Memory, target: torch.Tensor) -> TextAttention:
        rows, count = target.shape
        cross = torch.full((rows, 2, 2, count, memory.tokens.shape[1]), 1 / memory.tokens.shape[1])
        cross[:, 1] = 0.0
        for place in range(count):
            cross[:, 1, :, place, 1 + self.patches[place % len(self.patches)]] = 1.0
        return TextAttention(cross=cross)


def test_a_word_has_the_mean_attention_of_its_pieces() -> None:
    task, tokenizer = make_caption_task(), TextTokenizer.train_bpe(["a boot left of a shirt"], 25)
    ids = tokenizer.encode(["a boot"])[0]
    assert len(ids) > 2
    model: Any = task.result
    model.decoder = LookingDecoder(list(range(16)))
    memory = model.encode(torch.zeros(1, 1, 56, 56))
    found = attend_words(model, tokenizer, memory, ids, (4, 4))
    assert found.words == ("a", "boot")
    assert found.maps.shape == (2, 2, 2, 4, 4)
    first = 1 if tokenizer.show_token(ids[0]) == "a" else 2  # pieces of "a"
    expected = np.zeros(16)
    expected[first : len(ids)] = 1 / (len(ids) - first)
    np.testing.assert_allclose(found.maps[1, 1, 0].ravel(), expected, atol=1e-6)
    np.testing.assert_allclose(found.average(1)[1].ravel(), expected, atol=1e-6)
    np.testing.assert_allclose(found.average()[1].ravel(), (expected + 1 / 17) / 2, atol=1e-6)
    with pytest.raises(ConfigError, match="`layer` is 2; expected 0 to 1, the layers of the decoder"):
        found.average(2)


def test_attention_is_that_of_the_decoder_without_the_prefix() -> None:
    task, tokenizer = make_caption_task(), make_tokenizer()
    model = task.result.eval()
    with torch.no_grad():
        memory = model.encode(torch.rand(1, 1, 56, 56))
        ids = tokenizer.encode(["a boot left of a shirt"])[0]
        found = attend_words(model, tokenizer, memory, ids, (4, 4))
        cross = model.decoder.attention_maps(memory, torch.tensor([[tokenizer.start, *ids]])).cross
    assert cross is not None
    assert found.words == ("a", "boot", "left", "of", "a", "shirt")
    np.testing.assert_allclose(found.maps[1].reshape(2, 2, 16), cross[0, :, :, 1, 1:].numpy(), atol=1e-6)
    assert attend_words(model, tokenizer, memory, [], (4, 4)).maps.shape == (0, 2, 2, 4, 4)
    assert find_patch_grid(model, HOW, 17) == (4, 4)
    with pytest.raises(ConfigError, match="20 tokens of an image; expected 4×4 patches"):
        find_patch_grid(model, HOW, 20)


class TruthfulModel:
    """Knows the collage from its pixels: says the right words, and looks at the right garment in its second layer."""

    no_maps_reason = ""
    length_limit = None
    encoder: Any = make_caption_task().backbone

    def __init__(self, tokenizer: TextTokenizer, images: CollageImages) -> None:
        self.tokenizer, self.decoder = tokenizer, self
        self.config = type("Config", (), {"pad": tokenizer.pad})
        self.known = dict[bytes, tuple[str, list[int]]]()  # sentence, and the places of its garments
        for index in range(len(images)):
            collage = images.collage(index)
            first, second = collage.garments
            for source, sentence, garments in (
                (images.source(index), collage.sentence, [first, second]),
                (images.source_without(index, 0), second.phrase, [second]),
                (images.source_without(index, 1), first.phrase, [first]),
            ):
                self.known[source.tobytes()] = sentence, [garment.place for garment in garments]

    def encode(self, images: torch.Tensor) -> Memory:
        pixels = ((images * 0.5 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        self.rows = [self.known[np.ascontiguousarray(each.numpy()).tobytes()] for each in pixels]
        tokens = torch.zeros(len(images), 17, 16)
        tokens[:, 0, 0] = torch.arange(len(images))
        memory = Memory(tokens)
        self.sentences = {**getattr(self, "sentences", {}), id(tokens): self.rows}  # the memory of each batch
        self.kept = [*getattr(self, "kept", []), tokens]  # so that ids stay unique
        return memory

    def decode(self, memory: Memory, target: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*target.shape, self.tokenizer.vocabulary)
        for row, (sentence, _) in enumerate(self.sentences[id(memory.tokens)]):
            words = [*self.tokenizer.encode([sentence])[0], self.tokenizer.end]
            for place in range(target.shape[1]):
                logits[row, place, words[min(place, len(words) - 1)]] = 9.0
        return logits

    def attention_maps(self, memory: Memory, target: torch.Tensor) -> TextAttention:
        cross = torch.full((len(target), 2, 1, target.shape[1], 17), 1 / 17)
        cross[:, 1] = 0.0
        for row, (sentence, places) in enumerate(self.sentences[id(memory.tokens)]):
            pieces = self.tokenizer.pieces(sentence)
            middle = len(sentence) // 2
            for place in range(target.shape[1]):
                late = place < len(pieces) and pieces[place].start > middle
                corner = 1 + {0: 0, 1: 3, 2: 12, 3: 15}[places[-1] if late else places[0]]
                cross[row, 1, 0, place, corner] = 0.9
        return TextAttention(cross=cross)


def test_a_model_that_looks_at_the_right_garments_has_full_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    images, tokenizer = CollageImages("test", count=60), make_tokenizer()
    model: Any = TruthfulModel(tokenizer, images)

    def write_known(model: Any, _: TextTokenizer, memory: Memory) -> list[str]:
        return [sentence for sentence, _ in model.sentences[id(memory.tokens)]]

    monkeypatch.setattr("vitrail.inspection.sentences.known_attention.write_sentences", write_known)
    scores = score_nouns(model, tokenizer, HOW, images, device=CPU)
    assert (scores.nouns, scores.correct, scores.changed) == (120, 1.0, 1.0)
    assert scores.choose_layer() == 1
    assert scores.strongest[1].tolist() == [1.0, 1.0]
    assert scores.mass[1] == pytest.approx([0.9, 0.9], abs=1e-5)
    assert scores.mass[0] == pytest.approx([4 / 17, 4 / 17], abs=1e-5)


def test_random_weights_have_scores_by_chance() -> None:
    model = make_caption_task().result.eval()
    seen = list[int]()
    scores = score_nouns(
        model, make_tokenizer(), HOW, CollageImages("test"), device=CPU, count=60, progress=seen.append
    )
    assert scores.strongest.shape == scores.mass.shape == (2, 3)
    assert scores.mass == pytest.approx(np.full((2, 3), 4 / 17), abs=0.1)
    assert scores.correct < 0.5
    assert sum(seen) == 60


def test_figures_show_one_map_per_word(tmp_path: Path) -> None:
    captioner = Captioner(open_toy_captioner(tmp_path / "model"))
    images = CollageImages("val", count=2)
    for index in range(2):
        Image.fromarray(images.source(index)[..., 0]).save(tmp_path / f"{index}.png")
    items = [ImageItem(tmp_path / f"{index}.png", f"{index}.png") for index in (0, 1, 0)]
    search = SearchSettings(beam=1, length=5)
    found = list(describe_files(captioner, items, search, FigureFolder(path=tmp_path / "out", arrays=True), layer=1))
    for each, name in zip(found, ("0.words", "1.words", "0.words-2"), strict=True):
        assert each.written == (tmp_path / "out" / f"{name}.png", tmp_path / "out" / f"{name}.npz")
        stored = np.load(tmp_path / "out" / f"{name}.npz")
        words = len(each.attention.words)
        assert stored["words"].tolist() == list(each.attention.words)
        assert stored["attention"].shape == (words, 2, 2, 4, 4)
        np.testing.assert_allclose(stored["maps"], stored["attention"][:, 1].mean(1), atol=1e-6)
        assert "".join(each.attention.words) == each.caption.text.replace(" ", "")
    assert found[0].to_json()["written"] == [str(path) for path in found[0].written]
    with pytest.raises(ConfigError, match="already exists; use `overwrite`"):
        next(describe_files(captioner, items, search, FigureFolder(path=tmp_path / "out")))
    with pytest.raises(ConfigError, match="`layer` is 7; expected 0 to 1"):
        describe_image(captioner, tmp_path / "0.png", GREEDY, layer=7)


def test_a_decoder_without_attention_is_one_line() -> None:
    model: Any = make_caption_task().result
    model.decoder.no_maps_reason = "it has none"
    with pytest.raises(ConfigError, match="this Transformer has no attention to the image: it has none"):
        attend_words(model, make_tokenizer(), model.encode(torch.zeros(1, 1, 56, 56)), [5], (4, 4))


def test_maps_of_words_are_averaged_over_heads_and_layers() -> None:
    attention = WordAttention(("a",), np.arange(2 * 2 * 1 * 2, dtype=float).reshape(1, 2, 2, 1, 2))
    assert attention.average().tolist() == [[[3.0, 4.0]]]
    assert attention.average(0).tolist() == [[[1.0, 2.0]]]
