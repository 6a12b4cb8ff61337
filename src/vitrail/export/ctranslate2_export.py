"""Export a Transformer of text to a folder for CTranslate2, compared with torch before it appears.

The folder has model.bin, config.json and shared_vocabulary.json of CTranslate2, and our tokenizer.json. It needs
neither torch nor vitrail:

    import ctranslate2, tokenizers

    tokenizer = tokenizers.Tokenizer.from_file("exported/tokenizer.json")
    translator = ctranslate2.Translator("exported", compute_type="float32")
    source = tokenizer.encode("Ein Hund läuft.", add_special_tokens=False).tokens
    best = translator.translate_batch([source], beam_size=4)[0].hypotheses[0]
    print(tokenizer.decode([tokenizer.token_to_id(each) for each in best]))
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError, describe_error, missing_package_error
from vitrail.base.files import file_checksum, write_text
from vitrail.base.json_yaml import add_checksum
from vitrail.base.text import format_count
from vitrail.checkpoint.weight_folders import TOKENIZER_FILE
from vitrail.data.text.batches import TokenRows
from vitrail.data.text.pairs import TATOEBA_LANGUAGES, read_tatoeba
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.export.atomic_folder import check_target_folder, write_folder_atomically
from vitrail.export.description import CONFIG_FILE, CTRANSLATE2_FILES
from vitrail.models.base.text_contract import TextModel
from vitrail.models.text.layers import NORM_EPS, DecoderLayer, EncoderLayer, TransformerParts

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


def build_spec(model: TextModel, tokenizer: TextTokenizer) -> Any:
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
        part.position_encodings.encodings = to_array(positions.make_table())
        if isinstance(norm, nn.LayerNorm):
            fill_norm(part.layer_norm, norm)
        for own, layer in zip(part.layer, layers, strict=True):
            fill_layer(own, layer, scale=None if sizes.score == "scaled_dot" else 1.0)
    spec.encoder.embeddings[0].weight = to_array(parts.source_embed.weight)
    spec.decoder.embeddings.weight = to_array(parts.target_embed.weight)
    table, bias = parts.output.weight, parts.output.bias
    spec.decoder.projection.weight = to_array(parts.target_embed.weight if table is None else table)
    given_bias = np.zeros(tokenizer.vocabulary, np.float32) if bias is None else to_array(bias).copy()
    given_bias[sorted({tokenizer.pad, tokenizer.start} - {tokenizer.end})] = NEVER  # as in our own decoding
    spec.decoder.projection.bias = given_bias
    describe_tokens(spec, tokenizer)
    return spec


def describe_tokens(spec: Any, tokenizer: TextTokenizer) -> None:
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


def to_array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().contiguous().numpy(force=True)


CHECKED_SENTENCES = 50
MAX_CHECKED_TOKENS = 50  # of a translation
MAX_DIFFERENCE = 1e-3  # between the log-probabilities of two tokens that both may be the best


@dataclass(frozen=True)
class TranslationCheck:
    """Greedy translations of the exported model compared with those of torch."""

    sentences: int
    same: int  # token by token
    ties: int = 0  # they differ at a token that is as probable as another one

    def __str__(self) -> str:
        ties = f"; the others chose between equally probable tokens: {self.ties}" if self.ties else ""
        return f"matches torch on {self.same} of {format_count(self.sentences, 'sentence')}{ties}"


def export_to_ctranslate2(
    model: TextModel,
    tokenizer: TextTokenizer,
    folder: str | Path,
    *,
    languages: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    sentences: Sequence[str] | None = None,
    overwrite: bool = False,
) -> TranslationCheck:
    """Write the folder, unless a greedy translation of `sentences` differs from that of torch.

    By default the sentences are 50 of the bundled ones, or random tokens for other languages.
    """
    folder = Path(folder)
    check_target_folder(folder, overwrite=overwrite)
    spec = build_spec(model, tokenizer)
    rows = tokenizer.encode(sentences) if sentences is not None else make_check_rows(tokenizer, languages)
    limit = model.length_limit or MAX_CHECKED_TOKENS
    rows = [row for row in rows if 0 < len(row) < limit]
    expected = translate_greedily(model, tokenizer, rows)
    with write_folder_atomically(folder, overwrite=overwrite) as place:
        spec.validate()
        spec.optimize()  # tables that are equal are stored once
        spec.save(str(place))
        about = {"exported": True, "to": "ctranslate2", "languages": languages and list(languages)}
        config = {**about, "provenance": dict(provenance or {}), **json.loads((place / CONFIG_FILE).read_text("utf-8"))}
        write_text(place / TOKENIZER_FILE, tokenizer.to_json())
        config["files"] = {name: file_checksum(place / name) for name in CTRANSLATE2_FILES}
        write_text(place / CONFIG_FILE, json.dumps(add_checksum(config), ensure_ascii=False))
        found = run_exported(place, tokenizer, rows, model.length_limit)
        return compare_translations(model, tokenizer, rows, expected, found)


def make_check_rows(tokenizer: TextTokenizer, languages: Sequence[str] | None) -> list[list[int]]:
    """The tokens of bundled sentences in the language of the source, or random ones if there are none."""
    if languages and languages[0] in TATOEBA_LANGUAGES:
        side = TATOEBA_LANGUAGES.index(languages[0])
        return tokenizer.encode([pair[side] for pair in read_tatoeba()[1][:CHECKED_SENTENCES]])
    special = {tokenizer.pad, tokenizer.start, tokenizer.end}
    tokens = [each for each in range(tokenizer.vocabulary) if each not in special]
    rng = np.random.default_rng(0)
    return [rng.choice(tokens, rng.integers(2, 13)).tolist() for _ in range(CHECKED_SENTENCES)]


def limit_tokens(limit: int | None) -> int:
    return MAX_CHECKED_TOKENS if limit is None else min(MAX_CHECKED_TOKENS, limit)


@torch.inference_mode()
def translate_greedily(
    model: TextModel, tokenizer: TextTokenizer, rows: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The most probable tokens, without the end. Every step decodes the complete text: nothing is cached."""
    if not rows:
        return []
    device = next(model.parameters()).device
    joined = TokenRows.join(rows)
    memory = model.encode(joined.pad(np.arange(len(rows)), pad=tokenizer.pad, last=tokenizer.end).to(device))
    texts = torch.full((len(rows), 1), tokenizer.start, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for _ in range(limit_tokens(model.length_limit)):
        logits = model.decode(memory, texts)[:, -1].clone()
        logits[:, sorted({tokenizer.pad, tokenizer.start} - {tokenizer.end})] = -torch.inf
        texts = torch.cat([texts, logits.argmax(-1, keepdim=True)], dim=1)
        ended |= texts[:, -1] == tokenizer.end
        if ended.all():
            break
    return [tuple(takewhile(lambda token: token != tokenizer.end, row)) for row in texts[:, 1:].tolist()]


def run_exported(
    folder: Path, tokenizer: TextTokenizer, rows: Sequence[Sequence[int]], limit: int | None
) -> list[tuple[int, ...]]:
    """Greedy translations by CTranslate2, as token ids."""
    names = tokenizer.names
    ids = {name: number for number, name in enumerate(names)}
    try:
        translator = import_ctranslate2().Translator(
            str(folder), device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
        )
        found = translator.translate_batch(
            [[names[token] for token in row] for row in rows],
            beam_size=1,
            min_decoding_length=0,  # by default CTranslate2 writes at least one token
            max_decoding_length=limit_tokens(limit),
            max_input_length=0,
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"the exported model cannot be run: {describe_error(error)}") from error
    return [tuple(ids[name] for name in each.hypotheses[0]) for each in found]


def compare_translations(
    model: TextModel,
    tokenizer: TextTokenizer,
    rows: Sequence[Sequence[int]],
    expected: Sequence[tuple[int, ...]],
    found: Sequence[tuple[int, ...]],
) -> TranslationCheck:
    """Count equal translations; an error if one differs at a token that torch thinks is clearly better."""
    same = ties = 0
    for row, wanted, given in zip(rows, expected, found, strict=True):
        if wanted == given:
            same += 1
        elif is_tie(model, tokenizer, row, wanted, given):
            ties += 1
        else:
            raise CheckpointError(
                f"the exported model translates {tokenizer.decode(row)!r} as {tokenizer.decode(given)!r}, and torch as "
                f"{tokenizer.decode(wanted)!r}; expected the same tokens: this is a bug, so nothing is written"
            )
    return TranslationCheck(len(rows), same, ties)


@torch.inference_mode()
def is_tie(
    model: TextModel, tokenizer: TextTokenizer, row: Sequence[int], one: tuple[int, ...], other: tuple[int, ...]
) -> bool:
    """Whether torch finds the first tokens that differ equally probable."""
    a, b = (*one, tokenizer.end), (*other, tokenizer.end)
    place = next(place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    device = next(model.parameters()).device
    source = torch.tensor([[*row, tokenizer.end]], device=device)
    logits = model(source, torch.tensor([[tokenizer.start, *one[:place]]], device=device))[0, -1]
    return abs(float(logits[a[place]] - logits[b[place]])) < MAX_DIFFERENCE
