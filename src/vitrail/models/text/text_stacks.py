"""The parts of a Transformer that reads and writes text, for exports to other software."""

from dataclasses import dataclass

from torch import nn

from vitrail.models.text.text_layers import DecoderLayer, EncoderLayer, LayerSizes
from vitrail.models.text.token_embedding import OutputLayer, SequencePositions, TokenEmbedding


@dataclass(frozen=True, kw_only=True)
class TextStacks:
    """An encoder and a decoder of `EncoderLayer` and `DecoderLayer`, and what is around them."""

    sizes: LayerSizes
    source_embed: TokenEmbedding
    source_positions: SequencePositions
    encoder: tuple[EncoderLayer, ...]
    encoder_norm: nn.Module  # after the stack; an identity after post-norm layers
    target_embed: TokenEmbedding
    target_positions: SequencePositions
    decoder: tuple[DecoderLayer, ...]
    decoder_norm: nn.Module
    output: OutputLayer
