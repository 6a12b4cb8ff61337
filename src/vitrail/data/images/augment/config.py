"""The configuration of augmentation. Everything is off by default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.base.errors import ConfigError
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, SHARE, check_fields


def field_with_help(default: Any, text: str, limits: Mapping[str, bool] | None = None) -> Any:
    """A dataclass field with its limits and its help text."""
    return field(default=default, metadata={"help": text, **(limits or {})})


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images; with the defaults they are preprocessed as in evaluation."""

    crop: Literal["centre", "resized", "shift"] = field_with_help(
        "centre", "Crop: centre (as in evaluation), resized (RandomResizedCrop) or shift."
    )
    area: tuple[float, ...] = field_with_help(
        (0.08, 1.0), "For crop resized: smallest and largest share of the image area."
    )
    aspect: tuple[float, ...] = field_with_help(
        (3 / 4, 4 / 3), "For crop resized: smallest and largest ratio of width to height."
    )
    shift: int = field_with_help(4, "For crop shift: largest shift in pixels.", MAY_BE_ZERO)
    flip: float = field_with_help(0.0, "Probability of a horizontal flip.", SHARE)
    policy: Literal["none", "rand", "auto", "three"] = field_with_help(
        "none", "Policy: none, rand (RandAugment), auto (AutoAugment) or three (grey, solarize or blur)."
    )
    magnitude: float = field_with_help(9.0, "For policy rand: magnitude of the operations, 0 to 10.", MAY_BE_ZERO)
    magnitude_std: float = field_with_help(0.5, "For policy rand: standard deviation of the magnitude.", MAY_BE_ZERO)
    operations: int = field_with_help(2, "For policy rand: operations per image.", MAY_BE_ZERO)
    jitter: float = field_with_help(0.0, "Strength of colour jitter (brightness, contrast, saturation).", MAY_BE_ZERO)
    erase: float = field_with_help(0.0, "Probability of random erasing.", SHARE)
    mixup: float = field_with_help(0.0, "Alpha of Mixup; 0 disables it.", MAY_BE_ZERO)
    cutmix: float = field_with_help(0.0, "Alpha of CutMix; 0 disables it.", MAY_BE_ZERO)
    repeats: int = field_with_help(1, "Views of each image per batch (repeated augmentation).")
    smoothing: float = field_with_help(0.0, "Label smoothing.", RATE)

    def __post_init__(self) -> None:
        check_fields(self)
        check_crop_limits(self.area, self.aspect)
        if self.magnitude > 10:
            raise ConfigError(f"magnitude is {self.magnitude}; expected 0 to 10")


def check_crop_limits(area: tuple[float, ...], aspect: tuple[float, ...]) -> None:
    for name, limits in (("area", area), ("aspect", aspect)):
        if len(limits) != 2 or limits[0] > limits[1]:
            raise ConfigError(f"{name} is {limits}; expected two numbers, the smaller one first")
    if area[1] > 1:
        raise ConfigError(f"area is {area}; expected shares of the image, at most 1")
