"""The settings of augmentation: training images, and views for self-supervision. Everything is off by default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.base.errors import ConfigError
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, SHARE, check_fields

MAX_HUE = 0.5  # half a turn of the color circle
MAX_LEVEL = 255  # of a pixel


def field_with_help(default: Any, text: str, limits: Mapping[str, bool] | None = None) -> Any:
    """A dataclass field with its limits and its help text."""
    return field(default=default, metadata={"help": text, **(limits or {})})


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training images; with the defaults they are preprocessed as in evaluation."""

    crop: Literal["center", "resized", "shift"] = field_with_help(
        "center", "Crop: center (as in evaluation), resized (RandomResizedCrop) or shift."
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
        "none", "Policy: none, rand (RandAugment), auto (AutoAugment) or three (gray, solarize or blur)."
    )
    magnitude: float = field_with_help(9.0, "For policy rand: magnitude of the operations, 0 to 10.", MAY_BE_ZERO)
    magnitude_std: float = field_with_help(0.5, "For policy rand: standard deviation of the magnitude.", MAY_BE_ZERO)
    operations: int = field_with_help(2, "For policy rand: operations per image.", MAY_BE_ZERO)
    jitter: float = field_with_help(0.0, "Strength of color jitter (brightness, contrast, saturation).", MAY_BE_ZERO)
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


@dataclass(frozen=True, kw_only=True)
class ViewAugmentation:
    """Random resized crop, flip, color jitter, gray, blur and solarize, in this order; colors are off by default.

    SimCLR (https://arxiv.org/abs/2002.05709) jitters with strengths 0.8, 0.8, 0.8 and 0.2; BYOL
    (https://arxiv.org/abs/2006.07733) and DINO (https://arxiv.org/abs/2104.14294) with 0.4, 0.4, 0.2 and 0.1; all with
    rate 0.8, and gray with rate 0.2.
    """

    area: tuple[float, ...] = field_with_help((0.08, 1.0), "Smallest and largest share of the image area in a crop.")
    aspect: tuple[float, ...] = field_with_help((3 / 4, 4 / 3), "Smallest and largest ratio of width to height.")
    flip: float = field_with_help(0.5, "Probability of a horizontal flip.", SHARE)
    jitter_rate: float = field_with_help(0.8, "Probability of color jitter, in random order.", SHARE)
    brightness: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    contrast: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    saturation: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    hue: float = field_with_help(0.0, "Jitter: shifts within ± this share of the color circle.", MAY_BE_ZERO)
    gray_rate: float = field_with_help(0.0, "Probability of a gray image.", SHARE)
    blur_rate: float = field_with_help(0.0, "Probability of a Gaussian blur.", SHARE)
    blur_sigma: tuple[float, ...] = field_with_help((0.1, 2.0), "Smallest and largest sigma of the blur, in pixels.")
    blur_kernel: float = field_with_help(0.1, "Size of the kernel of the blur, as a share of the shorter side.", SHARE)
    solarize_rate: float = field_with_help(0.0, "Probability of solarizing, which inverts bright values.", SHARE)
    solarize_threshold: int = field_with_help(128, "Smallest value that is inverted, 0 to 255.", MAY_BE_ZERO)

    def __post_init__(self) -> None:
        check_fields(self)
        check_crop_limits(self.area, self.aspect)
        if len(self.blur_sigma) != 2 or self.blur_sigma[0] > self.blur_sigma[1]:
            raise ConfigError(f"blur_sigma is {self.blur_sigma}; expected two numbers, the smaller one first")
        if self.hue > MAX_HUE:
            raise ConfigError(f"hue is {self.hue}; expected 0 to {MAX_HUE}")
        if self.solarize_threshold > MAX_LEVEL:
            raise ConfigError(f"solarize_threshold is {self.solarize_threshold}; expected 0 to {MAX_LEVEL}")

    @property
    def jitter_strengths(self) -> tuple[float, float, float, float]:
        return self.brightness, self.contrast, self.saturation, self.hue
