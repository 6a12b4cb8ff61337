"""The text Transformer is the same as torch.nn.Transformer's stacks and as transformers' Marian."""

from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.text_model_names import convert_marian_names, convert_torch_names
from support.text_models import draw_sentences, pad_rows
from torch import Tensor, nn

from vitrail.models.base.text_contract import Memory
from vitrail.models.text.transformer import Transformer, TransformerConfig

WIDTH, HEADS, MLP, DEPTH, VOCABULARY = 24, 4, 40, 2, 50
LENGTHS = [9, 5, 1]
SOURCE = pad_rows(draw_sentences(3, 9), LENGTHS)
KEPT = SOURCE != 0


def build(**fields: Any) -> Transformer:
    config = TransformerConfig(
        vocabulary=VOCABULARY,
        width=WIDTH,
        heads=HEADS,
        mlp_width=MLP,
        encoder_depth=DEPTH,
        decoder_depth=DEPTH,
        **fields,
    )
    return add_weight_noise(Transformer(config))


def make_torch_stack(side: str, norm: str) -> Any:
    """Post-norm without the extra norm that torch.nn.Transformer adds; pre-norm with it."""
    stack = nn.TransformerEncoder if side == "encoder" else nn.TransformerDecoder
    layer = nn.TransformerEncoderLayer if side == "encoder" else nn.TransformerDecoderLayer
    one: Any = layer(WIDTH, HEADS, MLP, dropout=0.0, batch_first=True, norm_first=norm == "pre")
    fast: dict[str, Any] = {"enable_nested_tensor": False} if side == "encoder" else {}
    return stack(one, DEPTH, norm=nn.LayerNorm(WIDTH) if norm == "pre" else None, **fast).eval()


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_encoder_is_that_of_torch(norm: str) -> None:
    ours, theirs = build(norm=norm), add_weight_noise(make_torch_stack("encoder", norm))
    assert ours.encoder is not None
    ours.encoder.load_state_dict(convert_torch_names(theirs.state_dict()))
    x = torch.randn(3, 9, WIDTH)
    expected = theirs(x, src_key_padding_mask=~KEPT)
    torch.testing.assert_close(ours.encoder(x, KEPT[:, None, None])[KEPT], expected[KEPT], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_decoder_is_that_of_torch(norm: str) -> None:
    ours, theirs = build(norm=norm), add_weight_noise(make_torch_stack("decoder", norm))
    ours.decoder.load_state_dict(convert_torch_names(theirs.state_dict()))
    x, memory = torch.randn(3, 7, WIDTH), torch.randn(3, 9, WIDTH)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=~KEPT, tgt_is_causal=True)
    torch.testing.assert_close(ours.decoder(x, Memory(memory, KEPT)), expected, rtol=0, atol=1e-5)


def build_marian() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=DEPTH,
        decoder_layers=DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=MLP,
        decoder_ffn_dim=MLP,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        decoder_start_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
    )
    return add_weight_noise(transformers.MarianMTModel(config), std=0.1)


@torch.no_grad()
def interleave_positions(marian: Any) -> Tensor:
    """Give Marian the columns in the paper's order, sin and cos in turn, and return its table."""
    marian.model.encoder.embed_positions = marian.model.decoder.embed_positions  # equal, apart from our noise
    table = marian.model.decoder.embed_positions.weight
    order = torch.arange(WIDTH).unflatten(0, (2, -1)).T.flatten()
    table.copy_(table[:, order].clone())
    return table


@pytest.fixture(scope="module")
def models() -> tuple[Transformer, Any]:
    """Ours and Marian with the same weights; its positions are the ones without noise."""
    torch.manual_seed(0)
    marian = build_marian()
    fresh = type(marian)(marian.config).model.decoder.embed_positions.weight
    with torch.no_grad():
        marian.model.decoder.embed_positions.weight.copy_(fresh)
        marian.final_logits_bias.copy_(torch.randn_like(marian.final_logits_bias))
    table = interleave_positions(marian)
    ours = build(length=32, output_bias=True)
    torch.testing.assert_close(ours.target_positions(torch.zeros(1, 32, WIDTH))[0], table, rtol=0, atol=1e-5)
    ours.load_state_dict(convert_marian_names(marian.state_dict(), DEPTH))
    return ours, marian


@torch.no_grad()
def test_logits_are_those_of_marian(models: tuple[Transformer, Any]) -> None:
    ours, marian = models
    target = draw_sentences(3, 7, seed=1)
    expected = marian(input_ids=SOURCE, attention_mask=KEPT.long(), decoder_input_ids=target).logits
    logits = ours(SOURCE, target)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@torch.inference_mode()
def test_greedy_tokens_are_those_of_marian(models: tuple[Transformer, Any]) -> None:
    ours, marian = models
    with torch.inference_mode(False):
        expected = marian.generate(SOURCE, attention_mask=KEPT.long(), max_new_tokens=12, num_beams=1, do_sample=False)
    state, tokens = ours.start(ours.encode(SOURCE), 12), [torch.ones(3, dtype=torch.long)]
    ended = torch.zeros(3, dtype=torch.bool)
    for _ in range(expected.shape[1] - 1):
        logits, state = ours.step(tokens[-1], state)
        tokens.append(logits.argmax(-1).masked_fill(ended, 0))
        ended |= tokens[-1] == 2
    assert torch.equal(torch.stack(tokens, dim=1), expected)
