"""What an explanation of an image holds, and its figure."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError
from vitrail.base.figures import VERDICT_MARKS, CaptionedFigure, Verdict, save_figure
from vitrail.base.style import NOTE_POINTS, SOFT, WRONG
from vitrail.base.text import format_probability
from vitrail.data.photos import EXAMPLE_PREFIX
from vitrail.inspection.attention.rollout import patch_map_from_row
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.overlay import OUTLINED_SHARE, PixelBox, draw_heads, draw_overlay, mask_by_mass
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
    truth: ClassProbability | None = None  # the true class, if it is known

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
    def verdict(self) -> Verdict:
        """Whether the top class is the true one; empty if that is not known."""
        if self.truth is None or self.prediction is None:
            return ""
        return "right" if self.prediction.top[0].index == self.truth.index else "wrong"

    @property
    def title(self) -> str:
        """What is seen: What the model looked at for tripod (97.7%)."""
        explained = self.explained_class
        name = "" if explained is None else f"{explained.name} ({format_probability(explained.probability)})"
        if self.is_empty:
            return f"Nothing that the model looked at supports {name}"
        if self.options.method == "norms":
            return "How strong the features of each patch are"
        if self.options.method == "heads":
            return f"{self.options.looks} in layer {self.options.layer}, head by head"
        return f"{self.options.looks} for {name}" if self.options.method == "grad-rollout" else self.options.looks

    @property
    def marks(self) -> str:
        """What the marks in the figure mean."""
        place, places = ("window", "windows") if self.options.method == "windows" else ("patch", "patches")
        single = self.maps.shape[:2] == (1, 1) or self.options.method == "heads"
        if self.options.method == "heads" and self.options.mass is not None:
            bright = f"the fewest patches that hold {self.options.mass:.0%} of a head's attention"
        elif self.options.method == "norms":
            bright = "patches with strong features"
        else:
            bright = f"the {places} that it looked at" + " for this class" * (self.options.method == "grad-rollout")
        frame = " Dashed frame: the part of the photo that the model receives." * single
        query = f" Dashed in the map: the {place} that looks." * (self.query_patch is not None)
        outlined = f" Outlined: the strongest {OUTLINED_SHARE:.0%} of them." * (self.options.mass is None)
        return f"Bright: {bright}.{outlined}{frame}{query}"

    @property
    def facts(self) -> str:
        """The image, what was predicted, and what is true if that is known."""
        name = Path(self.name).name or "image"
        if self.prediction is None:
            return f"{name}."
        top, truth = self.prediction.top[0], self.truth
        true = (
            ""
            if truth is None or self.verdict == "right"
            else f"; it is {truth.name} ({format_probability(truth.probability)})"
        )
        return f"{name}: predicted {top.name} ({format_probability(top.probability)}){true}."

    @property
    def method(self) -> str:
        """The method and its scale, as sentences."""
        start = "the smallest value" if self.options.method == "norms" else "0 (1 is the average)"
        scale = f" The scale is linear, from {start} to the 95% quantile." * (self.options.mass is None)
        return f"{self.options.description[0].upper()}{self.options.description[1:]}.{scale}"

    @property
    def figure(self) -> CaptionedFigure:
        captioned = CaptionedFigure(
            name=figure_name(self.name, self.options.method),
            title=self.title,
            caption=f"{self.facts}{self.memory_sentence}",
            legend=f"{self.marks} {self.method}",
            verdict=self.verdict,
            arrays={"maps": self.maps, "photo": self.photo, "box": np.array(self.box), **self.memory_arrays},
            draw=self.render,
        )
        return captioned if self.attention is None else self.add_heads(captioned)

    @property
    def memory_arrays(self) -> dict[str, NDArray[Any]]:
        return {} if self.memory is None else {"memory": self.memory}

    def add_heads(self, captioned: CaptionedFigure) -> CaptionedFigure:
        """The figure of all heads."""
        assert self.attention is not None
        mass, (_, h, w) = self.options.mass, self.maps.shape[1:]
        prefix = self.attention[:, : -h * w].sum(-1).mean() - (0 if self.memory is None else self.memory.mean())
        share = f" On average, {prefix:.0%} of the attention is on prefix tokens." * bool(prefix)
        more = {"mean": self.mean, "attention": self.attention}
        more |= {} if mass is None else {"masks": mask_by_mass(self.maps, mass)}
        return replace(
            captioned,
            caption=captioned.caption + share,
            arrays={**captioned.arrays, **more},
            draw=lambda: draw_heads(
                self.photo, self.box, self.maps[0], self.mean, self.heading, mass=mass, patch=self.query_patch
            ),
        )

    @property
    def heading(self) -> str:
        """The title; whether the prediction is right comes first, if that is known."""
        if self.truth is None or not self.verdict:
            return self.title
        truth = f", it is {self.truth.name}" * (self.verdict == "wrong")
        return f"{VERDICT_MARKS[self.verdict]} {self.verdict.capitalize()}{truth}. {self.title}"

    @property
    def query_patch(self) -> tuple[int, ...] | None:
        """Row and column of the patch that attends; None if it is another token."""
        return tuple(map(int, self.options.token.split(","))) if "," in self.options.token else None

    def render(self) -> Any:
        if self.options.method == "norms":
            panels, unit, lowest = self.maps, "token norm", None
        else:
            panels, unit, lowest = self.maps * prod(self.maps.shape[-2:]), "attention (1 = average)", 0.0
        top = () if self.prediction is None else self.prediction.top
        explained = None if self.explained_class is None else self.explained_class.index
        true = None if self.truth is None else self.truth.index
        predictions = [
            (each.name + " (the truth)" * (each.index == true), each.probability, each.index == explained)
            for each in top
        ]
        titles = self.titles
        if self.maps.shape[:2] == (1, 1) and self.memory is None:
            titles = (("bright: strong features" if self.options.method == "norms" else "bright: what it looked at",),)
        figure = draw_overlay(
            self.photo,
            self.box,
            panels,
            titles,
            self.heading,
            unit,
            patch=self.query_patch,
            lowest=lowest,
            predictions=predictions,
        )
        if self.verdict == "wrong":
            figure.texts[0].set_color(WRONG)  # the heading
        figure.supxlabel(self.options.description, x=0.01, ha="left", fontsize=NOTE_POINTS, color=SOFT)
        return figure

    def save(self, path: str | Path) -> None:
        """Write the figure to a .png, .svg or .pdf file, which is replaced if it exists."""
        if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the path is {repr(path)[:60]}; expected a string or a Path such as 'why.png'")
        save_figure(self.figure.draw(), Path(path))

    def _repr_png_(self) -> bytes:
        return self.figure.to_png()

    def __repr__(self) -> str:
        explained = self.explained_class
        of_class = "" if explained is None else f", {explained.name} {format_probability(explained.probability)}"
        return f"Explanation({self.name!r}, {self.options.description}{of_class}, maps {self.maps.shape})"


def figure_name(image: str, method: str) -> str:
    """The name of an image's figure, without a suffix: photo.rollout."""
    return f"{truncate_stem(Path(image.removeprefix(EXAMPLE_PREFIX)).name or 'image')}.{method}"


def truncate_stem(name: str) -> str:
    """Shorten a file's stem so that suffixes fit: most file systems allow 255 bytes."""
    stem = Path(name).stem
    data = stem.encode("utf-8", "surrogateescape")
    return stem if len(data) <= MAX_STEM_BYTES else data[:MAX_STEM_BYTES].decode("utf-8", "ignore")
