"""Score attention whose right answer is known: the garments that nouns name, and digits that are written in reverse.

L layers, H heads, M tokens of a sentence, h×w patches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.data.captions.collages import CollageImages, find_nouns, is_noun_gone
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.loader import evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.text.batches import TokenRows
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.inspection.sentences.sentence_attention import SentenceWords, compute_maps, make_rows, select_head
from vitrail.inspection.sentences.word_attention import compute_cross_attention, find_patch_grid
from vitrail.layers.positions import Grid
from vitrail.models.base.text_contract import Memory
from vitrail.models.text.caption_model import CaptionModel
from vitrail.opening import Opened
from vitrail.predict.captioner import write_captions
from vitrail.predict.search.settings import GREEDY

COLLAGES_AT_ONCE = 50


@dataclass(frozen=True, eq=False, kw_only=True)
class NounScores:
    """How the nouns of collages relate to their garments. Columns are the heads, and last the mean of all heads."""

    strongest: NDArray[Any]  # share of the nouns whose strongest patch is in their garment (L, H + 1)
    mass: NDArray[Any]  # share of the attention that is in the garment (L, H + 1)
    correct: float  # share of the nouns that are predicted, given the words before
    changed: float  # share of the nouns that are no longer in the caption if their garment is removed
    nouns: int

    def choose_layer(self) -> int:
        """The layer in which the mean of the heads finds most garments."""
        return int(self.strongest[:, -1].argmax())


@dataclass(frozen=True, eq=False, kw_only=True)
class NounScore:
    """The same for one noun."""

    strongest: NDArray[np.bool_]  # (L, H + 1)
    mass: NDArray[Any]  # (L, H + 1)
    correct: bool
    changed: bool


def find_hits(maps: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether the strongest patch of maps (…, h, w) is inside (h, w); ties go to the first: (…)."""
    return inside.ravel()[maps.reshape(*maps.shape[:-2], -1).argmax(-1)]


def sum_inside(maps: NDArray[Any], inside: NDArray[np.bool_]) -> NDArray[Any]:
    """The sum of maps (…, h, w) inside (h, w): (…)."""
    return (maps * inside).sum((-2, -1))


