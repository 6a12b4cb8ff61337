"""What tasks on two views of every image share: how views are made, and what they need of model and batch."""

from typing import Any

from vitrail.data.augment.view_config import MAX_HUE, ViewAugmentation
from vitrail.distributed import Ranks
from vitrail.errors import ConfigError
from vitrail.models.checks import pair
from vitrail.models.contract import ImageModel
from vitrail.recipes.pretraining_settings import TwoViewSettings
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.pretraining.pretraining import Pretraining
from vitrail.tasks.task import Source

Strengths = tuple[float, float, float, float]  # of brightness, contrast, saturation and hue


class TwoViewTask(Pretraining):
    """A task that compares two views of every image, with batch norm in its projector."""

    def __init__(self, backbone: Any, settings: TwoViewSettings) -> None:
        super().__init__()
        self.backbone, self.two_views = backbone, settings

    @property
    def feature_width(self) -> int:
        return self.backbone.levels[-1].width

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        check_view_size(self.backbone, self.two_views.view_size)
        super().check(source, recipe, ranks)
        if recipe.loop.batch == 1:
            raise ConfigError(
                f"`batch` is 1; expected 2 or more, since {type(self).__name__} compares each image with the others of "
                "its batch"
            )


def make_view_augmentation(
    settings: TwoViewSettings, strengths: Strengths, *, blur: float, solarize: float = 0.0
) -> ViewAugmentation:
    """The views of a paper: its strengths of the colour jitter, times the recipe's."""
    brightness, contrast, saturation, hue = (settings.jitter * each for each in strengths)
    if hue > MAX_HUE:
        raise ConfigError(
            f"`jitter` is {settings.jitter:g}, which shifts the hue by {hue:g} of a turn; "
            f"use {MAX_HUE / strengths[3]:g} or less",
            fields=("jitter",),
        )
    return ViewAugmentation(
        area=settings.area,
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue,
        grey_rate=settings.grey,
        blur_rate=blur,
        solarize_rate=solarize,
    )


def check_view_size(model: Any, size: int | None) -> None:
    """Raise an error if the model does not take views of this size."""
    own = pair(model.config.image_size)
    if size is None or own == (size, size):
        return
    multiple = model.sizes.multiple if isinstance(model, ImageModel) else None
    if multiple is None:
        raise ConfigError(
            f"`view_size` is {size}, but the model takes {own[0]}×{own[1]} pixels; use none, or a dynamic model: "
            "`fields` dynamic=true",
            fields=("view_size",),
        )
    if size % multiple[0] or size % multiple[1]:
        raise ConfigError(
            f"`view_size` is {size}; expected a multiple of {multiple[0]}×{multiple[1]} pixels, the model's patch",
            fields=("view_size",),
        )
