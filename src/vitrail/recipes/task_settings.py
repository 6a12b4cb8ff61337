"""Settings of each task: `task` in a recipe, options of `vitrail pretrain TASK` and of `vitrail train`.

The defaults of pre-training are those of the papers. Importing this never imports torch.
"""

from dataclasses import dataclass
from typing import Literal

from vitrail.base.errors import ConfigError
from vitrail.data.images.augment.config import field_with_help
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, SHARE, check_fields
from vitrail.recipes.schedule import Schedule

TEACHER_MOMENTUM = Schedule(start=0.996, end=1.0)
CONSTANT_TEACHER_TEMPERATURE = Schedule(start=0.04)
MIN_TEMPERATURE = 1e-3
TASKS_WITH_VIEWS = ("simclr", "byol", "dino", "esvit")  # their views replace the augmentation of the recipe


@dataclass(frozen=True, kw_only=True)
class CheckedSettings:
    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if isinstance(value, Schedule):
                check_schedule(name, value)


def check_schedule(name: str, schedule: Schedule) -> None:
    """Raise an error if a momentum leaves 0 to 1, or if a temperature is ever so low that the softmax overflows."""
    values = [schedule.start, *([schedule.end] if schedule.end is not None else [])]
    values += [schedule.warmup_start] if schedule.warmup else []
    for value in values:
        if name.endswith("_momentum") and not 0 <= value <= 1:
            raise ConfigError(f"`{name}` has the value {value:g}; expected values from 0 to 1")
        if name.endswith("_temperature") and value < MIN_TEMPERATURE:
            raise ConfigError(
                f"`{name}` has the value {value:g}; expected at least {MIN_TEMPERATURE:g}, also at the start of a "
                "warm-up"
            )


