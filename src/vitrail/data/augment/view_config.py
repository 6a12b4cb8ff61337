"""The configuration of views: random crops with changed colours, as in SimCLR, BYOL and DINO."""

from dataclasses import dataclass

from vitrail.data.augment.config import check_crop_limits, field_with_help
from vitrail.models.checks import SHARE, check_fields


@dataclass(frozen=True, kw_only=True)
class ViewAugmentation:
    """A random resized crop and a flip, computed for a batch at once."""

    area: tuple[float, ...] = field_with_help((0.08, 1.0), "Smallest and largest share of the image area in a crop.")
    aspect: tuple[float, ...] = field_with_help((3 / 4, 4 / 3), "Smallest and largest ratio of width to height.")
    flip: float = field_with_help(0.5, "Probability of a horizontal flip.", SHARE)

    def __post_init__(self) -> None:
        check_fields(self)
        check_crop_limits(self.area, self.aspect)
