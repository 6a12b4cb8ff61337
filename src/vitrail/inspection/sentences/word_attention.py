"""Describe images, and what a captioner attends to when it writes each word.

B images, W words, L layers, H heads, M tokens of a caption, N tokens of an image: prefix tokens and h×w patches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.figures import CaptionedFigure, FigureFolder, reserve_unique_name, sanitize_label
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem
from vitrail.data.images.preprocessing import Preprocessing, compute_visible_box
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.inspection.explain.explain_files import ExplainResult
from vitrail.inspection.explain.explanation import figure_name
from vitrail.inspection.explain.overlay import PixelBox, draw_overlay, shrink_photo_and_box
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import pair
from vitrail.models.base.text_contract import Memory
from vitrail.models.text.caption_model import CaptionModel
from vitrail.predict.captioner import Caption, Captioner, write_captions
from vitrail.predict.image_list import open_arguments
from vitrail.predict.search.settings import SearchSettings


@dataclass(frozen=True, eq=False)
class WordAttention:
    """The words of a caption, and the attention with which each was written."""

    words: tuple[str, ...]
    maps: NDArray[Any]  # (W, L, H, h, w): shares of the attention; prefix tokens have the rest

    def average(self, layer: int | None = None) -> NDArray[Any]:
        """One map per word: the mean over the heads of a layer, or of all layers: (W, h, w)."""
        chosen = self.maps if layer is None else self.maps[:, [self.check_layer(layer)]]
        return chosen.mean((1, 2))

    def check_layer(self, layer: int) -> int:
        layers = self.maps.shape[1]
        if not -layers <= layer < layers:
            raise ConfigError(f"`layer` is {layer}; expected 0 to {layers - 1}, the layers of the decoder")
        return layer


def find_patch_grid(model: CaptionModel, preprocessing: Preprocessing, tokens: int) -> Grid:
    """Rows and columns of the patches of an image; an error if the tokens are not those of a grid."""
    stride, (rows, columns) = model.encoder.levels[-1].stride, pair(preprocessing.image_size)
    grid = rows // stride[0], columns // stride[1]
    if grid[0] * grid[1] + model.encoder.prefix != tokens:
        raise ConfigError(
            f"{tokens} tokens of an image; expected {grid[0]}×{grid[1]} patches to draw the attention over them: use "
            "another encoder"
        )
    return grid


def compute_cross_attention(model: CaptionModel, memory: Memory, target: Tensor, grid: Grid) -> NDArray[np.float32]:
    """The attention with which each token after `target` (B, M) is predicted, over the patches: (B, M, L, H, h, w)."""
    if reason := model.decoder.no_maps_reason:
        raise ConfigError(f"this {type(model.decoder).__name__} has no attention to the image: {reason}")
    found = model.decoder.attention_maps(memory, target).cross  # (B, L, H, M, N)
    if found is None:
        raise ConfigError(f"this {type(model.decoder).__name__} has no attention to the image; use another decoder")
    patches = found[..., model.encoder.prefix :].permute(0, 3, 1, 2, 4)
    return patches.unflatten(-1, grid).float().cpu().numpy()


@torch.no_grad()
def attend_words(
    model: CaptionModel, tokenizer: TextTokenizer, memory: Memory, ids: Sequence[int], grid: Grid
) -> WordAttention:
    """The attention of one image's caption, given by its tokens; a word of several pieces has the mean of theirs."""
    target = torch.tensor([[tokenizer.start, *ids]], device=memory.tokens.device)
    maps = compute_cross_attention(model, memory, target, grid)[0]
    words = group_pieces(tokenizer, ids)
    return WordAttention(
        tuple(tokenizer.decode(ids[word.start : word.stop]).strip() for word in words),
        np.stack([maps[word.start : word.stop].mean(0) for word in words]) if words else maps[:0],
    )


def group_pieces(tokenizer: TextTokenizer, ids: Sequence[int]) -> list[range]:
    """The places of the tokens of each word of a caption."""
    starts = [place for place, token in enumerate(ids) if not place or tokenizer.starts_word(token)]
    return [range(start, end) for start, end in pairwise([*starts, len(ids)])]


METHOD = "words"  # in the names of the files
MAX_WORD_LENGTH = 16  # in a title


