"""The configuration of views: random crops with changed colours, as in SimCLR, BYOL and DINO."""

from dataclasses import dataclass

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment.config import check_crop_limits, field_with_help
from vitrail.models.base.checks import MAY_BE_ZERO, SHARE, check_fields

MAX_HUE = 0.5  # half a turn of the colour circle
MAX_LEVEL = 255  # of a pixel


@dataclass(frozen=True, kw_only=True)
class ViewAugmentation:
    """Random resized crop, flip, colour jitter, grey, blur and solarize, in this order; colours are off by default.

    SimCLR (https://arxiv.org/abs/2002.05709) jitters with strengths 0.8, 0.8, 0.8 and 0.2; BYOL
    (https://arxiv.org/abs/2006.07733) and DINO (https://arxiv.org/abs/2104.14294) with 0.4, 0.4, 0.2 and 0.1; all with
    rate 0.8, and grey with rate 0.2.
    """

    area: tuple[float, ...] = field_with_help((0.08, 1.0), "Smallest and largest share of the image area in a crop.")
    aspect: tuple[float, ...] = field_with_help((3 / 4, 4 / 3), "Smallest and largest ratio of width to height.")
    flip: float = field_with_help(0.5, "Probability of a horizontal flip.", SHARE)
    jitter_rate: float = field_with_help(0.8, "Probability of colour jitter, in random order.", SHARE)
    brightness: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    contrast: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    saturation: float = field_with_help(0.0, "Jitter: factors within 1 ± this value.", MAY_BE_ZERO)
    hue: float = field_with_help(0.0, "Jitter: shifts within ± this share of the colour circle.", MAY_BE_ZERO)
    grey_rate: float = field_with_help(0.0, "Probability of a grey image.", SHARE)
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
