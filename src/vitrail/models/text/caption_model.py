"""A captioner: an image model reads, and a decoder of text writes what it sees.

The decoder is that of translation; its memory is the tokens of the image instead of those of a sentence.
B batch, N tokens of an image, M target tokens, V vocabulary, D width of the encoder.
"""

from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.models.base.contract import ImageModel, check_reads_images
from vitrail.models.base.text_contract import Memory, TextModel


class CaptionModel(nn.Module):
    """Images (B, C, H, W), captions so far (B, M) → logits of each next token (B, M, V)."""

    def __init__(self, encoder: ImageModel, decoder: TextModel) -> None:
        super().__init__()
        check_parts_fit(encoder, decoder)
        self.encoder, self.decoder = encoder, decoder

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return self.decoder.decode(self.encode(images), target)

    def encode(self, images: Tensor) -> Memory:
        """All tokens of the images, those of prefix tokens first: memory (B, N, D)."""
        return Memory(self.encoder.tokens(images))


def check_parts_fit(encoder: object, decoder: object) -> None:
    """Raise an error if the decoder cannot read the tokens of the encoder."""
    check_reads_images(encoder)
    if not isinstance(encoder, ImageModel):
        raise ConfigError(f"the encoder is a {type(encoder).__name__}; expected an image model with `tokens`")
    if not isinstance(decoder, TextModel) or decoder.memory_width is None:
        raise ConfigError(
            f"the decoder is a {type(decoder).__name__} that does not read another model; expected one without an "
            "encoder, such as caption_cpu"
        )
    width = encoder.levels[-1].width
    if decoder.memory_width != width:
        raise ConfigError(
            f"the decoder reads tokens of width {decoder.memory_width}; expected {width}, the width of the encoder"
        )
