"""The Transformer's exact parameter counts, initial weights, options and errors."""

import math
from typing import Any

import pytest
import torch
from support.text_models import SMALL, build_text_model, draw_sentences
from torch import nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.layers.positions import sinusoid
from vitrail.models.base.text_contract import Memory
from vitrail.models.text.transformer import PRESETS, Transformer, TransformerConfig


def count(name: str = "transformer_base", **fields: Any) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in vitrail.create(name, **fields).parameters())


@pytest.mark.parametrize(
    ("fields", "base", "big"),
    [
        ({}, 63_082_496, 214_245_376),
        ({"attention_bias": False}, 63_045_632, 214_171_648),  # tensor2tensor
        ({"norm": "pre"}, 63_084_544, 214_249_472),  # two final norms
        ({"output_bias": True}, 63_119_496, 214_282_376),
        ({"share": "none"}, 100_970_496, 290_021_376),  # three tables
        ({"share": "target"}, 63_082_496 + 37_000 * 512, 214_245_376 + 37_000 * 1024),
    ],
)
def test_counts_of_base_and_big(fields: dict[str, Any], base: int, big: int) -> None:
    assert (count(**fields), count("transformer_big", **fields)) == (base, big)


def test_counts_of_the_parts_of_base() -> None:
    with torch.device("meta"):
        model = Transformer(TransformerConfig())
    assert model.encoder is not None
    parts = [model.target_embed, model.encoder, model.decoder, model.encoder.layers[0], model.decoder.layers[0]]
    counts = [sum(each.numel() for each in part.parameters()) for part in parts]
    assert counts == [18_944_000, 18_914_304, 25_224_192, 3_152_384, 4_204_032]


def test_counts_of_the_small_presets() -> None:
    assert count("transformer_tiny") == 2_605_056  # Wu 2021: 2.6M
    assert count("transformer_cpu") == 4_978_688
    assert not [name for name, _ in vitrail.create("caption_cpu").named_parameters() if "encoder" in name]


D256 = {"width": 256, "key_width": 32, "value_width": 32}
D1024 = {"width": 1024, "key_width": 128, "value_width": 128}
TABLE_3: list[tuple[dict[str, Any], int, int]] = [  # fields, exact count at 37,000, millions as printed
    ({}, 63_082_496, 65),
    *(({"heads": heads}, 63_082_496, 65) for heads in (1, 4, 16, 32)),
    ({"key_width": 16}, 55_990_784, 58),
    ({"key_width": 32}, 58_354_688, 60),
    ({"encoder_depth": 2, "decoder_depth": 2}, 33_656_832, 36),
    ({"encoder_depth": 4, "decoder_depth": 4}, 48_369_664, 50),
    ({"encoder_depth": 8, "decoder_depth": 8}, 77_795_328, 80),
    (D256, 26_834_944, 28),
    (D1024, 163_889_152, 168),
    ({"mlp_width": 1024}, 50_487_296, 53),
    ({"mlp_width": 4096}, 88_272_896, 90),
]


@pytest.mark.parametrize(("fields", "exact", "printed"), TABLE_3, ids=str)
def test_every_row_of_table_3(fields: dict[str, Any], exact: int, printed: int) -> None:
    """The printed counts are those of about 41,000 tokens, not of the 37,000 in the text."""
    assert count(**fields) == exact
    assert round(count(vocabulary=41_000, **fields) / 1e6) == printed


def test_initial_weights() -> None:
    torch.manual_seed(0)
    width, keys, values = 64, 4 * 8, 4 * 32
    config = TransformerConfig(vocabulary=900, width=width, heads=4, key_width=8, value_width=32, mlp_width=96)
    model = Transformer(config)
    assert model.encoder is not None
    for layer in (*model.encoder.layers, *model.decoder.layers):
        for part, rows in zip(layer.attn.qkv.weight.split([keys, keys, values]), (keys, keys, values), strict=True):  # pyright: ignore
            bound = math.sqrt(6 / (width + rows))
            assert 0.97 * bound < part.abs().max().item() <= bound
    for part, rows in zip(model.decoder.layers[0].cross.kv.weight.split([keys, values]), (keys, values), strict=True):  # pyright: ignore
        bound = math.sqrt(6 / (width + rows))
        assert 0.97 * bound < part.abs().max().item() <= bound
    assert all(not each.any() for name, each in model.named_parameters() if name.endswith("bias"))
    table = model.target_embed.weight
    assert not table[0].any()
    assert table[1:].std().item() == pytest.approx(width**-0.5, rel=0.02)
    embedded = model.target_embed(torch.arange(1, 900)[None])
    assert embedded.std().item() == pytest.approx(1, rel=0.02)
    untied = Transformer(TransformerConfig(vocabulary=900, width=64, share="none", positions="learned", pad=7))
    for name in ("source_embed", "target_embed", "output", "target_positions", "source_positions"):
        assert getattr(untied, name).weight.std().item() == pytest.approx(0.125, rel=0.05)
    assert not untied.target_embed.weight[7].any()


