"""What training does to its pictures, as a configuration: by default nothing, and each thing by its own switch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.errors import ConfigError
from vitrail.models.checks import MAY_BE_ZERO, RATE, SHARE, check_fields


def field_with_help(default: Any, text: str, limits: Mapping[str, bool] | None = None) -> Any:
    """A field with its limits, and the line by which the command line explains it."""
    return field(default=default, metadata={"help": text, **(limits or {})})


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How a training picture differs from view to view; the defaults show it as evaluation does."""

    crop: Literal["centre", "resized", "shift"] = field_with_help(
        "centre", "the part shown: centre as in evaluation, resized (a random part at random zoom), or shift"
    )
    area: tuple[float, ...] = field_with_help(
        (0.08, 1.0), "of resized: the smallest and the largest share of the picture"
    )
    aspect: tuple[float, ...] = field_with_help(
        (3 / 4, 4 / 3), "of resized: the smallest and the largest width to height"
    )
    shift: int = field_with_help(4, "of shift: the evaluation picture moves by at most so many pixels", MAY_BE_ZERO)
    flip: float = field_with_help(0.0, "rate of pictures mirrored left to right", SHARE)
    policy: Literal["none", "rand", "auto", "three"] = field_with_help(
        "none", "rand (RandAugment), auto (AutoAugment for ImageNet) or three (grey, solarized or blurred)"
    )
    magnitude: float = field_with_help(9.0, "of rand: how strong, from 0 to 10", MAY_BE_ZERO)
    magnitude_std: float = field_with_help(0.5, "of rand: how much the magnitude varies", MAY_BE_ZERO)
    operations: int = field_with_help(2, "of rand: how many operations in a row", MAY_BE_ZERO)
    jitter: float = field_with_help(0.0, "strength by which brightness, contrast and saturation vary", MAY_BE_ZERO)
    erase: float = field_with_help(0.0, "rate of pictures that lose a rectangle to noise (random erasing)", SHARE)
    mixup: float = field_with_help(0.0, "alpha of Mixup, two pictures blended; 0 is off", MAY_BE_ZERO)
    cutmix: float = field_with_help(0.0, "alpha of CutMix, a rectangle of another picture; 0 is off", MAY_BE_ZERO)
    repeats: int = field_with_help(1, "views of each picture in a batch (repeated augmentation)")
    smoothing: float = field_with_help(0.0, "share of the target that is spread over all classes", RATE)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("area", "aspect"):
            limits = getattr(self, name)
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ConfigError(f"{name} is {limits}; expected two numbers, the smaller first")
        if self.area[1] > 1:
            raise ConfigError(f"area is {self.area}; expected shares of the picture, at most 1")
        if self.magnitude > 10:
            raise ConfigError(f"magnitude is {self.magnitude}; expected 0 to 10")
