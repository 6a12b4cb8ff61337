"""Describe images: images in, captions out, by greedy search, beam search or sampling."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.progress import Progress, track_progress
from vitrail.data.images.image_items import ImageItem
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.distributed import Ranks, resolve_device
from vitrail.models.base.checks import check_count
from vitrail.models.base.text_contract import Memory, TextModel
from vitrail.opening import Opened, open_model
from vitrail.predict.search.hypothesis import Hypothesis
from vitrail.predict.search.settings import SearchSettings, change_search

MAX_CAPTION_TOKENS = 60  # by default


@dataclass(frozen=True, kw_only=True)
class Caption:
    """A caption of an image; `print` shows its text."""

    image: str  # its name
    text: str
    score: float  # log-probability, divided by the length penalty
    log_probability: float
    tokens: tuple[str, ...]  # as shown to people
    ids: tuple[int, ...]  # of the tokens
    finished: bool = True  # False: cut at the maximum length
    alternatives: tuple["Caption", ...] = field(default=())  # the next best, with `n_best`

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        others = [{"caption": each.text, "score": each.score} for each in self.alternatives]
        return {
            "file": self.image,
            "caption": self.text,
            "score": self.score,
            "log_probability": self.log_probability,
            **({"alternatives": others} if others else {}),
        }


def write_captions(
    decoder: TextModel,
    tokenizer: TextTokenizer,
    memory: Memory,
    search: SearchSettings,
    *,
    limit: int = MAX_CAPTION_TOKENS,
    first: int = 0,
) -> list[list[Hypothesis]]:
    """The captions of each row of a memory, best first; `first` is the number of the first image, for the draws."""
    rows, longest = len(memory.tokens), search.length or limit
    length = longest if decoder.length_limit is None else min(longest, decoder.length_limit)
    return search.write(decoder, tokenizer, memory, torch.full((rows,), length), range(first, first + rows))


class Captioner:
    """Describes images with a run of the task caption, or the folder of its model.

    `batch` is the number of images that are described together, `trust_code` that of `vitrail.open_model`.

    >>> captioner = vitrail.Captioner("runs/captions")  # doctest: +SKIP
    >>> captioner.caption("photo.jpg").text  # doctest: +SKIP
    'a boot left of a shirt'
    """

    def __init__(
        self,
        model: str | Path | Opened,
        *,
        device: str | torch.device | None = "auto",
        batch: int = 16,
        trust_code: str | Sequence[str] = (),
    ) -> None:
        check_count("batch", batch)
        place = None if device is None else resolve_device(device, Ranks())
        self.loaded, self.batch = open_model(model, kind="caption", device=place, trust_code=trust_code), batch
        self.model, self.tokenizer = self.loaded.model, self.loaded.tokenizer

    def caption(self, image: Any, search: SearchSettings | None = None, **changes: Any) -> Caption:
        """Describe an image: a path, bytes, a Pillow image, an array or a tensor.

        `search` is a `vitrail.SearchSettings`; its fields may also be given as keywords, such as `beam=1` for greedy
        search.
        """
        search = change_search(search, changes)
        found = next(self.iterate([ImageItem(image, str(image) if isinstance(image, str | Path) else "")], search))
        if isinstance(found, DataError):
            raise found
        return found

    def caption_all(
        self,
        images: Iterable[Any],
        search: SearchSettings | None = None,
        *,
        progress: Progress = None,
        **changes: Any,
    ) -> Iterator[Caption]:
        """One caption per image, in order, a batch at a time; an unreadable image is a DataError.

        `search` and its fields as keywords are those of `caption`. By default, a progress bar is shown in a notebook
        and on a terminal.
        """
        if isinstance(images, str | bytes | Path):
            raise ConfigError(f"images is one {type(images).__name__}; expected several in a list")
        items = (ImageItem(each, str(each) if isinstance(each, str | Path) else "") for each in images)
        total = len(images) if isinstance(images, Sized) else None
        with track_progress(progress, total, "images") as advance:
            for found in self.iterate(items, change_search(search, changes)):
                if isinstance(found, DataError):
                    raise found
                yield found
                advance(1)

    def iterate(self, images: Iterable[ImageItem], search: SearchSettings) -> Iterator[Caption | DataError]:
        """A caption for each image, in order; an unreadable image has its error instead."""
        items, first = iter(images), 0
        while chunk := list(islice(items, self.batch)):
            yield from self.describe_batch(chunk, search, first)
            first += len(chunk)

    def describe_batch(
        self, images: Sequence[ImageItem], search: SearchSettings, first: int = 0
    ) -> list[Caption | DataError]:
        prepared = [self.prepare(each.source) for each in images]
        readable = [each for each in prepared if isinstance(each, Tensor)]
        if not readable:
            return [each for each in prepared if isinstance(each, DataError)]
        with torch.inference_mode():
            memory = self.model.encode(torch.stack(readable))
        found = iter(write_captions(self.model.decoder, self.tokenizer, memory, search, first=first))
        return [
            each if isinstance(each, DataError) else self.make_caption(item.name, next(found))
            for item, each in zip(images, prepared, strict=True)
        ]

    def prepare(self, image: Any) -> Tensor | DataError:
        """The model's input for an image (C, H, W), or why it cannot be read."""
        try:
            return self.loaded.make_batch([image])[0]
        except DataError as error:
            return error

    def make_caption(self, image: str, hypotheses: Sequence[Hypothesis]) -> Caption:
        best, *others = (
            Caption(
                image=image,
                text=self.tokenizer.decode(each.tokens),
                score=each.score,
                log_probability=each.log_probability,
                tokens=tuple(map(self.tokenizer.show_token, each.tokens)),
                ids=each.tokens,
                finished=each.finished,
            )
            for each in hypotheses
        )
        return replace(best, alternatives=tuple(others))
