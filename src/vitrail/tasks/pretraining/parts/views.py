"""The random views of SimCLR, BYOL and DINO, and what the tasks on two views of every image share."""

from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment.config import MAX_HUE, ViewAugmentation
from vitrail.distributed import Ranks
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.task_settings import TwoViewSettings, ViewSettings
from vitrail.tasks.pretraining.pretraining import Pretraining
from vitrail.tasks.task import Source

Strengths = tuple[float, float, float, float]  # of brightness, contrast, saturation and hue


def make_view_augmentation(
    settings: ViewSettings, strengths: Strengths, *, area: tuple[float, ...], blur: float, solarize: float = 0.0
) -> ViewAugmentation:
    """A view with the color jitter of a paper, whose strengths are multiplied by `jitter` of the recipe."""
    brightness, contrast, saturation, hue = (settings.jitter * each for each in strengths)
    if hue > MAX_HUE:
        raise ConfigError(
            f"`jitter` is {settings.jitter:g}, which shifts the hue by {hue:g} of a turn; "
            f"use {MAX_HUE / strengths[3]:g} or less",
            fields=("jitter",),
        )
    return ViewAugmentation(
        area=area,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue,
        gray_rate=settings.gray,
        blur_rate=blur,
        solarize_rate=solarize,
    )


def check_view_size(model: Any, name: str, size: int | None) -> None:
    """Raise an error if the model does not take views of the size that the setting `name` has."""
    own, kind = pair(model.config.image_size), type(model).__name__
    if size is None or (size, size) == own:
        return
    if not isinstance(model, ImageModel) or model.sizes.multiple is None:
        raise ConfigError(
            f"`{name}` is {size}, but this {kind} takes only images of {own[0]}×{own[1]} pixels; use a dynamic model: "
            f"`fields` dynamic=true, or views of its size",
            fields=(name, "fields"),
        )
    multiple = model.sizes.multiple
    least = max(*multiple, *model.sizes.minimum)
    if size % multiple[0] or size % multiple[1] or size < least:
        raise ConfigError(
            f"`{name}` is {size}; expected a multiple of {max(multiple)} for this {kind}, at least {least}",
            fields=(name,),
        )


class TwoViewTask(Pretraining):
    """A task that compares two views of every image, with batch norm in its projector."""

    def __init__(self, backbone: Any, settings: TwoViewSettings) -> None:
        super().__init__()
        self.backbone, self.two_views = backbone, settings

    @property
    def feature_width(self) -> int:
        return self.backbone.feature_width

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        check_view_size(self.backbone, "view_size", self.two_views.view_size)
        super().check(source, recipe, ranks)
        if recipe.loop.batch == 1:
            raise ConfigError(
                f"`batch` is 1; expected 2 or more, for the negatives and batch norms of {type(self).__name__}",
                fields=("batch",),
            )
