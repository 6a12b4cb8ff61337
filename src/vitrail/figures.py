"""What all pictures share: figures without windows, colours for every eye, and the plate. Needs matplotlib."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError
from vitrail.files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
BLUE, RED, GREY = "#2f6db3", "#d1495b", "#8a8f98"
COLOURS = (BLUE, "#e08e2b", "#2a9d6f", RED, "#7b5ea7", "#8c6d46", "#d96fae", "#5f6670", "#a8a532", "#35a7b8")
COLOUR_MAP = "viridis"  # dark to bright for every kind of eye, and in grey


@dataclass(frozen=True, kw_only=True)
class CaptionedFigure:
    """One picture with the numbers that it is drawn from; shows itself in a notebook."""

    name: str  # of its files, without an ending
    title: str
    caption: str  # what there is to be seen, also for those who cannot see it
    arrays: "Mapping[str, NDArray[Any]]"
    draw: "Callable[[], Figure]" = field(repr=False)

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
        """Under a name that is not taken yet, and now is: two photos of one name in two folders are two plates."""
        return replace(self, name=make_unique_name(self.name, taken))

    def save(self, folder: str | Path, kinds: Sequence[str] = (".png",), *, arrays: bool = False) -> list[Path]:
        """Writes NAME.png and the like, and with `arrays` NAME.npz beside it; each appears whole or not at all."""
        folder, figure = Path(folder), self.draw()
        written = list_figure_paths(folder, [self.name], kinds, arrays=arrays)
        for path in written[: len(kinds)]:
            save_figure(figure, path)
        if arrays:
            make_folder(folder)
            write_atomically(written[-1], lambda place: write_npz(place, self.arrays))
        return written


def make_unique_name(name: str, taken: set[str]) -> str:
    """The name, or name-2, name-3 …, whichever is not taken yet; it is added to the taken names."""
    tries = (name if number == 1 else f"{name}-{number}" for number in count(1))
    found = next(each for each in tries if each.casefold() not in taken)
    taken.add(found.casefold())  # on some disks A.png is a.png
    return found


def list_figure_paths(
    folder: Path, names: Iterable[str], kinds: Sequence[str] = (".png",), *, arrays: bool = False
) -> list[Path]:
    """The files that figures of these names are saved to."""
    return [folder / f"{name}{kind}" for name in names for kind in (*kinds, *[".npz"] * arrays)]


def write_npz(path: Path, arrays: "Mapping[str, NDArray[Any]]") -> None:
    """Through a file, since numpy would give a path without .npz another name."""
    import numpy as np

    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def new_figure(width: float, height: float) -> "Figure":
    """Without pyplot, which keeps figures and opens windows."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install vitrail[plot]") from None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def style_axes(axes: "Axes", title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=11, loc="left")


def pluralize(number: int, what: str) -> str:
    """1 image, 1,234 images."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def sanitize_label(text: str, most: int = 30) -> str:
    """What the font has no glyph for becomes □, instead of a warning for each; and long names are cut."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(each if each.isprintable() and font.get_char_index(ord(each)) else "□" for each in shown)


def save_figure(figure: "Figure", path: Path) -> None:
    kind = path.suffix.lower()
    if kind not in FIGURE_SUFFIXES:
        raise ConfigError(f"{path} is to be a picture; expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    make_folder(path.parent)
    write_atomically(path, lambda place: figure.savefig(place, format=kind[1:]))
