"""LSTM encoder-decoders by their formulas, their initial weights and errors."""

from typing import Any

import pytest
import torch
from support.text_models import LSTM, build_text_model, draw_sentences, pad_rows
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.models.base.text_contract import Memory
from vitrail.models.text.seq2seq import Seq2Seq, Seq2SeqConfig

LENGTHS = [6, 3, 1]
SOURCE, TARGET = pad_rows(draw_sentences(3, 6), LENGTHS), draw_sentences(3, 5, seed=1)


def read_alone(model: Seq2Seq, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both directions of one sentence, token by token, with plain cells: states (N, D), the last h and c (D,)."""
    embedded = model.target_embed.weight[source]
    directions = list[tuple[list[Tensor], Tensor, Tensor]]()
    for suffix, order in (("", embedded), ("_reverse", embedded.flip(0))):
        cell = nn.LSTMCell(model.config.width, model.config.hidden // 2)
        cell.load_state_dict({n: getattr(model.encoder, f"{n}_l0{suffix}") for n in cell.state_dict()})
        h, c = torch.zeros(2, 1, model.config.hidden // 2)
        states = list[Tensor]()
        for x in order:
            h, c = cell(x[None], (h, c))
            states.append(h[0])
        directions.append((states[::-1] if suffix else states, h[0], c[0]))
    (forward, h1, c1), (backward, h2, c2) = directions
    states = torch.stack([torch.cat(each) for each in zip(forward, backward, strict=True)])
    return states, torch.cat([h1, h2]), torch.cat([c1, c2])


@torch.no_grad()
def test_bahdanau_by_its_formulas() -> None:
    """e_j = vᵀ·tanh(W·s_{i−1} + U·h_j); α = softmax(e); c_i = Σ α_j·h_j; s_i = LSTM(s_{i−1}, [y_{i−1}; c_i])."""
    model = build_text_model("bahdanau")
    assert isinstance(model, Seq2Seq)
    attention: Any = model.attention
    w, u = attention.query.weight, attention.keys.weight
    logits, maps = model(SOURCE, TARGET), model.attention_maps(model.encode(SOURCE), TARGET).cross
    assert maps is not None
    for row, length in enumerate(LENGTHS):
        memory, s, c = read_alone(model, SOURCE[row, :length])
        for i, token in enumerate(TARGET[row]):
            y = model.target_embed.weight[token]
            energies = torch.stack([attention.score_vector @ (w @ s + u @ h).tanh() for h in memory])
            weights = energies.softmax(0)
            context = (weights[:, None] * memory).sum(0)
            (s,), (c,) = model.cells[0](torch.cat([y, context])[None], (s[None], c[None]))
            out = model.readout(torch.cat([s, context, y])).tanh() @ model.target_embed.weight.T + model.output.bias
            torch.testing.assert_close(logits[row, i], out, rtol=0, atol=1e-5)
            torch.testing.assert_close(maps[row, 0, 0, i, :length], weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("score", ["dot", "general", "concat"])
@torch.no_grad()
def test_luong_by_its_formulas(score: str) -> None:
    """The state after the step asks; h̃ = tanh(W_c·[c; h]) is read by the next step."""
    model = build_text_model("luong dot", luong_score=score)
    assert isinstance(model, Seq2Seq)
    attention: Any = model.attention
    memory, h, c = read_alone(model, SOURCE[0])
    logits, fed = model(SOURCE[:1], TARGET[:1])[0], torch.zeros(model.config.width)
    for i, token in enumerate(TARGET[0]):
        y = model.target_embed.weight[token]
        (h,), (c,) = model.cells[0](torch.cat([y, fed])[None], (h[None], c[None]))
        if score == "concat":
            both = torch.cat([attention.query.weight, attention.keys.weight], dim=1)  # W of W·[h; h̄]
            scores = torch.stack([attention.score_vector @ (both @ torch.cat([h, each])).tanh() for each in memory])
        else:
            scores = memory @ h if score == "dot" else (memory @ attention.keys.weight.T) @ h
        context = scores.softmax(0) @ memory
        fed = model.readout(torch.cat([context, h])).tanh()
        out = fed @ model.target_embed.weight.T + model.output.bias
        torch.testing.assert_close(logits[i], out, rtol=0, atol=1e-5)


@torch.no_grad()
def test_without_attention_only_the_last_state_is_handed_over() -> None:
    model = build_text_model("lstm")
    memory = model.encode(SOURCE)
    emptied = Memory(torch.zeros_like(memory.tokens), memory.kept, memory.final)
    assert torch.equal(model.decode(emptied, TARGET), model.decode(memory, TARGET))
    _, h, c = read_alone(model, SOURCE[1, :3])  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(torch.stack([h, c]), torch.stack([each[0, 1] for each in memory.final]))
    assert model.no_maps_reason == "it has no attention"


def test_initial_weights() -> None:
    model = Seq2Seq(Seq2SeqConfig(vocabulary=500, width=32, hidden=48, depth=2))
    biases = {name: each for name, each in model.named_parameters() if "bias" in name}
    assert len(biases) == 8 + 4 + 2  # of two layers in two directions, of two cells, of the readout and the output
    for name, bias in biases.items():
        if "bias_ih" in name:
            gates = bias.unflatten(0, (4, -1)).mean(1)  # input, forget, cell, output
            assert torch.equal(gates, torch.tensor([0.0, 1.0, 0.0, 0.0]))
        else:
            assert not bias.any()
    cell: Any = model.cells[0]
    for gate in cell.weight_hh.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(48), rtol=0, atol=1e-5)
    assert not model.target_embed.weight[0].any()
    assert model.target_embed.weight[1:].std().item() == pytest.approx(32**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden": 13}, "hidden 13; expected an even number, half for each direction"),
        ({"pad": 23}, "pad is 23; expected a token of the vocabulary, less than 23"),
        ({"attention": "self"}, "unknown attention 'self'; expected one of none, bahdanau, luong"),
        ({"luong_score": "additive"}, "unknown luong_score 'additive'; expected one of dot, general, concat"),
        ({"source_vocabulary": 9}, "share 'all' with 9 source and 23 target tokens; expected the same vocabulary, or"),
    ],
)
def test_wrong_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Seq2SeqConfig(**{**LSTM, **fields})
    assert str(caught.value).startswith(message)


def test_a_memory_of_another_model_is_an_error() -> None:
    model = build_text_model("bahdanau")
    with pytest.raises(ConfigError, match=r"^the memory has no final state; expected one of `encode`, with h and c"):
        model.start(Memory(torch.zeros(1, 3, 12)), 5)


def test_sentences_of_any_length() -> None:
    model = build_text_model("bahdanau")
    assert model.length_limit is None
    assert model(draw_sentences(1, 700), draw_sentences(1, 3)).shape == (1, 3, 23)


def test_presets_differ_only_in_their_attention() -> None:
    configs = [vitrail.create(f"lstm{name}_cpu").config for name in ("", "_bahdanau", "_luong")]
    assert [each.attention for each in configs] == ["none", "bahdanau", "luong"]
    assert len({(each.width, each.hidden, each.depth, each.vocabulary) for each in configs}) == 1
