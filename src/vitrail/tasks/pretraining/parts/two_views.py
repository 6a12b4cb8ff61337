"""What tasks on two views of every image share: the features that are compared, and what they need of the batch."""

from typing import Any

from vitrail.base.errors import ConfigError
from vitrail.distributed import Ranks
from vitrail.recipes.pretraining_settings import TwoViewSettings
from vitrail.recipes.recipe import Recipe
from vitrail.tasks.pretraining.parts.view_augmentation import check_view_size
from vitrail.tasks.pretraining.pretraining import Pretraining
from vitrail.tasks.task import Source


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
