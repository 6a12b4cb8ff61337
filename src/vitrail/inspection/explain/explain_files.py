"""Explain the images that arguments name and write their figures; optionally check each map by removing patches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.figures import FigureFolder, reserve_unique_name
from vitrail.base.files import refuse_existing_outputs
from vitrail.base.text import escape_unprintable, format_count, format_probability
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.image_items import ImageItem, evenly_spaced_indices
from vitrail.evaluation.evaluation_data import find_default_data
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.explanation import Explanation, figure_name
from vitrail.inspection.explain.patch_removal import probabilities_without_patches
from vitrail.inspection.representation.nearest_neighbors import ROWS_PER_FIGURE, find_neighbors, open_bank
from vitrail.inspection.representation.patch_pca import MAX_IMAGES, draw_patch_pca
from vitrail.opening import Opened
from vitrail.predict.image_list import STDIN, collect_images, open_arguments, unreadable_images_error


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
    loaded: Opened,
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
    loaded: Opened,
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


def explain_by_neighbors(
    loaded: Opened,
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
    """Write figures of the nearest neighbors of each image that arguments name, by default in the data of the run."""
    where = find_default_data(loaded) if data is None else data
    if where is None:
        raise ConfigError("no `data` to search; expected a folder of images, or a file from `vitrail embed`")
    found, problems = list_images_for_figure(arguments, stdin, on_error)
    first = name_set_figure(found, "neighbors")
    names = [first, *(f"neighbors-{n}" for n in range(2, -(-len(found) // ROWS_PER_FIGURE) + 1))]
    out.prepare(names)
    bank = open_bank(where)
    with progress(len(bank)) as advance:
        search = find_neighbors(loaded, found, bank, k=k, progress=advance)
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
        on_explained(FigureOfImages("neighbors", [row["image"] for row in rows], written))
    out.finish()
    return ExplainResult(report, unreadable_images_error(len(search.failed), len(found), problems, out.path))


REMOVED_SHARE = 0.3  # of the patches, in the occlusion check
EMPTY_MAP_NOTE = "no attention contributes to the class, so the map is 0 everywhere"


@dataclass(frozen=True)
class OcclusionCheck:
    """The probability of the explained class with all patches, and without the 30% most or least attended ones."""

    as_it_is: float
    without_most: float
    without_least: float

    @property
    def sentence(self) -> str:
        """The check in a caption."""
        little = " So this map says little: what it marks matters less than the rest."
        return (
            f"Check: without the {REMOVED_SHARE:.0%} of the patches that it looked at most, {self.as_it_is:.1%} "
            f"becomes {self.without_most:.1%}; without the {REMOVED_SHARE:.0%} that it looked at least, "
            f"{self.without_least:.1%}.{little * (self.without_most >= self.without_least)}"
        )

    def __str__(self) -> str:
        return (
            f"without the {REMOVED_SHARE:.0%} most attended patches {format_probability(self.without_most)}, "
            f"without the {REMOVED_SHARE:.0%} least {format_probability(self.without_least)}"
        )


@dataclass(frozen=True)
class ExplainedImage:
    """An explanation, the files that it was written to, and its occlusion check."""

    explanation: Explanation
    written: list[Path]
    check: OcclusionCheck | None = None

    def to_json(self) -> dict[str, Any]:
        explanation, explained = self.explanation, self.explanation.explained_class
        return {
            "image": explanation.name,
            "method": explanation.options.method,
            "asked": None if explained is None else {**vars(explained), "name": explained.name},
            "top": [] if explanation.prediction is None else [vars(each) for each in explanation.prediction.top],
            "written": list(map(str, self.written)),
            **({} if explanation.memory is None else {"memory": explanation.memory.tolist()}),
            **({} if self.check is None else {"check": vars(self.check)}),
        }

    def __str__(self) -> str:
        explained = self.explanation.explained_class
        predicted = "" if explained is None else f"{explained.name} {format_probability(explained.probability)}, "
        text = f"{self.explanation.name}: {predicted}{', '.join(map(str, self.written))}"
        return escape_unprintable(text if self.check is None else f"{text}; {self.check}")


def can_occlude(explainer: Explainer, options: Sequence[ExplainOptions]) -> bool:
    try:
        for each in options:
            check_can_occlude(explainer, each)
    except ConfigError:
        return False
    return all(each.method != "heads" for each in options)


def check_can_occlude(explainer: Explainer, options: ExplainOptions) -> None:
    """Refuse an occlusion check without a single attention map and a class."""
    if explainer.no_maps_reason:
        raise ConfigError(f"`check` needs attention maps, and there are none: {explainer.no_maps_reason}")
    if options.method == "norms":
        raise ConfigError("`check` with `method` norms, which is not attention; use another method")
    if "all" in (options.layer, options.head):
        raise ConfigError("`check` of all layers or heads; choose one `layer` and one `head`")
    if not explainer.loaded.classes:
        raise ConfigError("`check` needs a model with classes; this one has no head")


def check_by_occlusion(explainer: Explainer, image: Any, explanation: Explanation) -> OcclusionCheck:
    """Class probability of an explained image without its most and its least attended patches."""
    explained = explanation.explained_class
    if explained is None:
        raise ConfigError("`check` needs a model with classes; this one has no head")
    pixels = explainer.loaded.make_batch([image])
    classes = torch.tensor([explained.index], device=pixels.device)
    most, least = (
        probabilities_without_patches(
            explainer.model, pixels, explanation.map[None], classes, [REMOVED_SHARE], most=most
        ).item()
        for most in (True, False)
    )
    return OcclusionCheck(explained.probability, most, least)


def explain_files(
    explainer: Explainer,
    images: Sequence[ImageItem],
    options: Sequence[ExplainOptions],
    out: FigureFolder,
    *,
    check: bool = False,
    on_error: Callable[[DataError], object] = lambda _: None,
    progress: Callable[[int], object] = lambda _: None,
) -> Iterator[ExplainedImage]:
    """Write a figure per image and method to `out`; an image that cannot be read is passed to `on_error` and skipped.

    `options` have been resolved by the explainer.
    """
    if check:
        for each in options:
            check_can_occlude(explainer, each)
    taken = set[str]()
    names = [reserve_unique_name(figure_name(each.name, how.method), taken) for each in images for how in options]
    out.prepare(names)
    taken.clear()
    for each in images:
        try:
            image = open_image(each.source)
            explanations = [explainer.explain_resolved(image, how, each.name) for how in options]
        except DataError as error:
            on_error(error)
        else:
            for explanation in explanations:
                found = check_by_occlusion(explainer, image, explanation) if check else None
                figure = explanation.figure.with_unique_name(taken)
                if found is not None:
                    figure = replace(figure, caption=f"{figure.caption} {found.sentence}")
                yield ExplainedImage(explanation, out.save(figure), found)
        progress(1)


def explain_arguments(
    explainer: Explainer,
    arguments: Sequence[str],
    options: Sequence[ExplainOptions],
    out: FigureFolder,
    *,
    with_components: bool = False,
    stdin: BinaryIO | None = None,
    check: bool = False,
    on_explained: Callable[[object], object],
    on_note: Callable[[str], object],
    on_error: Callable[[DataError], object],
    progress: Callable[[int], AbstractContextManager[Callable[[int], object]]],
) -> ExplainResult:
    """`explain_files` for the images that arguments name: files, folders, patterns, `-` for `stdin`.

    `with_components` adds the figure of the principal components, of all images together. What cannot be read is
    passed to `on_error` and skipped, and is an error in the result; if it is the only image, it is an error at once.
    """
    found, report = open_arguments(arguments, stdin, on_error), list[dict[str, Any]]()
    if with_components:
        refuse_existing_outputs(out.list_paths([name_set_figure(found.images, "pca")]), overwrite=out.overwrite)
    with progress(found.bar_length) as advance:
        for each in explain_files(
            explainer,
            found.images,
            options,
            out,
            check=check,
            on_error=found.skip,
            progress=advance,
        ):
            if each.explanation.is_empty:
                on_note(f"{each.explanation.name}: {EMPTY_MAP_NOTE}{'; a check means nothing' * check}")
            report.append(each.to_json())
            on_explained(each)
    if with_components and report:
        explained = {each["image"] for each in report}
        shown = [each for each in found.images if each.name in explained]
        try:
            figure = write_components(explainer.loaded, shown, out)
        except ConfigError as error:  # too few patches
            on_note(f"no principal components: {error}")
        else:
            report.append(figure.to_json())
            on_explained(figure)
    out.finish()
    return ExplainResult(report, found.make_error(out.path if report else None))