@dataclass(frozen=True, kw_only=True, eq=False)  # comparing arrays is ambiguous
class DescribedImage:
    """A caption of an image, and what the model attended to when it wrote each word; a notebook shows the figure."""

    caption: Caption
    attention: WordAttention
    photo: NDArray[np.uint8]  # (rows, columns, 3), at the size of a figure
    box: PixelBox  # the part of the photo that the model receives
    layer: int | None = None  # of the decoder; None: the mean of all layers
    written: tuple[Path, ...] = ()

    @property
    def maps(self) -> NDArray[Any]:
        """One map per word: (words, h, w)."""
        return self.attention.average(self.layer)

    @property
    def figure(self) -> CaptionedFigure:
        name = Path(self.caption.image).name or "image"
        layer = "all layers" if self.layer is None else f"layer {self.layer}"
        return CaptionedFigure(
            name=figure_name(self.caption.image or "image", METHOD),
            title=f"{name}: {self.caption.text}",
            caption=f"The caption of {name}, word by word. Colors are bright where patches receive the most attention "
            f"when a word is written, mean over the heads of {layer}. The scale is linear, from 0 (1 is uniform "
            "attention) to the 95% quantile.",
            arrays={
                "words": np.array(self.attention.words),
                "maps": self.maps,
                "attention": self.attention.maps,
                "photo": self.photo,
                "box": np.array(self.box),
            },
            draw=self.render,
        )

    def render(self) -> Any:
        panels = self.maps[:, None] * prod(self.maps.shape[-2:])
        titles = [[sanitize_label(word, MAX_WORD_LENGTH)] for word in self.attention.words]
        return draw_overlay(
            self.photo, self.box, panels, titles, self.caption.text, "attention (1 = average)", lowest=0.0
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.caption.to_json(), "written": list(map(str, self.written))}

    def _repr_png_(self) -> bytes:
        return self.figure.to_png()


def describe_image(
    captioner: Captioner,
    image: Any,
    search: SearchSettings,
    *,
    name: str = "",
    layer: int | None = None,
    number: int = 0,
) -> DescribedImage:
    """Caption an image and collect the attention of its words; `number` is that of the image, for random draws."""
    opened, loaded = open_image(image), captioner.loaded
    how = loaded.preprocessing
    with torch.inference_mode():
        memory = captioner.model.encode(loaded.make_batch([opened]))
    found = write_captions(captioner.model.decoder, captioner.tokenizer, memory, search, first=number)
    caption = captioner.make_caption(name, found[0])
    grid = find_patch_grid(captioner.model, how, memory.tokens.shape[1])
    attention = attend_words(captioner.model, captioner.tokenizer, memory, caption.ids, grid)
    if layer is not None:
        attention.check_layer(layer)
    photo, box = shrink_photo_and_box(opened, compute_visible_box((opened.height, opened.width), how))
    return DescribedImage(caption=caption, attention=attention, photo=photo, box=box, layer=layer)


def describe_files(
    captioner: Captioner,
    images: Sequence[ImageItem],
    search: SearchSettings,
    out: FigureFolder,
    *,
    layer: int | None = None,
    on_error: Callable[[DataError], object] = lambda _: None,
    progress: Callable[[int], object] = lambda _: None,
) -> Iterator[DescribedImage]:
    """Write a figure per image to `out`; an image that cannot be read is passed to `on_error` and skipped."""
    taken = set[str]()
    names = [reserve_unique_name(figure_name(each.name, METHOD), taken) for each in images]
    out.prepare(names)
    for number, (each, figure) in enumerate(zip(images, names, strict=True)):
        try:
            found = describe_image(captioner, each.source, search, name=each.name, layer=layer, number=number)
        except DataError as error:
            on_error(error)
        else:
            written = out.save(replace(found.figure, name=figure)) if found.attention.words else []
            yield replace(found, written=tuple(written))
        progress(1)


def describe_arguments(
    captioner: Captioner,
    arguments: Sequence[str],
    search: SearchSettings,
    out: FigureFolder,
    *,
    layer: int | None = None,
    stdin: BinaryIO | None = None,
    on_described: Callable[[DescribedImage], object],
    on_error: Callable[[DataError], object],
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]],
) -> ExplainResult:
    """Describe the images that arguments name: files, folders, patterns, `-` for `stdin`; draw a figure of each.

    What cannot be read is passed to `on_error` and skipped, and is an error in the result; if it is the only image, it
    is an error at once.
    """
    found, report = open_arguments(arguments, stdin, on_error), list[dict[str, Any]]()
    with progress(found.bar_length) as advance:
        described = describe_files(
            captioner, found.images, search, out, layer=layer, on_error=found.skip, progress=advance
        )
        for each in described:
            report.append(each.to_json())
            on_described(each)
    out.finish()
    return ExplainResult(report, found.make_error(out.path if report else None))
