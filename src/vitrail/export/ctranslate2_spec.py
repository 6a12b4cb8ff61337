"""A Transformer of text as CTranslate2 describes it: which tensors go where, and what it cannot represent."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.models.base.text_contract import TextModel
from vitrail.models.text.layers import NORM_EPS, DecoderLayer, EncoderLayer, TransformerParts
from vitrail.models.text.token_embedding import SequencePositions

if TYPE_CHECKING:
    from vitrail.data.text.tokenizer import TextTokenizer

NEVER = -1e9  # the bias of tokens that are never written: padding and start


def import_ctranslate2() -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise missing_package_error("an export to CTranslate2", "ctranslate2", "ctranslate2") from None
    return ctranslate2


def find_exportable_parts(model: TextModel) -> TransformerParts:
    """The encoder and decoder of a model; an error for one that CTranslate2 cannot represent."""
    parts, kind = model.find_transformer_parts(), type(model).__name__
    if parts is None:
        raise ConfigError(
            f"CTranslate2 cannot run this {kind}; expected a Transformer with an encoder and a decoder of text"
        )
    sizes = parts.sizes
    if sizes.score == "additive":
        raise ConfigError(f"CTranslate2 cannot run this {kind}: its `score` is additive; expected scaled_dot or dot")
    if sizes.key_width != sizes.value_width:
        raise ConfigError(
            f"CTranslate2 cannot run this {kind}: its `key_width` is {sizes.key_width} and its `value_width` "
            f"{sizes.value_width}; expected equal ones"
        )
    return parts


def build_spec(model: TextModel, tokenizer: "TextTokenizer") -> Any:
    """CTranslate2's specification with our weights, as float32."""
    import_ctranslate2()
    from ctranslate2.specs import TransformerSpec, common_spec, transformer_spec

    parts = find_exportable_parts(model)
    sizes = parts.sizes
    given: dict[str, Any] = {
        "num_heads": sizes.heads,
        "pre_norm": sizes.pre_norm,
        "activation": common_spec.Activation.GELU if sizes.activation == "gelu" else common_spec.Activation.RELU,
        "head_dim": sizes.key_width,
    }
    spec: Any = TransformerSpec(
        transformer_spec.TransformerEncoderSpec(len(parts.encoder), **given),
        transformer_spec.TransformerDecoderSpec(len(parts.decoder), **given),
    )
    sides = (
        (spec.encoder, parts.encoder, parts.source_positions, parts.encoder_norm),
        (spec.decoder, parts.decoder, parts.target_positions, parts.decoder_norm),
    )
    for part, layers, positions, norm in sides:
        part.position_encodings.encodings = read_positions(positions)
        if isinstance(norm, nn.LayerNorm):
            fill_norm(part.layer_norm, norm)
        for own, layer in zip(part.layer, layers, strict=True):
            fill_layer(own, layer, scale=None if sizes.score == "scaled_dot" else 1.0)
    spec.encoder.embeddings[0].weight = to_array(parts.source_embed.weight)
    spec.decoder.embeddings.weight = to_array(parts.target_embed.weight)
    table, bias = parts.output.weight, parts.output.bias
    spec.decoder.projection.weight = to_array(parts.target_embed.weight if table is None else table)
    spec.decoder.projection.bias = forbid_tokens(
        np.zeros(tokenizer.vocabulary, np.float32) if bias is None else to_array(bias), tokenizer
    )
    describe_tokens(spec, tokenizer)
    return spec


def describe_tokens(spec: Any, tokenizer: "TextTokenizer") -> None:
    """The vocabulary, of both languages, and its special tokens. The end is added to every source."""
    spec.register_source_vocabulary(tokenizer.names)
    spec.register_target_vocabulary(tokenizer.names)
    config, names = spec.config, tokenizer.names
    config.unk_token, config.eos_token = names[tokenizer.unknown], names[tokenizer.end]
    config.bos_token = config.decoder_start_token = names[tokenizer.start]
    config.add_source_bos, config.add_source_eos = False, True
    config.layer_norm_epsilon = NORM_EPS


def fill_layer(spec: Any, layer: EncoderLayer | DecoderLayer, *, scale: float | None) -> None:
    """Fill the specification of a layer; `scale` multiplies the scores, by default 1/√K."""
    fill_linears(spec.self_attention.linear, (layer.attn.qkv, layer.attn.proj))
    fill_linears((spec.ffn.linear_0, spec.ffn.linear_1), (layer.mlp.fc1, layer.mlp.fc2))
    parts = [(spec.self_attention, layer.norm1), (spec.ffn, layer.norm2)]
    attentions = [spec.self_attention]
    if isinstance(layer, DecoderLayer):
        fill_linears(spec.attention.linear, (layer.cross.q, layer.cross.kv, layer.cross.proj))
        parts = [(spec.self_attention, layer.norm1), (spec.attention, layer.norm2), (spec.ffn, layer.norm3)]
        attentions.append(spec.attention)
    for part, norm in parts:
        fill_norm(part.layer_norm, norm)
    if scale is not None:
        for attention in attentions:
            attention.queries_scale = np.float32(scale)


def fill_linears(targets: Iterable[Any], linears: Iterable[nn.Linear]) -> None:
    for target, linear in zip(targets, linears, strict=True):
        target.weight = to_array(linear.weight)
        if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]  # nn.Linear says it always is
            target.bias = to_array(linear.bias)


def fill_norm(target: Any, norm: nn.LayerNorm) -> None:
    target.gamma, target.beta = to_array(norm.weight), to_array(norm.bias)


def read_positions(positions: SequencePositions) -> NDArray[np.float32]:
    """The vectors of all positions: (length, D)."""
    return to_array(positions.make_table())


def forbid_tokens(bias: NDArray[np.float32], tokenizer: "TextTokenizer") -> NDArray[np.float32]:
    """Padding and the start are never written, as in our own decoding, whatever the weights are."""
    bias = bias.copy()
    bias[sorted({tokenizer.pad, tokenizer.start} - {tokenizer.end})] = NEVER
    return bias


def to_array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().contiguous().numpy(force=True)