def test_positions_are_those_of_the_paper() -> None:
    model = build_text_model("post-norm")
    x = torch.zeros(1, 5, 16)
    assert torch.equal(model.source_positions(x)[0], sinusoid(torch.arange(5), 16))
    assert torch.equal(model.target_positions(x[:, :1], 3)[0, 0], sinusoid(torch.arange(5), 16)[3])


def test_a_table_first_used_in_prediction_can_be_used_in_training() -> None:
    model = build_text_model("post-norm", width=22)
    source = draw_sentences(2, 3)
    with torch.inference_mode():
        model(source, source)
    model(source, source).sum().backward()


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_a_sentence_longer_than_the_positions_is_an_error(positions: str) -> None:
    model = build_text_model("post-norm", positions=positions, length=6)
    assert model.length_limit == 6
    long, short = draw_sentences(2, 7), draw_sentences(2, 6)
    with pytest.raises(
        ConfigError, match=r"^the source has 7 tokens; expected at most 6, the positions of the model: "
    ):
        model.encode(long)
    with pytest.raises(
        ConfigError, match=r"^the target has 7 tokens; expected at most 6, the positions of the model: "
    ):
        model(short, long)
    with pytest.raises(ConfigError, match=r"^a target of 7 tokens; expected at most 6, the positions of the model$"):
        model.start(model.encode(short), 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 30, "heads": 4}, "width 30 cannot be divided by 4 heads; expected a divisor of 30, for example 3"),
        ({"pad": 100}, "pad is 100; expected a token of the vocabulary, less than 23"),
        ({"source_vocabulary": 5}, "share 'all' with 5 source and 23 target tokens; expected the same vocabulary, or"),
        ({"memory_width": 8}, "memory_width 8 with an encoder of width 16; expected none, or encoder_depth=0"),
        ({"width": 15, "heads": 3}, "width 15; expected an even one for positions 'sinusoid'"),
        ({"decoder_depth": 0}, "decoder_depth is 0; expected more than 0"),
        ({"dropout": 1.0}, "dropout is 1.0; expected at least 0 and less than 1"),
        ({"score": "cosine"}, "unknown score 'cosine'; expected one of scaled_dot, dot, additive"),
        ({"norm": "rms"}, "unknown norm 'rms'; expected one of post, pre"),
    ],
)
def test_wrong_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**{**SMALL, **fields})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_decoder_without_encoder_says_what_it_reads() -> None:
    model = build_text_model("no encoder")
    with pytest.raises(ConfigError, match=r"^this Transformer has no encoder .* of another model, of width 10$"):
        model(draw_sentences(1, 3), draw_sentences(1, 3))
    with pytest.raises(ConfigError, match=r"^the memory has tokens of width 12; expected 10: .* memory_width=12$"):
        model.decode(Memory(torch.zeros(1, 4, 12)), draw_sentences(1, 3))
    assert model.decode(Memory(torch.zeros(1, 4, 10)), draw_sentences(1, 3)).shape == (1, 3, 23)


def test_head_widths_need_not_divide_the_width() -> None:
    model = build_text_model("post-norm", heads=3, key_width=4, value_width=6)
    assert model(draw_sentences(1, 3), draw_sentences(1, 2)).shape == (1, 2, 23)


def test_keys_of_the_memory_are_computed_once_and_the_cache_is_written_in_place() -> None:
    model = build_text_model("pre-norm")
    calls = list[str]()

    def count_call(_: nn.Module, __: Any, ___: Any) -> None:
        calls.append("kv")

    for layer in model.decoder.layers:
        layer.cross.kv.register_forward_hook(count_call)
    with torch.inference_mode():
        state = model.start(model.encode(draw_sentences(2, 5)), 9)
        storage = [each.keys.data_ptr() for each in state.cache]
        for _ in range(9):
            _, state = model.step(torch.tensor([4, 5]), state)
            state = state.reorder(torch.tensor([0, 1]))
        assert [each.keys.data_ptr() for each in state.cache] == storage
    assert calls == ["kv", "kv"]
    assert state.length == 9


def test_presets_for_a_cpu_are_pre_norm() -> None:
    assert {PRESETS[name].norm for name in ("transformer_cpu", "caption_cpu")} == {"pre"}
