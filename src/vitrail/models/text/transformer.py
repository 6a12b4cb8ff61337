"""The Transformer (Vaswani 2017, "Attention Is All You Need", arXiv 1706.03762): an encoder reads, a decoder writes.

The encoder turns the source into a memory: N vectors, each of which has attended to all others. The decoder predicts
each target token from the memory and the target tokens before it. Without an encoder, the decoder reads the tokens of
another model: the patches of an image, which it describes.
B batch, N source tokens, M target tokens, V vocabulary, D width, L layers, H heads, K and V widths of one head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, check_fields, check_heads
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.base.text_contract import Memory, TextAttention, TextModel
from vitrail.models.text.attention import MultiHeadAttention, Score, collect_weights
from vitrail.models.text.decoder import DecoderState, TextDecoder, make_padding_mask
from vitrail.models.text.layers import DecoderLayer, EncoderLayer, LayerSizes, TransformerParts
from vitrail.models.text.token_embedding import (
    OutputLayer,
    SequencePositions,
    TokenEmbedding,
    check_tokens,
    check_vocabulary,
)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    vocabulary: int = 37_000  # tokens of the target; the paper's joint vocabulary of English and German
    source_vocabulary: int | None = None  # default: the same tokens as the target
    pad: int = field(default=0, metadata=MAY_BE_ZERO)  # the token that fills short sentences up
    width: int = 512  # the paper's d_model
    encoder_depth: int = field(default=6, metadata=MAY_BE_ZERO)  # layers; 0: the decoder reads tokens of another model
    decoder_depth: int = 6
    heads: int = 8  # attention heads
    key_width: int | None = None  # of one head, the paper's d_k; default: width / heads
    value_width: int | None = None  # of one head, the paper's d_v; default: width / heads
    mlp_width: int = 2048  # the paper's d_ff
    memory_width: int | None = None  # of the tokens that a decoder without encoder reads; default: width
    norm: Literal["post", "pre"] = "post"  # after each sum, as published, or before each sublayer
    activation: Literal["relu", "gelu"] = "relu"
    score: Score = "scaled_dot"  # how a query is compared with a key
    positions: Literal["sinusoid", "learned"] = "sinusoid"
    length: int = 1024  # positions: the longest sentence in tokens
    share: Literal["all", "target", "none"] = "all"  # one table for source, target and output; target and output; none
    dropout: float = field(default=0.1, metadata=RATE)  # of every sublayer's output, and of embedding + position
    attention_dropout: float = field(default=0.0, metadata=RATE)  # of the attention weights; not in the paper
    mlp_dropout: float = field(default=0.0, metadata=RATE)  # of the hidden layer of the MLP; not in the paper
    attention_bias: bool = True  # False: no biases in the attention, as in tensor2tensor
    output_bias: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.key_width is None or self.value_width is None:
            check_heads(self.width, self.heads)
        check_vocabulary(self)
        if self.encoder_depth and self.memory_width not in (None, self.width):
            raise ConfigError(
                f"memory_width {self.memory_width} with an encoder of width {self.width}; expected none, or "
                "encoder_depth=0 for a decoder that reads another model"
            )
        if self.positions == "sinusoid" and self.width % 2:
            raise ConfigError(f"width {self.width}; expected an even one for positions 'sinusoid'")

    @property
    def layer_sizes(self) -> LayerSizes:
        return LayerSizes(
            width=self.width,
            heads=self.heads,
            key_width=self.key_width or self.width // self.heads,
            value_width=self.value_width or self.width // self.heads,
            mlp_width=self.mlp_width,
            pre_norm=self.norm == "pre",
            activation=self.activation,
            score=self.score,
            attention_bias=self.attention_bias,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            mlp_dropout=self.mlp_dropout,
        )


class Transformer(TextModel):
    """Source (B, N), target so far (B, M) → logits of each next target token (B, M, V)."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        width, sizes = config.width, config.layer_sizes
        self.length_limit = config.length
        self.memory_width = None if config.encoder_depth else config.memory_width or width
        self.target_embed = TokenEmbedding(config.vocabulary, width, config.pad, scale=math.sqrt(width))
        self.target_positions = SequencePositions(config.positions, config.length, width)
        self.decoder = TextDecoder(config.decoder_depth, sizes, config.memory_width or width)
        self.output = OutputLayer(config.vocabulary, width, own_table=config.share == "none", bias=config.output_bias)
        self.drop = nn.Dropout(config.dropout)

        self.encoder = self.source_positions = self.source_embed = None
        if config.encoder_depth:
            self.encoder = Encoder(config.encoder_depth, sizes)
            self.source_positions = SequencePositions(config.positions, config.length, width)
            if config.share != "all":
                rows = config.source_vocabulary or config.vocabulary
                self.source_embed = TokenEmbedding(rows, width, config.pad, scale=math.sqrt(width))
        self.blocks = (
            *(f"encoder.layers.{layer}" for layer in range(config.encoder_depth)),
            *(f"decoder.layers.{layer}" for layer in range(config.decoder_depth)),
        )
        self.init_weights()

    def draw_weights(self) -> None:
        """Xavier-uniform with q, k and v apart, biases zero, tables N(0, 1/D) with a padding row of zeros."""
        init_layers(self)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention | TokenEmbedding | SequencePositions | OutputLayer):
                module.draw_weights()

    def encode(self, source: Tensor) -> Memory:
        """Read the source once; no token attends to padding: (B, N) → memory (B, N, D)."""
        if self.encoder is None or self.source_positions is None:
            raise ConfigError(
                "this Transformer has no encoder (encoder_depth is 0); expected a Memory of the tokens of another "
                f"model, of width {self.decoder.memory_width}"
            )
        check_tokens(source, "source", self.length_limit)
        kept = source != self.config.pad
        embed = self.target_embed if self.source_embed is None else self.source_embed
        x = self.drop(self.source_positions(embed(source)))
        return Memory(self.encoder(x, make_padding_mask(kept)), kept)

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        """The logits after each target token, from the tokens before it: (B, M) → (B, M, V).

        Padding of the target needs no mask: it is at the end, and tokens attend only to those before them.
        """
        check_tokens(target, "target", self.length_limit)
        x = self.drop(self.target_positions(self.target_embed(target)))
        return self.output(self.decoder(x, memory), self.target_embed)

    def start(self, memory: Memory, length: int) -> DecoderState:
        """The state before the first token: keys and values of the memory, and room for those of `length` tokens."""
        if length > self.config.length:
            raise ConfigError(
                f"a target of {length} tokens; expected at most {self.config.length}, the positions of the model"
            )
        return self.decoder.start(memory, length)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The logits after one more token of each row: (B,) → (B, V). The state grows in place."""
        x = self.target_positions.add_one(self.target_embed(tokens), state.length)
        return self.output(self.decoder.step(x, state), self.target_embed), state

    def attention_maps(self, memory: Memory, target: Tensor, source: Tensor | None = None) -> TextAttention:
        """The attention of all layers and heads, recomputed from what each layer reads in a normal pass."""
        layers: Sequence[Any] = [*self.decoder.layers]
        own, cross = [layer.attn for layer in layers], [layer.cross for layer in layers]
        with collect_weights(own) as decoder_maps, collect_weights(cross) as cross_maps:
            self.decode(memory, target)
        encoder_maps = list[Tensor]()
        if source is not None and self.encoder is not None:
            layers = [*self.encoder.layers]
            with collect_weights([layer.attn for layer in layers]) as encoder_maps:
                self.encode(source)
        return TextAttention(
            encoder=torch.stack(encoder_maps, dim=1) if encoder_maps else None,
            decoder=torch.stack(decoder_maps, dim=1),
            cross=torch.stack(cross_maps, dim=1),
        )

    def find_transformer_parts(self) -> TransformerParts | None:
        """None for a decoder alone."""
        if self.encoder is None or self.source_positions is None:
            return None
        encoder, decoder = self.encoder, self.decoder
        return TransformerParts(
            sizes=self.config.layer_sizes,
            source_embed=self.source_embed or self.target_embed,
            source_positions=self.source_positions,
            encoder=tuple(each for each in encoder.layers if isinstance(each, EncoderLayer)),
            encoder_norm=encoder.norm,
            target_embed=self.target_embed,
            target_positions=self.target_positions,
            decoder=tuple(each for each in decoder.layers if isinstance(each, DecoderLayer)),
            decoder_norm=decoder.norm,
            output=self.output,
        )


class Encoder(nn.Module):
    """Encoder layers, and after pre-norm layers a norm: (B, N, D) → (B, N, D)."""

    def __init__(self, depth: int, sizes: LayerSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(depth))
        self.norm = sizes.make_final_norm()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


BASE = TransformerConfig()
PRESETS = Presets(
    lambda: {
        "transformer_base": BASE,
        "transformer_big": replace(BASE, width=1024, heads=16, mlp_width=4096, dropout=0.3),
        "transformer_tiny": replace(  # Wu 2021, for small data sets
            BASE, vocabulary=10_000, width=128, encoder_depth=4, decoder_depth=4, heads=4, mlp_width=256, dropout=0.3
        ),
        "transformer_cpu": replace(  # ours
            BASE, vocabulary=4_000, width=256, encoder_depth=3, decoder_depth=3, heads=4, mlp_width=512, norm="pre"
        ),
        "caption_cpu": replace(  # ours; reads the patches of a model of the same width, such as ViT-Ti
            BASE, vocabulary=1_000, width=192, encoder_depth=0, decoder_depth=3, heads=3, mlp_width=384, norm="pre"
        ),
    }
)
FAMILY = Family("transformer", TransformerConfig, Transformer, PRESETS)
