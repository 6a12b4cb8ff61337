"""Fields that the configs of several architectures share."""

from dataclasses import dataclass, field

from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size


@dataclass(frozen=True, kw_only=True)
class DropRates:
    dropout: float = field(default=0.0, metadata=RATE)  # of tokens and of what branches add to them
    attention_dropout: float = field(default=0.0, metadata=RATE)  # of attention weights
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DropRates):
    """Of a plain encoder of patches; the defaults are those of ViT-B/16."""

    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 16
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 4·width
