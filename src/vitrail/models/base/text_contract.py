"""What every model that writes text offers. The decoding in predict/ knows only these methods.

B batch, N source tokens, M target tokens, V vocabulary, D width, L layers, H heads.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.models.base.contract import Model

if TYPE_CHECKING:
    from vitrail.models.text.layers import TransformerParts


@dataclass(frozen=True)
class Memory:
    """What a decoder reads: the encoded source, of words or of the patches of an image."""

    tokens: Tensor  # (B, N, D)
    kept: Tensor | None = None  # bool (B, N), False for padding; None: there is none
    final: tuple[Tensor, ...] = ()  # the last state of a recurrent encoder, handed over to its decoder


class DecodingState(Protocol):
    """The state of a decoder after some tokens of each row: a key/value cache, or the state of a recurrent network."""

    def reorder(self, rows: Tensor) -> Self:
        """The state of these rows, int64 (rows,), in this order: beams, or the sentences that are not finished."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextAttention:
    """Attention probabilities of one pass, whose rows sum to 1; None for a kind that the model does not have."""

    encoder: Tensor | None = None  # (B, L, H, N, N)
    decoder: Tensor | None = None  # (B, L, H, M, M)
    cross: Tensor | None = None  # (B, L, H, M, N): what each target token reads of the source


class TextModel(Model):
    """Source tokens (B, N) and the target tokens so far (B, M) → logits of each next one (B, M, V).

    Padding has the id `config.pad`, at the end of a row only. The tokens of a target start with the start token.
    """

    reads = "text"
    blocks: tuple[str, ...] = ()  # names of its layers in the module, in order; their matrices are for Muon
    length_limit: int | None = None  # the longest source or target in tokens; None: any
    memory_width: int | None = None  # of the tokens that it reads of another model; None: it encodes its own source
    no_maps_reason: str = ""  # why it has no attention to look at; empty if it has

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(self.encode(source), target)

    def encode(self, source: Tensor) -> Memory:
        """Read the source once: (B, N) → memory."""
        raise NotImplementedError

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        """The logits after each target token, all at once, as in training: (B, M) → (B, M, V)."""
        raise NotImplementedError

    def start(self, memory: Memory, length: int) -> Any:
        """The DecodingState before the first token, for at most `length` tokens."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The logits after one more token of each row, and the state with it: (B,) → (B, V).

        The state passed in may be changed: use only the one returned.
        """
        raise NotImplementedError

    def attention_maps(self, memory: Memory, target: Tensor, source: Tensor | None = None) -> TextAttention:
        """The attention of `decode`, and of `encode` if the `source` is given."""
        raise NotImplementedError

    def find_transformer_parts(self) -> "TransformerParts | None":
        """Its encoder and decoder, if they are those of a Transformer, for exports; None if they are not."""
        return None


def check_reads_text(kind: type, name: str) -> None:
    """Refuse a model that does not read text, by its class."""
    if not issubclass(kind, TextModel):
        reads = kind.reads if issubclass(kind, Model) else "something else"
        expected = "a TextModel, which translates" if reads == "text" else "a model that reads text"
        raise ConfigError(f"{name} is a {kind.__name__}, which reads {reads}; expected {expected}")
