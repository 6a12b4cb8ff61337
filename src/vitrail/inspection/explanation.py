"""What an explanation of an image holds, and its figure."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.errors import ConfigError
from vitrail.figures import CaptionedFigure, save_figure
from vitrail.inspection.explain_options import ExplainOptions
from vitrail.inspection.head_attention import draw_heads, mask_by_mass
from vitrail.inspection.overlay import PixelBox, draw_overlay
from vitrail.inspection.rollout import patch_map_from_row
from vitrail.predict.predictions import ClassProbability, Prediction

MAX_STEM_BYTES = 180  # in a file name


@dataclass(frozen=True, kw_only=True, eq=False)  # comparing arrays is ambiguous
class Explanation:
    """Maps of what a model attends to in an image, from `Explainer.explain`; a notebook shows it as a figure.

    >>> explanation = vitrail.Explainer("vit_fashion").explain("example:cat")
    >>> explanation.map.shape  # one value per patch
    (4, 4)
    >>> explanation.save("why.png")
    """

    name: str
    options: ExplainOptions
    maps: NDArray[Any]  # (layers, heads, h, w); attention maps sum to 1 each
    photo: NDArray[np.uint8]  # (rows, columns, 3), at the size of a figure
    box: PixelBox  # the part of the photo that the model receives: left, top, right, bottom in pixels
    explained_class: ClassProbability | None = None  # None without a head
    prediction: Prediction | None = None
    attention: NDArray[Any] | None = None  # of each head to all tokens, prefix first, for method heads: (heads, tokens)
    memory: NDArray[Any] | None = None  # share of each map's attention on memory tokens: (layers, heads)

    @property
    def map(self) -> NDArray[Any]:
        """The last map, usually the only one: (h, w)."""
        return self.maps[-1, -1]

    @property
    def mean(self) -> NDArray[Any]:
        """The mean over the heads of the last layer, as a map that sums to 1: (h, w)."""
        if self.attention is None:
            return self.maps[-1].mean(0)
        h, w = self.maps.shape[-2:]
        return patch_map_from_row(self.attention.mean(0), (h, w))

    @property
    def titles(self) -> tuple[tuple[str, ...], ...]:
        """Title of each map."""
        titles = self.options.titles(*self.maps.shape[:2])
        if self.memory is None:
            return titles
        shares = self.memory.tolist()
        return tuple(
            tuple(f"{title}, memory {share:.0%}" for title, share in zip(*row, strict=True))
            for row in zip(titles, shares, strict=True)
        )

    @property
    def memory_sentence(self) -> str:
        """How much of the attention is on memory tokens; empty if there are none."""
        if self.memory is None:
            return ""
        start = "On average, " if self.memory.size > 1 else ""
        return f" {start}{self.memory.mean():.1%} of the attention is on memory tokens."

    @property
    def is_empty(self) -> bool:
        """Whether all maps are 0: nothing supports the class, as in an untrained model or for an unused token."""
        return self.options.method == "grad-rollout" and not self.maps.any()

    @property
    def figure(self) -> CaptionedFigure:
        name = Path(self.name).name or "image"
        method = self.options.description + ", no evidence for the class" * self.is_empty
        if self.options.method == "heads":
            return self.make_heads_figure(name)
        explained = self.explained_class
        probability = "" if explained is None else f"{explained.name} {explained.probability:.1%}"
        if self.options.method == "norms":
            meaning, scale = "have the longest tokens", "from the smallest value"
        else:
            by_class = self.options.method == "grad-rollout"
            meaning = "contribute most to the class" if by_class else "receive the most attention"
            scale = "from 0 (1 is uniform attention)"
        places = "windows" if self.options.method == "windows" else "patches"
        return CaptionedFigure(
            name=figure_name(self.name, self.options.method),
            title=f"{name}: {method}",
            caption=f"{method[0].upper()}{method[1:]} of {name}"
            + f" ({probability})" * bool(probability)
            + f". Colours are bright where {places} {meaning}. The scale is linear, {scale} to the 95 % quantile."
            + self.memory_sentence,
            arrays={"maps": self.maps, "photo": self.photo, "box": np.array(self.box), **self.memory_arrays},
            draw=lambda: self.render(" · ".join(filter(None, (probability, method)))),
        )

    @property
    def memory_arrays(self) -> dict[str, NDArray[Any]]:
        return {} if self.memory is None else {"memory": self.memory}

    def make_heads_figure(self, name: str) -> CaptionedFigure:
        assert self.attention is not None
        mass, (heads, h, w) = self.options.mass, self.maps.shape[1:]
        prefix = self.attention[:, : -h * w].sum(-1).mean() - (0 if self.memory is None else self.memory.mean())
        kept = "" if mass is None else f" Bright are the fewest patches that hold {mass:.0%} of a head's attention."
        scale = "The scale is linear, from 0 (1 is uniform attention) to the 95 % quantile." * (mass is None)
        heading = self.options.describe_heads(heads)
        return CaptionedFigure(
            name=figure_name(self.name, self.options.method),
            title=f"{name}: {heading}",
            caption=f"{heading[0].upper()}{heading[1:]}: the mean over the heads, and each head.{kept} {scale}".rstrip()
            + f" On average, {prefix:.0%} of the attention is on prefix tokens." * bool(prefix)
            + self.memory_sentence,
            arrays={
                "maps": self.maps,
                "mean": self.mean,
                "attention": self.attention,
                **({} if mass is None else {"masks": mask_by_mass(self.maps, mass)}),
                "photo": self.photo,
                "box": np.array(self.box),
                **self.memory_arrays,
            },
            draw=lambda: draw_heads(
                self.photo,
                self.box,
                self.maps[0],
                self.mean,
                heading,
                mass=mass,
                patch=self.query_patch,
            ),
        )

    @property
    def query_patch(self) -> tuple[int, ...] | None:
        """Row and column of the patch that attends; None if it is another token."""
        return tuple(map(int, self.options.token.split(","))) if "," in self.options.token else None

    def render(self, heading: str) -> Any:
        if self.options.method == "norms":
            panels, unit, lowest = self.maps, "token norm", None
        else:
            panels, unit, lowest = self.maps * prod(self.maps.shape[-2:]), "attention (1 = uniform)", 0.0
        top = () if self.prediction is None else self.prediction.top
        explained = None if self.explained_class is None else self.explained_class.index
        predictions = [(each.name, each.probability, each.index == explained) for each in top]
        return draw_overlay(
            self.photo,
            self.box,
            panels,
            self.titles,
            heading,
            unit,
            patch=self.query_patch,
            lowest=lowest,
            predictions=predictions,
        )

    def save(self, path: str | Path) -> None:
        """Write the figure to a .png, .svg or .pdf file, which is replaced if it exists."""
        if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the path is {repr(path)[:60]}; expected a string or a Path such as 'why.png'")
        save_figure(self.figure.draw(), Path(path))

    def _repr_png_(self) -> bytes:
        return self.figure.to_png()

    def __repr__(self) -> str:
        explained = self.explained_class
        of_class = "" if explained is None else f", {explained.name} {100 * explained.probability:.1f} %"
        return f"Explanation({self.name!r}, {self.options.description}{of_class}, maps {self.maps.shape})"


def figure_name(image: str, method: str) -> str:
    """The name of an image's figure, without a suffix: photo.rollout."""
    return f"{truncate_stem(Path(image.removeprefix(EXAMPLE_PREFIX)).name or 'image')}.{method}"


def truncate_stem(name: str) -> str:
    """Shorten a file's stem so that suffixes fit: most file systems allow 255 bytes."""
    stem = Path(name).stem
    data = stem.encode("utf-8", "surrogateescape")
    return stem if len(data) <= MAX_STEM_BYTES else data[:MAX_STEM_BYTES].decode("utf-8", "ignore")