@dataclass(frozen=True, kw_only=True)
class MaeSettings(CheckedSettings):
    """Masked autoencoder (He 2021): an encoder of the visible patches, and a small decoder that predicts the others."""

    mask_ratio: float = field_with_help(0.75, "Share of the patches that are hidden.", RATE)
    decoder_width: int = field_with_help(512, "Width of the decoder.")
    decoder_depth: int = field_with_help(8, "Blocks of the decoder.")
    decoder_heads: int = field_with_help(16, "Attention heads of the decoder.")
    normalize_pixels: bool = field_with_help(True, "Predict pixels normalized per patch (norm_pix_loss).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_width % 4 or self.decoder_width % self.decoder_heads:
            raise ConfigError(
                f"`decoder_width` is {self.decoder_width}; expected a multiple of 4, for its positions, and of "
                f"`decoder_heads`, {self.decoder_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class SimMimSettings(CheckedSettings):
    """SimMIM (Xie 2021): masked squares, predicted by one linear layer."""

    mask_ratio: float = field_with_help(0.6, "Share of the squares that are hidden.", RATE)
    mask_size: int = field_with_help(32, "Side of a masked square in pixels, a multiple of the patch size.")


@dataclass(frozen=True, kw_only=True)
class MppSettings(CheckedSettings):
    """Masked patch prediction (Dosovitskiy 2020, appendix B.1.2)."""

    target: Literal["mean_color", "small_patch", "pixels"] = field_with_help(
        "mean_color",
        "What is predicted: the patch's mean color in 3 bits per channel, 4×4 such colors, or all its pixels.",
    )
    corrupt_ratio: float = field_with_help(0.5, "Share of the patches that are corrupted and predicted.", SHARE)
    mask_share: float = field_with_help(0.8, "Share of the corrupted patches that become the mask token.", SHARE)
    swap_share: float = field_with_help(
        0.1, "Share of the corrupted patches that become another patch of the image; the rest stays.", SHARE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_share + self.swap_share > 1:
            raise ConfigError(
                f"`mask_share` {self.mask_share:g} and `swap_share` {self.swap_share:g}; expected a sum of at most 1",
                fields=("mask_share", "swap_share"),
            )


@dataclass(frozen=True, kw_only=True)
class ViewSettings(CheckedSettings):
    """The colors of random views."""

    jitter: float = field_with_help(1.0, "Strength of the color jitter, relative to the paper's.", MAY_BE_ZERO)
    gray: float = field_with_help(0.2, "Probability of a gray view.", SHARE)


@dataclass(frozen=True, kw_only=True)
class TwoViewSettings(ViewSettings):
    """How two views of an image are made."""

    view_size: int | None = field_with_help(None, "Size of the views in pixels; none is the model's size.")
    area: tuple[float, ...] = field_with_help((0.08, 1.0), "Smallest and largest share of the image area in a view.")


@dataclass(frozen=True, kw_only=True)
class SimClrSettings(TwoViewSettings):
    """SimCLR (Chen 2020): find the other view of an image among all views of the batch."""

    blur: float = field_with_help(0.5, "Probability of a blurred view.", SHARE)
    loss_temperature: float = field_with_help(0.1, "Temperature of the loss (NT-Xent).")
    projector_depth: int = field_with_help(3, "Layers of the projector.")
    projector_width: int | None = field_with_help(None, "Width of its hidden layers; none is that of the model.")
    projection_width: int = field_with_help(128, "Width of its output.")


@dataclass(frozen=True, kw_only=True)
class ByolSettings(TwoViewSettings):
    """BYOL (Grill 2020): predict a momentum teacher's projection of the other view."""

    blur: float = field_with_help(
        1.0, "Probability of a blurred view, relative to the paper's: 1 of the first view, 0.1 of the second.", SHARE
    )
    solarize: float = field_with_help(0.2, "Probability that the second view is solarized.", SHARE)
    projector_width: int = field_with_help(4096, "Width of the hidden layer of projector and predictor.")
    projection_width: int = field_with_help(256, "Width of their output.")
    teacher_momentum: Schedule = field_with_help(  # noqa: RUF009  # immutable
        TEACHER_MOMENTUM, "Momentum of the teacher, the moving average of the model."
    )


@dataclass(frozen=True, kw_only=True)
class DinoSettings(ViewSettings):
    """DINO (Caron 2021): predict a momentum teacher's distribution over prototypes, from other crops."""

    global_area: tuple[float, ...] = field_with_help((0.4, 1.0), "Smallest and largest area of a global crop.")
    local_area: tuple[float, ...] = field_with_help((0.05, 0.4), "Smallest and largest area of a local crop.")
    global_size: int | None = field_with_help(None, "Size of global crops in pixels; none is the model's size.")
    local_size: int = field_with_help(96, "Size of local crops in pixels.")
    local_crops: int = field_with_help(8, "Local crops per image; 0 disables multi-crop.", MAY_BE_ZERO)
    blur: float = field_with_help(
        1.0,
        "Probability of a blurred crop, relative to the paper's: 1 and 0.1 of the global crops, 0.5 of the local.",
        SHARE,
    )
    solarize: float = field_with_help(0.2, "Probability that the second global crop is solarized.", SHARE)
    prototypes: int = field_with_help(65536, "Outputs of the head.")
    head_width: int = field_with_help(2048, "Width of the hidden layers of the head.")
    bottleneck_width: int = field_with_help(256, "Width before the prototypes.")
    student_temperature: float = field_with_help(0.1, "Temperature of the student.")
    teacher_temperature: Schedule = field_with_help(  # noqa: RUF009  # immutable
        CONSTANT_TEACHER_TEMPERATURE, "Temperature of the teacher, which may have a warm-up by epoch."
    )
    teacher_momentum: Schedule = field_with_help(  # noqa: RUF009  # immutable
        TEACHER_MOMENTUM, "Momentum of the teacher, the moving average of the model."
    )
    center_momentum: float = field_with_help(0.9, "Momentum of the center; 1 disables centering.", SHARE)
    frozen_epochs: float = field_with_help(1.0, "First epochs in which the last layer is frozen.", MAY_BE_ZERO)
    clip_each: float = field_with_help(3.0, "Clip the gradient of each weight tensor; 0 disables it.", MAY_BE_ZERO)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prototypes < 2:
            raise ConfigError(f"`prototypes` is {self.prototypes}; expected 2 or more, to tell images apart")


@dataclass(frozen=True, kw_only=True)
class EsvitSettings(DinoSettings):
    """EsViT (Li 2021): DINO for crops, and in addition for pairs of patches that match."""

    region_weight: float = field_with_help(0.5, "Share of the region loss; the view loss has the rest.", SHARE)


@dataclass(frozen=True, kw_only=True)
class AimSettings(CheckedSettings):
    """AIM (El-Nouby 2024): predict the pixels of each patch from the patches before it."""

    normalize_pixels: bool = field_with_help(True, "Predict pixels normalized per patch.")
    prefix_attention: bool = field_with_help(
        True, "Let the patches of a random first part attend to each other, and predict the others."
    )
    head_depth: int = field_with_help(12, "MLP blocks of the head, which is not part of the model.")
    head_width: int = field_with_help(2048, "Width of the head.")


@dataclass(frozen=True, kw_only=True)
class IgptSettings(CheckedSettings):
    """Image GPT (Chen 2020): predict each pixel's palette color from the pixels before it."""

    objective: Literal["autoregressive", "bert"] = field_with_help(
        "autoregressive", "Predict the next pixel, or masked pixels as in BERT."
    )
    mask_ratio: float = field_with_help(0.15, "For objective bert: share of the pixels that are masked.", RATE)


SETTINGS: dict[str, type[CheckedSettings]] = {  # by the name of the task
    "mae": MaeSettings,
    "simmim": SimMimSettings,
    "mpp": MppSettings,
    "simclr": SimClrSettings,
    "byol": ByolSettings,
    "dino": DinoSettings,
    "esvit": EsvitSettings,
    "aim": AimSettings,
    "igpt": IgptSettings,
}


@dataclass(frozen=True, kw_only=True)
class TranslationSettings(CheckedSettings):
    """Translation: predict each target token from the source and the target tokens before it."""

    batch_tokens: int = field_with_help(
        1000, "Source and target tokens per step, about; batch limits the number of sentences."
    )
    tokenizer: str = field_with_help(
        "bpe", "Tokenizer: bpe or wordpiece is trained on the training pairs; or a tokenizer.json or BERT's vocab.txt."
    )
    vocabulary: int = field_with_help(4000, "Tokens of a tokenizer that is trained, for both languages together.")
    max_length: int = field_with_help(100, "Leave out training pairs with more tokens than this on one side.")
    bleu_sentences: int = field_with_help(
        200, "Validation sentences to translate at the end of a run, for BLEU and chrF; 0 disables it.", MAY_BE_ZERO
    )


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(CheckedSettings):
    """Captions: describe an image, word by word."""

    freeze_encoder: bool = field_with_help(
        False, "Train only the decoder; the image model, whose tokens it reads, keeps its weights."
    )
    cache_features: bool = field_with_help(
        True,
        "Compute the tokens of a frozen encoder once per image and keep them on disk, in float32; only without random "
        "augmentation.",
    )
    decoder: str = field_with_help("caption_cpu", "Decoder: a preset without an encoder.")
    decoder_width: int | None = field_with_help(None, "Width of the decoder.")
    decoder_depth: int | None = field_with_help(None, "Layers of the decoder.")
    decoder_heads: int | None = field_with_help(None, "Attention heads of the decoder.")
    decoder_mlp_width: int | None = field_with_help(None, "Hidden width of the MLPs of the decoder.")
    decoder_dropout: float | None = field_with_help(None, "Dropout of the decoder.", RATE)
    tokenizer: str = field_with_help(
        "bpe", "Tokenizer: bpe or wordpiece is trained on the training captions; or a tokenizer.json or vocab.txt."
    )
    vocabulary: int = field_with_help(4000, "Tokens of a tokenizer that is trained, at most.")
    max_length: int = field_with_help(60, "Leave out training captions with more tokens; the longest caption written.")
    scored_images: int = field_with_help(
        500,
        "Validation images to describe at the end of a run, for exact matches and BLEU; 0 disables it.",
        MAY_BE_ZERO,
    )

    @property
    def decoder_fields(self) -> dict[str, int | float]:
        """The fields of the decoder's config that are set."""
        fields = {
            "width": self.decoder_width,
            "decoder_depth": self.decoder_depth,
            "heads": self.decoder_heads,
            "mlp_width": self.decoder_mlp_width,
            "dropout": self.decoder_dropout,
        }
        return {name: value for name, value in fields.items() if value is not None}
