"""Shared figure code: figures with captions and data, axes and labels. Needs matplotlib."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.base.files import make_folder, make_writable_folder, refuse_existing_outputs, write_atomically
from vitrail.base.style import FIGURE_DPI, TITLE_POINTS
from vitrail.base.text import escape_unprintable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
Verdict = Literal["", "right", "wrong"]
VERDICT_MARKS = {"right": "✓", "wrong": "✗"}  # next to the word, since colors alone are not seen by everyone


@dataclass(frozen=True, kw_only=True)
class CaptionedFigure:
    """A figure with its caption and the arrays it is drawn from; displays itself in a notebook."""

    name: str  # file name without suffix
    title: str
    caption: str  # also the text alternative for screen readers
    arrays: "Mapping[str, NDArray[Any]]"
    draw: "Callable[[], Figure]" = field(repr=False)
    legend: str = ""  # what the marks mean, said once for several figures of a page
    verdict: Verdict = ""  # of the prediction that it shows

    def to_png(self) -> bytes:
        return self.render("png")

    def to_svg(self) -> str:
        return self.render("svg").decode("utf-8")

    def render(self, kind: str) -> bytes:
        buffer = BytesIO()
        self.draw().savefig(buffer, format=kind)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.to_png()

    def with_unique_name(self, taken: set[str]) -> "CaptionedFigure":
        """Append a number if the name is taken, as for equal names from two folders; add the new name to `taken`."""
        return replace(self, name=reserve_unique_name(self.name, taken))

    def save(self, folder: str | Path, kinds: Sequence[str] = (".png",), *, arrays: bool = False) -> list[Path]:
        """Write NAME.png and the other kinds, and NAME.npz if `arrays`; each file is written atomically.

        A PNG file holds the title and the caption, as Title and Description.
        """
        folder, figure = Path(folder), self.draw()
        written = list_figure_paths(folder, [self.name], kinds, arrays=arrays)
        for path in written[: len(kinds)]:
            save_figure(figure, path, title=self.title, caption=f"{self.legend} {self.caption}".strip())
        if arrays:
            make_folder(folder)
            write_atomically(written[-1], lambda place: write_npz(place, self.arrays))
        return written


def reserve_unique_name(name: str, taken: set[str]) -> str:
    """The name, or name-2, name-3, … if it is taken; adds it to `taken`."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in count(1))
    unique = next(each for each in candidates if each.casefold() not in taken)
    taken.add(unique.casefold())  # some file systems ignore case
    return unique


def list_figure_paths(
    folder: Path, names: Iterable[str], kinds: Sequence[str] = (".png",), *, arrays: bool = False
) -> list[Path]:
    """The files that figures of these names are saved to."""
    return [folder / f"{name}{kind}" for name in names for kind in (*kinds, *[".npz"] * arrays)]


@dataclass(frozen=True, kw_only=True)
class FigureFolder:
    """Where figures are saved: a folder, with one file per figure and kind."""

    path: Path
    kinds: Sequence[str] = (".png",)
    arrays: bool = False
    overwrite: bool = False

    def list_paths(self, names: Sequence[str]) -> list[Path]:
        return list_figure_paths(self.path, names, self.kinds, arrays=self.arrays)

    def prepare(self, names: Sequence[str]) -> None:
        """Fail before the work if files exist, the folder cannot be written or figures cannot be drawn."""
        paths = self.list_paths(names)
        refuse_existing_outputs(paths, overwrite=self.overwrite)
        for folder in dict.fromkeys([path.parent for path in paths]):
            make_writable_folder(folder)
        new_figure(1, 1)

    def save(self, figure: CaptionedFigure) -> list[Path]:
        return figure.save(self.path, self.kinds, arrays=self.arrays)

    def finish(self) -> None:
        """Called after the last figure."""


class FigureFile(FigureFolder):
    """One figure in a file of a given name; other kinds and the arrays are next to it."""

    def list_paths(self, names: Sequence[str]) -> list[Path]:
        if len(names) > 1:
            page = self.path.with_suffix(".html")
            raise ConfigError(
                f"{self.path} is one figure, but there are {len(names)}; use {page} for one page, or a folder"
            )
        return list_figure_paths(self.path.parent, [self.path.stem], self.kinds, arrays=self.arrays)

    def save(self, figure: CaptionedFigure) -> list[Path]:
        return replace(figure, name=self.path.stem).save(self.path.parent, self.kinds, arrays=self.arrays)


def write_npz(path: Path, arrays: "Mapping[str, NDArray[Any]]") -> None:
    """Write arrays to a file object: given a path without .npz, numpy would change the name."""
    import numpy as np

    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> "Figure":
    """Create a figure without pyplot, which keeps references to figures and may open windows.

    `compressed` keeps axes of a fixed aspect ratio next to their color bar.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_package_error("drawing a figure", "matplotlib") from None
    return Figure(figsize=(width, height), dpi=FIGURE_DPI, layout=layout, facecolor="white")  # in dark pages too


def style_axes(axes: "Axes", title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=TITLE_POINTS, loc="left")


def sanitize_label(text: str, max_length: int = 60) -> str:
    """Shorten a long label in the middle, since names differ at their ends; replace what the font lacks with □."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    end = (max_length - 1) // 2
    shortened = text if len(text) <= max_length else f"{text[: max_length - 1 - end]}…{text[len(text) - end :]}"
    return "".join(each if each.isprintable() and font.get_char_index(ord(each)) else "□" for each in shortened)


def wrap_label(text: str, width: int, max_lines: int = 2) -> str:
    """Break a label into lines of at most `width` characters, after spaces and punctuation where there are any."""
    for length in range(width * max_lines, 0, -1):
        lines = [""]
        for word in re.findall(r"[^\s,./_…-]*[\s,./_…-]*", sanitize_label(text, length)):
            if lines[-1] and len(lines[-1] + word.rstrip()) > width:
                lines.append("")
            lines[-1] += word
            while len(lines[-1].rstrip()) > width:
                lines[-1:] = lines[-1][:width], lines[-1][width:]
        if len(lines) <= max_lines:
            return "\n".join(each.rstrip() for each in lines)
    return sanitize_label(text, width)


def measure_text(text: str, points: float) -> float:
    """The width of a line of text in inches."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    font.set_size(points, 72)
    font.set_text(text)
    return font.get_width_height()[0] / 64 / 72


def save_figure(figure: "Figure", path: Path, *, title: str = "", caption: str = "") -> None:
    kind = path.suffix.lower()
    if kind not in FIGURE_SUFFIXES:
        raise ConfigError(f"cannot save a figure as {path}; expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    make_folder(path.parent)
    texts = {"Title": title, "Description": caption} if kind == ".png" else {}
    metadata = {name: escape_unprintable(text) for name, text in texts.items() if text}
    write_atomically(path, lambda place: figure.savefig(place, format=kind[1:], metadata=metadata))
