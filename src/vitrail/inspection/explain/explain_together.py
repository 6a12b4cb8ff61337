"""Figures that show several images together: principal components of their patches, and nearest neighbours."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.figures import FigureFolder
from vitrail.base.text import escape_unprintable, format_count
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.image_items import ImageItem, evenly_spaced_indices
from vitrail.evaluation.evaluation_data import find_default_data
from vitrail.inspection.explain.explanation import figure_name
from vitrail.inspection.representation.image_bank import open_bank
from vitrail.inspection.representation.nearest_neighbours import ROWS_PER_FIGURE, find_neighbours
from vitrail.inspection.representation.patch_pca import MAX_IMAGES, draw_patch_pca
from vitrail.loaded_model import LoadedModel
from vitrail.predict.image_list import STDIN, collect_images, unreadable_images_error


@dataclass(frozen=True)
class ExplainResult:
    """What was explained, as JSON, and the error about images that could not be read."""

    report: list[dict[str, Any]]
    error: DataError | None

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class FigureOfImages:
    """A figure of several images, and the files that it was written to."""

    method: str
    images: Sequence[str]  # names
    written: Sequence[Path]
    values: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        written = list(map(str, self.written))
        return {"images": list(self.images), "method": self.method, **self.values, "written": written}

    def __str__(self) -> str:
        shown = self.images[0] if len(self.images) == 1 else format_count(len(self.images), "image")
        return escape_unprintable(f"{shown}: {', '.join(map(str, self.written))}")


def name_set_figure(images: Sequence[ImageItem], method: str) -> str:
    """PHOTO.METHOD for one image, METHOD for several."""
    return figure_name(images[0].name, method) if len(images) == 1 else method


def write_components(
    loaded: LoadedModel,
    images: Sequence[ImageItem],
    out: FigureFolder,
    *,
    foreground: bool = False,
) -> FigureOfImages:
    """Write the figure of the principal components of images, evenly spaced ones if there are many."""
    name = name_set_figure(images, "pca")
    out.prepare([name])
    shown = [images[n] for n in evenly_spaced_indices(len(images), MAX_IMAGES)]
    figure = draw_patch_pca(
        loaded, [each.source for each in shown], names=[each.name for each in shown], foreground=foreground
    )
    written = out.save(replace(figure, name=name))
    shares = {"variance_shares": figure.arrays["variance_shares"].tolist()}
    return FigureOfImages("pca", [each.name for each in shown], written, shares)


def list_images_for_figure(
    arguments: Sequence[str], stdin: BinaryIO | None, on_error: Callable[[DataError], object]
) -> tuple[list[ImageItem], list[str]]:
    """The images that arguments name, and the problems with other arguments, which are passed to `on_error`."""
    found, problems = collect_images(arguments, stdin)
    for problem in problems:
        on_error(DataError(problem))
    return [replace(each, name="stdin") if each.name == STDIN else each for each in found], problems


def explain_by_components(
    loaded: LoadedModel,
    arguments: Sequence[str],
    out: FigureFolder,
    *,
    foreground: bool = False,
    stdin: BinaryIO | None = None,
    on_explained: Callable[[object], object],
    on_error: Callable[[DataError], object],
) -> ExplainResult:
    """Write one figure of the principal components of all images that arguments name."""
    found, problems = list_images_for_figure(arguments, stdin, on_error)
    readable, failed = list[ImageItem](), list[DataError]()
    for each in [found[n] for n in evenly_spaced_indices(len(found), MAX_IMAGES)]:
        try:
            decode_for_model(each.source, loaded.preprocessing)
        except DataError as error:
            failed.append(error)
        else:
            readable.append(each)
    if not readable:
        raise failed[0]
    for error in failed:
        on_error(error)
    figure = write_components(loaded, readable, out, foreground=foreground)
    on_explained(figure)
    out.finish()
    return ExplainResult([figure.to_json()], unreadable_images_error(len(failed), len(found), problems, out.path))


def explain_by_neighbours(
    loaded: LoadedModel,
    arguments: Sequence[str],
    data: str | None,
    out: FigureFolder,
    *,
    k: int = 5,
    stdin: BinaryIO | None = None,
    on_explained: Callable[[object], object],
    on_note: Callable[[str], object],
    on_error: Callable[[DataError], object],
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]],
) -> ExplainResult:
    """Write figures of the nearest neighbours of each image that arguments name, by default in the data of the run."""
    where = find_default_data(loaded) if data is None else data
    if where is None:
        raise ConfigError("no `data` to search; expected a folder of images, or a file from `vitrail embed`")
    found, problems = list_images_for_figure(arguments, stdin, on_error)
    first = name_set_figure(found, "neighbours")
    names = [first, *(f"neighbours-{n}" for n in range(2, -(-len(found) // ROWS_PER_FIGURE) + 1))]
    out.prepare(names)
    bank = open_bank(where)
    with progress(len(bank)) as advance:
        search = find_neighbours(loaded, found, bank, k=k, progress=advance)
    for each in search.failed:
        on_error(each)
    for note in (*search.notes, *search.skipped):
        on_note(note)
    report, start = search.to_json(), 0
    for name, figure in zip(names, search.figures, strict=False):
        written = out.save(replace(figure, name=name))
        rows = report[start : start + ROWS_PER_FIGURE]
        start += len(rows)
        for row in rows:
            row["written"] = list(map(str, written))
        on_explained(FigureOfImages("neighbours", [row["image"] for row in rows], written))
    out.finish()
    return ExplainResult(report, unreadable_images_error(len(search.failed), len(found), problems, out.path))
