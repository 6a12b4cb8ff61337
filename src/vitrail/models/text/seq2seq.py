"""Sequence to sequence with LSTMs: what translated before the Transformer, without and with attention.

none (Sutskever 2014, arXiv 1409.3215): the decoder gets the last state of the encoder, and nothing else.
bahdanau (Bahdanau 2015, arXiv 1409.0473): before each step, the previous state asks what to read of the source.
luong (Luong 2015, arXiv 1508.04025): after each step, the new state asks.
B batch, N source tokens, M target tokens, V vocabulary, E width of embeddings, D width of LSTM states, L layers.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import masked_softmax
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, check_fields, check_used
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.base.text_contract import Memory, TextAttention, TextModel
from vitrail.models.text.token_embedding import OutputLayer, TokenEmbedding, check_tokens, check_vocabulary

RecurrentScore = Literal["dot", "general", "concat"]


class RecurrentAttention(nn.Module):
    """context = Σ_j softmax_j(score(s, h_j))·h_j: state s (B, D), memory h (B, N, D) → context (B, D), weights (B, N).

    dot: s·h (Luong 2015). general: sᵀ·W·h (Luong 2015). concat: vᵀ·tanh(W·s + U·h), the score of Bahdanau 2015, which
    Luong writes as vᵀ·tanh(W·[s; h]). W·h and U·h do not depend on the state: they are computed once, as keys.
    """

    def __init__(self, hidden: int, width: int, score: RecurrentScore) -> None:
        super().__init__()
        additive = score == "concat"
        self.query = nn.Linear(hidden, width, bias=False) if additive else nn.Identity()  # W of concat
        keys = {"dot": 0, "general": hidden, "concat": width}[score]
        self.keys = nn.Linear(hidden, keys, bias=False) if keys else nn.Identity()  # W of general, U of concat
        self.score_vector = nn.Parameter(torch.empty(width)) if additive else None  # v of concat

    def draw_weights(self) -> None:
        """N(0, 1/A) for the vector; the linear maps are initialized with all others."""
        if self.score_vector is not None:
            nn.init.normal_(self.score_vector, std=len(self.score_vector) ** -0.5)

    def forward(self, state: Tensor, keys: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """`keys` are `self.keys(memory)`; the `mask` (B, N) is True, or 0, for what is not padding."""
        query = self.query(state)
        if self.score_vector is None:
            scores = (keys @ query[:, :, None])[..., 0]
        else:
            scores = (query[:, None] + keys).tanh() @ self.score_vector
        weights = masked_softmax(scores, mask)
        return (weights[:, None] @ memory)[:, 0], weights


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    vocabulary: int = 4_000  # tokens of the target
    source_vocabulary: int | None = None  # default: the same tokens as the target
    pad: int = field(default=0, metadata=MAY_BE_ZERO)  # the token that fills short sentences up
    width: int = 256  # of an embedding
    hidden: int = 512  # of the state of the decoder, and of the encoder's, both directions together
    depth: int = 1  # layers of the encoder and of the decoder
    bidirectional: bool = True  # the encoder also reads from the end, with half of the hidden width for each direction
    attention: Literal["none", "bahdanau", "luong"] = "bahdanau"
    attention_width: int | None = None  # of the hidden layer of Bahdanau's score and of concat; default: hidden
    luong_score: RecurrentScore = "general"
    input_feeding: bool = True  # with Luong's attention, each step also reads the output of the one before
    share: Literal["all", "target", "none"] = "all"  # one table for source, target and output; target and output; none
    dropout: float = field(default=0.2, metadata=RATE)  # of embeddings, between layers, and before the output
    output_bias: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocabulary(self)
        scored = self.attention == "bahdanau" or (self.attention == "luong" and self.luong_score == "concat")
        for name, default, used, users in (
            ("luong_score", "general", self.attention == "luong", "attention='luong'"),
            ("input_feeding", True, self.attention == "luong", "attention='luong'"),
            ("attention_width", None, scored, "attention='bahdanau', or 'luong' with luong_score='concat'"),
        ):
            check_used(name, vars(self)[name], default, used=used, users=users)
        if self.bidirectional and self.hidden % 2:
            raise ConfigError(f"hidden {self.hidden}; expected an even number, half for each direction")


@dataclass(frozen=True)
class RecurrentState:
    """The state of a recurrent decoder: that of its LSTM layers, its last output, and what its attention reads."""

    layers: tuple[tuple[Tensor, Tensor], ...]  # h and c of each layer, (B, D)
    fed: Tensor  # the last output before the vocabulary, h̃, (B, E)
    keys: Tensor | None  # (B, N, A); None: there is no attention
    memory: Tensor  # (B, N, D)
    mask: Tensor | None  # (B, N), True for what is not padding; None: nothing is
    sentences: Tensor  # (B,): which row of the memory each row reads

    def reorder(self, rows: Tensor) -> "RecurrentState":
        layers = tuple((h[rows], c[rows]) for h, c in self.layers)
        sentences = self.sentences[rows]
        chosen = replace(self, layers=layers, fed=self.fed[rows], sentences=sentences)
        if self.keys is None or torch.equal(sentences, self.sentences):  # beams of the same sentences
            return chosen
        mask = None if self.mask is None else self.mask[rows]
        return replace(chosen, keys=self.keys[rows], memory=self.memory[rows], mask=mask)


class Seq2Seq(TextModel):
    """Source (B, N), target so far (B, M) → logits of each next target token (B, M, V)."""

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        width, hidden, kind = config.width, config.hidden, config.attention
        self.target_embed = TokenEmbedding(config.vocabulary, width, config.pad)
        self.source_embed = None
        if config.share != "all":
            self.source_embed = TokenEmbedding(config.source_vocabulary or config.vocabulary, width, config.pad)
        self.encoder = nn.LSTM(
            width,
            hidden // 2 if config.bidirectional else hidden,
            config.depth,
            batch_first=True,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.depth > 1 else 0.0,
        )
        self.attention = None
        if kind == "none":
            self.no_maps_reason = "it has no attention"
        else:
            score = "concat" if kind == "bahdanau" else config.luong_score
            self.attention = RecurrentAttention(hidden, config.attention_width or hidden, score)
        self.feeding = kind == "luong" and config.input_feeding
        inputs = width + (hidden if kind == "bahdanau" else width * self.feeding)  # y and context, or y and h̃
        self.cells = nn.ModuleList(nn.LSTMCell(hidden if layer else inputs, hidden) for layer in range(config.depth))
        read = {"none": hidden, "bahdanau": 2 * hidden + width, "luong": 2 * hidden}[kind]
        self.readout = nn.Linear(read, width)
        self.output = OutputLayer(config.vocabulary, width, own_table=config.share == "none", bias=config.output_bias)
        self.drop = nn.Dropout(config.dropout)
        self.init_weights()

    def draw_weights(self) -> None:
        """Xavier-uniform inputs and orthogonal recurrences, gate by gate; biases zero, but 1 for the forget gates."""
        init_layers(self)
        for module in self.modules():
            if isinstance(module, TokenEmbedding | OutputLayer | RecurrentAttention):
                module.draw_weights()
            elif isinstance(module, nn.LSTM | nn.LSTMCell):
                init_lstm(module)

    def encode(self, source: Tensor) -> Memory:
        """Every state of the encoder, and the last one of each layer, (L, B, D): (B, N) → memory (B, N, D)."""
        check_tokens(source, "source")
        kept = source != self.config.pad
        embed = self.target_embed if self.source_embed is None else self.source_embed
        lengths = kept.sum(1).clamp(min=1).cpu()  # packed, so that the last state is that of the last real token
        packed = pack_padded_sequence(self.drop(embed(source)), lengths, batch_first=True, enforce_sorted=False)
        states, final = self.encoder(packed)
        tokens, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        return Memory(tokens, kept, tuple(self.join_directions(each) for each in final))

    def join_directions(self, state: Tensor) -> Tensor:
        """The states of both directions as one: (L·2, B, D/2) → (L, B, D)."""
        return state.unflatten(0, (self.config.depth, -1)).transpose(1, 2).flatten(2)

    def start(self, memory: Memory, length: int) -> RecurrentState:  # noqa: ARG002  # any length: the state does not grow
        """The decoder starts with the last h and c of the encoder; the keys of the attention are computed once."""
        if len(memory.final) != 2:
            raise ConfigError("the memory has no final state; expected one of `encode`, with h and c of the encoder")
        h, c = memory.final
        mask = None if memory.kept is None or bool(memory.kept.all()) else memory.kept
        return RecurrentState(
            layers=tuple(zip(h.unbind(), c.unbind(), strict=True)),
            fed=h.new_zeros(h.shape[1], self.config.width),
            keys=None if self.attention is None else self.attention.keys(memory.tokens),
            memory=memory.tokens,
            mask=mask,
            sentences=torch.arange(h.shape[1], device=h.device),
        )

    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        """The logits after each target token, one after the other: (B, M) → (B, M, V)."""
        check_tokens(target, "target")
        state, outputs = self.start(memory, target.shape[1]), list[Tensor]()
        for y in self.drop(self.target_embed(target)).unbind(1):
            state = self.advance(y, state)
            outputs.append(state.fed)
        return self.output(self.drop(torch.stack(outputs, dim=1)), self.target_embed)

    def step(self, tokens: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """The logits after one more token of each row: (B,) → (B, V)."""
        state = self.advance(self.drop(self.target_embed(tokens)), state)
        return self.output(self.drop(state.fed), self.target_embed), state

    def advance(self, y: Tensor, state: RecurrentState) -> RecurrentState:
        """One step of the decoder, after the embedded token y: (B, E)."""
        if self.config.attention == "bahdanau":
            context = self.read_memory(state.layers[-1][0], state)  # c_i, by the state before this step
            s, layers = self.run_cells(torch.cat([y, context], dim=-1), state)  # s_i = LSTM(s_{i−1}, [y_{i−1}; c_i])
            fed = self.readout(torch.cat([s, context, y], dim=-1)).tanh()
        elif self.config.attention == "luong":
            s, layers = self.run_cells(torch.cat([y, state.fed], dim=-1) if self.feeding else y, state)
            context = self.read_memory(s, state)  # by the state after this step
            fed = self.readout(torch.cat([context, s], dim=-1)).tanh()  # h̃ = tanh(W_c·[c; h])
        else:
            s, layers = self.run_cells(y, state)
            fed = self.readout(s).tanh()
        return replace(state, layers=layers, fed=fed)

    def run_cells(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """All LSTM layers for one token: the state of the last, (B, D), and h and c of each."""
        layers = list[tuple[Tensor, Tensor]]()
        for cell, before in zip(self.cells, state.layers, strict=True):
            layers.append(cell(self.drop(x) if layers else x, before))
            x = layers[-1][0]
        return x, tuple(layers)

    def read_memory(self, asks: Tensor, state: RecurrentState) -> Tensor:
        """The context: what the attention reads of the memory for the state that asks, (B, D)."""
        assert self.attention is not None
        assert state.keys is not None
        return self.attention(asks, state.keys, state.memory, state.mask)[0]

    def attention_maps(self, memory: Memory, target: Tensor, source: Tensor | None = None) -> TextAttention:  # noqa: ARG002
        """One layer with one head: what each target token reads of the source."""
        if self.attention is None:
            return TextAttention()
        rows = list[Tensor]()
        hook = self.attention.register_forward_hook(lambda _, __, output: rows.append(output[1]))
        try:
            self.decode(memory, target)
        finally:
            hook.remove()
        return TextAttention(cross=torch.stack(rows, dim=1)[:, None, None])


def init_lstm(lstm: nn.LSTM | nn.LSTMCell) -> None:
    """The four gates are stacked in one matrix: input, forget, cell, output; each is initialized separately."""
    for name, weight in lstm.named_parameters():
        for gate, part in zip("ifgo", weight.data.chunk(4), strict=True):
            if name.startswith("weight_ih"):
                nn.init.xavier_uniform_(part)
            elif name.startswith("weight_hh"):
                nn.init.orthogonal_(part)
            else:  # torch adds two biases: one of them is 1
                nn.init.constant_(part, float(gate == "f" and name.startswith("bias_ih")))


CPU = Seq2SeqConfig()  # ours
PRESETS = Presets(
    lambda: {
        "lstm_cpu": replace(CPU, attention="none"),
        "lstm_bahdanau_cpu": CPU,
        "lstm_luong_cpu": replace(CPU, attention="luong"),
    }
)
FAMILY = Family("seq2seq", Seq2SeqConfig, Seq2Seq, PRESETS)