@torch.no_grad()
def score_nouns(
    model: CaptionModel,
    tokenizer: TextTokenizer,
    preprocessing: Preprocessing,
    images: CollageImages,
    *,
    device: torch.device,
    count: int | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> NounScores:
    """Score every noun of the sentences of the first `count` collages.

    The attention to a noun is that of the right sentence, so that the model has to say it at this place. Whether a noun
    changes is seen in the captions that the model writes, of the collage and of the same one without its garment.
    """
    total = len(images) if count is None else min(count, len(images))
    found = list[NounScore]()
    for start in range(0, total, COLLAGES_AT_ONCE):
        chosen = range(start, min(start + COLLAGES_AT_ONCE, total))
        found += score_batch(model, tokenizer, preprocessing, images, chosen, device)
        progress(len(chosen))
    return NounScores(
        strongest=np.mean([each.strongest for each in found], axis=0),
        mass=np.mean([each.mass for each in found], axis=0),
        correct=float(np.mean([each.correct for each in found])),
        changed=float(np.mean([each.changed for each in found])),
        nouns=len(found),
    )


def score_batch(
    model: CaptionModel,
    tokenizer: TextTokenizer,
    preprocessing: Preprocessing,
    images: CollageImages,
    chosen: Sequence[int],
    device: torch.device,
) -> list[NounScore]:
    """The scores of the nouns of some collages: first those of the first one.

    A noun of several pieces has the mean of their maps.
    """
    rows, every = (
        TokenRows.join(tokenizer.encode([images.collage(each).sentence for each in chosen])),
        np.arange(len(chosen)),
    )
    target = rows.pad(every, pad=tokenizer.pad, first=tokenizer.start).to(device)
    expected = rows.pad(every, pad=tokenizer.pad, last=tokenizer.end).numpy()
    pixels = [np.stack([images.source(each) for each in chosen])]
    pixels += [np.stack([images.source_without(each, garment) for each in chosen]) for garment in (0, 1)]
    memories = [encode_pixels(model, each, preprocessing, device) for each in pixels]
    said = model.decoder.decode(memories[0], target).argmax(-1).cpu().numpy()
    captions, *without = (write_sentences(model, tokenizer, each) for each in memories)
    grid = find_patch_grid(model, preprocessing, memories[0].tokens.shape[1])
    maps = compute_cross_attention(model, memories[0], target, grid)  # (B, M, L, H, h, w)
    found = list[NounScore]()
    for row, garment, places, inside in list_nouns(tokenizer, images, chosen, grid):
        own = maps[row, places].mean(0)
        own = np.concatenate([own, own.mean(1, keepdims=True)], axis=1)
        found.append(
            NounScore(
                strongest=find_hits(own, inside),
                mass=sum_inside(own, inside),
                correct=bool((said[row, places] == expected[row, places]).all()),
                changed=is_noun_gone(captions[row], without[garment][row], garment),
            )
        )
    return found


def encode_pixels(
    model: CaptionModel, pixels: NDArray[np.uint8], preprocessing: Preprocessing, device: torch.device
) -> Memory:
    """The tokens of images (B, rows, columns, C)."""
    batch = next(iter(evaluation_batches(ArrayDataset(pixels, None, ()), preprocessing, batch=len(pixels))))
    return model.encode(normalize(batch["images"].to(device), preprocessing))


def write_sentences(model: CaptionModel, tokenizer: TextTokenizer, memory: Memory) -> list[str]:
    """The caption of each row, by greedy search."""
    return [tokenizer.decode(best.tokens) for best, *_ in write_captions(model.decoder, tokenizer, memory, GREEDY)]


def list_nouns(
    tokenizer: TextTokenizer, images: CollageImages, chosen: Sequence[int], grid: Grid
) -> Iterator[tuple[int, int, list[int], NDArray[np.bool_]]]:
    """Of each noun: its row among the chosen collages, its garment, the places of its tokens, its patches (h, w)."""
    for row, index in enumerate(chosen):
        collage = images.collage(index)
        pieces = tokenizer.pieces(collage.sentence)
        for garment, (start, end) in enumerate(find_nouns(collage.sentence)):
            places = [place for place, piece in enumerate(pieces) if start <= piece.start < end]
            yield row, garment, places, collage.garments[garment].find_patches(grid)


@dataclass(frozen=True)
class ReversalScore:
    """How many digits were written while the attention was largest at the same digit of the source."""

    hits: int
    tokens: int

    @property
    def share(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return f"attention is largest on the anti-diagonal for {self.hits} of {self.tokens:,} tokens, {self.share:.1%}"


@torch.inference_mode()
def score_reversal(
    loaded: Opened, pairs: Iterable[tuple[str, str]], layer: int = -1, head: int | Literal["mean"] = "mean"
) -> ReversalScore:
    """Score the cross-attention of pairs of `data/text/pairs.py`, while the right digits are written."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if model.no_maps_reason:
        raise ConfigError(f"there is no attention to score: {model.no_maps_reason}")
    hits = tokens = 0
    for digits, reverse in pairs:
        source, target = (SentenceWords.from_text(tokenizer, each) for each in (digits, reverse))
        row = make_rows(model, [[*source.ids, tokenizer.end]])
        maps = compute_maps(model, model.encode(row), make_rows(model, [[tokenizer.start, *target.ids]]), row)["cross"]
        assert maps is not None
        chosen = select_head(maps, layer, head)
        words = target.average_pieces(source.sum_pieces(chosen[:-1, :-1]))  # without the end on both sides
        hits += count_anti_diagonal(words)
        tokens += len(words)
    return ReversalScore(hits, tokens)


def count_anti_diagonal(maps: NDArray[Any]) -> int:
    """The rows of a square map whose largest value is on the anti-diagonal."""
    return int((maps.argmax(1) == np.arange(maps.shape[1])[::-1]).sum())
