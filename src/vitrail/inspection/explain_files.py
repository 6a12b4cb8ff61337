"""Explain images and write their figures; optionally check by occlusion whether each map means anything."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.data.decoding.rgb_image import open_image
from vitrail.data.image_items import ImageItem
from vitrail.errors import ConfigError, DataError
from vitrail.figures import list_figure_paths, make_unique_name, new_figure
from vitrail.files import check_output_paths, make_writable_folder
from vitrail.inspection.explain import Explainer, Explanation, figure_name
from vitrail.inspection.explain_options import ExplainOptions
from vitrail.inspection.patch_removal import probabilities_without_patches
from vitrail.text import escape_unprintable

REMOVED_SHARE = 0.3  # of the patches, in the occlusion check
CHECK_FIELDS = ("check", "method", "layer", "head")  # options that an error about the check names


@dataclass(frozen=True)
class OcclusionCheck:
    """The probability of the explained class with all patches, and without the 30 % most or least attended ones."""

    as_it_is: float
    without_most: float
    without_least: float

    def __str__(self) -> str:
        return (
            f"without the {REMOVED_SHARE:.0%} most attended patches {self.without_most:.1%}, "
            f"without the {REMOVED_SHARE:.0%} least {self.without_least:.1%}"
        )


@dataclass(frozen=True)
class ExplainedImage:
    """An explanation, the files that it was written to, and its occlusion check."""

    explanation: Explanation
    written: list[Path]
    check: OcclusionCheck | None = None

    def to_json(self) -> dict[str, Any]:
        found = self.explanation
        asked = found.explained_class
        return {
            "image": found.name,
            "method": found.options.method,
            "asked": None if asked is None else {**vars(asked), "name": asked.name},
            "top": [] if found.prediction is None else [vars(each) for each in found.prediction.top],
            "written": list(map(str, self.written)),
            **({} if self.check is None else {"check": vars(self.check)}),
        }

    def __str__(self) -> str:
        asked = self.explanation.explained_class
        predicted = "" if asked is None else f"{asked.name} {asked.probability:.1%}, "
        text = f"{self.explanation.name}: {predicted}{', '.join(map(str, self.written))}"
        return escape_unprintable(text if self.check is None else f"{text}; {self.check}")


def check_can_occlude(explainer: Explainer, options: ExplainOptions) -> None:
    """Refuse an occlusion check where there is no single map of attention, or no class."""
    if explainer.no_maps_reason:
        raise ConfigError(f"`check` needs attention maps, and there are none: {explainer.no_maps_reason}", CHECK_FIELDS)
    if options.method == "norms":
        raise ConfigError("`check` with `method` norms, which is not attention; use another method", CHECK_FIELDS)
    if "all" in (options.layer, options.head):
        raise ConfigError("`check` of all layers or heads; choose one `layer` and one `head`", CHECK_FIELDS)
    if not explainer.viewer.classes:
        raise ConfigError("`check` needs a model with classes; this one has no head", CHECK_FIELDS)


def check_by_occlusion(explainer: Explainer, image: Any, explanation: Explanation) -> OcclusionCheck:
    """Remove the most and the least attended patches of an explained image, and compare the class's probability."""
    asked = explanation.explained_class
    if asked is None:
        raise ConfigError("`check` needs a model with classes; this one has no head", CHECK_FIELDS)
    pixels = explainer.viewer.see([image])
    classes = torch.tensor([asked.index], device=pixels.device)
    most, least = (
        probabilities_without_patches(
            explainer.model, pixels, explanation.map[None], classes, [REMOVED_SHARE], most=most
        ).item()
        for most in (True, False)
    )
    return OcclusionCheck(asked.probability, most, least)


def explain_files(
    explainer: Explainer,
    images: Sequence[ImageItem],
    options: ExplainOptions,
    out: Path,
    *,
    suffixes: Sequence[str] = (".png",),
    arrays: bool = False,
    check: bool = False,
    overwrite: bool = False,
    on_error: Callable[[DataError], object] = lambda _: None,
    progress: Callable[[int], object] = lambda _: None,
) -> Iterator[ExplainedImage]:
    """Write a figure per image to the folder `out`; an image that cannot be read is passed to `on_error` and skipped.

    `options` have been resolved by the explainer.
    """
    if check:
        check_can_occlude(explainer, options)
    taken = set[str]()
    names = [make_unique_name(figure_name(each.name, options.method), taken) for each in images]
    check_output_paths(list_figure_paths(out, names, suffixes, arrays=arrays), overwrite=overwrite)
    make_writable_folder(out)
    new_figure(1, 1)  # needs matplotlib
    taken.clear()
    for each in images:
        try:
            image = open_image(each.source)
            found = explainer.explain_resolved(image, options, each.name)
        except DataError as error:
            on_error(error)
        else:
            written = found.figure.with_unique_name(taken).save(out, suffixes, arrays=arrays)
            yield ExplainedImage(found, written, check_by_occlusion(explainer, image, found) if check else None)
        progress(1)
