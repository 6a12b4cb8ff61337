"""The layers of the Transformer's encoder and decoder (Vaswani 2017, section 3.1), post-norm as published or pre-norm.

Post-norm: x ← LN(x + sublayer(x)). Pre-norm: x ← x + sublayer(LN(x)), which trains without a warm-up.
B batch, N source tokens, M target tokens, D width.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from vitrail.models.text.attention import CrossAttention, Score, TextSelfAttention
from vitrail.models.text.token_embedding import OutputLayer, SequencePositions, TokenEmbedding

NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What all layers of a stack have in common."""

    width: int
    heads: int
    key_width: int  # of one head
    value_width: int
    mlp_width: int
    pre_norm: bool
    activation: Literal["relu", "gelu"] = "relu"
    score: Score = "scaled_dot"
    attention_bias: bool = True
    dropout: float = 0.0  # of the output of each sublayer
    attention_dropout: float = 0.0  # of the attention weights
    mlp_dropout: float = 0.0  # of the hidden layer of the MLP

    def make_norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.width, NORM_EPS)

    def make_final_norm(self) -> nn.Module:
        """After a stack: the last pre-norm layer leaves its sum unnormalized, a post-norm layer does not."""
        return self.make_norm() if self.pre_norm else nn.Identity()

    def make_self_attention(self, *, causal: bool) -> TextSelfAttention:
        return TextSelfAttention(
            self.width,
            self.heads,
            self.key_width,
            self.value_width,
            causal=causal,
            score=self.score,
            bias=self.attention_bias,
            dropout=self.attention_dropout,
        )

    def make_cross_attention(self, memory_width: int) -> CrossAttention:
        return CrossAttention(
            self.width,
            self.heads,
            self.key_width,
            self.value_width,
            memory_width=memory_width,
            score=self.score,
            bias=self.attention_bias,
            dropout=self.attention_dropout,
        )

    def make_mlp(self) -> "TextMlp":
        return TextMlp(self.width, self.mlp_width, self.activation, self.mlp_dropout)


class TextMlp(nn.Module):
    """max(0, x·W1 + b1)·W2 + b2, eq. 2, for each token separately: (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, hidden: int, activation: Literal["relu", "gelu"], dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.ReLU() if activation == "relu" else nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class EncoderLayer(nn.Module):
    """Self-attention and an MLP: (B, N, D) → (B, N, D)."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.pre_norm = sizes.pre_norm
        self.attn, self.norm1 = sizes.make_self_attention(causal=False), sizes.make_norm()
        self.mlp, self.norm2 = sizes.make_mlp(), sizes.make_norm()
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.pre_norm:
            x = x + self.drop(self.attn(self.norm1(x), mask))
            return x + self.drop(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop(self.attn(x, mask)))
        return self.norm2(x + self.drop(self.mlp(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the memory, and an MLP: (B, M, D) → (B, M, D).

    `memory` has its keys and values, from `cross.project_memory`.
    """

    def __init__(self, sizes: LayerSizes, memory_width: int) -> None:
        super().__init__()
        self.pre_norm = sizes.pre_norm
        self.attn, self.norm1 = sizes.make_self_attention(causal=True), sizes.make_norm()
        self.cross, self.norm2 = sizes.make_cross_attention(memory_width), sizes.make_norm()
        self.mlp, self.norm3 = sizes.make_mlp(), sizes.make_norm()
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        if self.pre_norm:
            x = x + self.drop(self.attn(self.norm1(x)))
            x = x + self.drop(self.cross(self.norm2(x), memory, mask))
            return x + self.drop(self.mlp(self.norm3(x)))
        x = self.norm1(x + self.drop(self.attn(x)))
        x = self.norm2(x + self.drop(self.cross(x, memory, mask)))
        return self.norm3(x + self.drop(self.mlp(x)))


@dataclass(frozen=True, kw_only=True)
class TransformerParts:
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
