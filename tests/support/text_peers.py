"""A text Transformer of ours, and its weights in transformers' MarianMTModel and in CTranslate2: parity and speed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before transformers

# isort: split
import ctranslate2
import torch
import transformers
from ctranslate2.specs import TransformerSpec
from torch import Tensor

import vitrail
from vitrail.layers.positions import sinusoid

PAD, START, END = range(3)


def make_random_transformer(*, ending: float, seed: int = 0, **fields: Any) -> Any:
    """A post-norm model whose texts vary, and end after about 20 tokens: `ending` is the weight of the position there.

    The random sublayers add little, so that the token before and its position decide what follows, and no text repeats
    one token. Padding and start are improbable: CTranslate2 does not exclude them.
    """
    torch.manual_seed(seed)
    options = {"dropout": 0.0, "output_bias": True, "share": "none", **fields}
    model: Any = vitrail.create("transformer_base", **options).eval()
    rates = 10_000.0 ** (-torch.arange(0, model.config.width, 2) / model.config.width)
    rising = 2 * ((rates < 1 / 12) & (rates > 1 / 40)).nonzero()[:, 0]  # sines that grow over the first 20 positions
    with torch.no_grad():
        for layer in model.decoder.layers:
            for linear, share in ((layer.attn.proj, 0.3), (layer.cross.proj, 0.5), (layer.mlp.fc2, 0.5)):
                linear.weight.mul_(share)
        model.output.weight.mul_(2)
        model.output.weight[END] = 0
        model.output.weight[END, rising] = ending / len(rising)
        model.output.bias[[PAD, START, END]] = torch.tensor([-1e4, -1e4, -0.3 * ending])
    return model


def make_sources(number: int, vocabulary: int, lengths: tuple[int, int], seed: int = 0) -> Tensor:
    """Random sentences of several lengths that end, padded: (number, longest)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(lengths[0], lengths[1] + 1, (number, 1), generator=generator)
    tokens = torch.randint(END + 1, vocabulary, (number, lengths[1] + 1), generator=generator)
    places = torch.arange(lengths[1] + 1)
    sources = torch.where(places < sizes, tokens, torch.where(places == sizes, END, PAD))
    return sources[:, : int(sizes.max()) + 1]


def make_marian(model: Any, *, dropout: float = 0.0) -> Any:
    """Our post-norm model as a MarianMTModel, with our positions: its own are the same in another order of columns."""
    config = model.config
    options: Any = {
        "vocab_size": config.vocabulary,
        "d_model": config.width,
        "encoder_layers": config.encoder_depth,
        "decoder_layers": config.decoder_depth,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.mlp_width,
        "decoder_ffn_dim": config.mlp_width,
        "max_position_embeddings": config.length,
        "activation_function": "relu",
        "scale_embedding": True,
        "dropout": dropout,
        "attn_implementation": "sdpa",
        **{f"{name}_token_id": number for name, number in (("pad", PAD), ("bos", START), ("eos", END))},
        "decoder_start_token_id": START,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "forced_eos_token_id": None,
    }
    peer: Any = transformers.MarianMTModel(transformers.MarianConfig(**options)).eval()
    table = sinusoid(torch.arange(config.length), config.width)
    weights: dict[str, Tensor] = {
        "model.encoder.embed_tokens.weight": model.source_embed.weight,
        "model.decoder.embed_tokens.weight": model.target_embed.weight,
        **{f"model.{part}.embed_positions.weight": table for part in ("encoder", "decoder")},
        "lm_head.weight": model.output.weight,
        "final_logits_bias": model.output.bias[None],
    }
    for part, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, layer in enumerate(stack.layers):
            weights |= name_as_marian(f"model.{part}.layers.{number}.", layer, decoder=part == "decoder")
    peer.load_state_dict(weights)
    return peer


def name_as_marian(prefix: str, layer: Any, *, decoder: bool) -> dict[str, Tensor]:
    """The weights of one of our layers in Marian's names."""
    norms = ["self_attn_layer_norm", *["encoder_attn_layer_norm"] * decoder, "final_layer_norm"]
    modules: list[tuple[str, Any]] = [(name, getattr(layer, f"norm{n}")) for n, name in enumerate(norms, 1)]
    modules += [("fc1", layer.mlp.fc1), ("fc2", layer.mlp.fc2), ("self_attn.out_proj", layer.attn.proj)]
    weights = dict[str, Tensor]()
    joined = [("self_attn", "qkv", layer.attn.qkv)]
    if decoder:
        modules += [("encoder_attn.q_proj", layer.cross.q), ("encoder_attn.out_proj", layer.cross.proj)]
        joined.append(("encoder_attn", "kv", layer.cross.kv))
    for kind in ("weight", "bias"):
        weights |= {f"{prefix}{name}.{kind}": getattr(module, kind) for name, module in modules}
        for name, letters, linear in joined:
            parts = getattr(linear, kind).chunk(len(letters))
            weights |= {f"{prefix}{name}.{x}_proj.{kind}": part for x, part in zip(letters, parts, strict=True)}
    return weights


def run_marian(peer: Any, sources: Tensor, *, length: int, **options: Any) -> list[list[int]]:
    """The texts that `generate` writes, the end among their tokens; those of n_best sequences one after another."""
    with torch.inference_mode():
        mask = (sources != PAD).long()
        found = peer.generate(
            sources,
            attention_mask=mask,
            max_new_tokens=length,
            do_sample=False,
            suppress_tokens=[PAD, START],
            **options,
        )
    return [row[: row.index(END) + 1] if END in row else row for row in found[:, 1:].tolist()]


def make_ctranslate2(model: Any, folder: Path, threads: int = 1) -> Any:
    """Our model, post- or pre-norm, as a Translator of CTranslate2 in float32, from a folder."""
    config = model.config
    spec: Any = TransformerSpec.from_config(
        (config.encoder_depth, config.decoder_depth), config.heads, pre_norm=config.norm == "pre"
    )
    table = sinusoid(torch.arange(config.length), config.width)
    for part, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        part.position_encodings.encodings = table.numpy()
        for own, layer in zip(part.layer, stack.layers, strict=True):
            fill_layer(own, layer)
        if config.norm == "pre":
            fill_norm(part.layer_norm, stack.norm)
    spec.encoder.embeddings[0].weight = model.source_embed.weight.detach().numpy()
    spec.decoder.embeddings.weight = model.target_embed.weight.detach().numpy()
    spec.decoder.projection.weight = model.output.weight.detach().numpy()
    spec.decoder.projection.bias = model.output.bias.detach().numpy()
    words = ["<pad>", "<s>", "</s>", "<unk>", *map(str, range(4, config.vocabulary))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    folder.mkdir(exist_ok=True)
    spec.save(str(folder))
    return ctranslate2.Translator(str(folder), compute_type="float32", inter_threads=1, intra_threads=threads)


def fill_layer(spec: Any, layer: Any) -> None:
    linears: list[tuple[Any, tuple[Any, ...]]] = [(spec.self_attention.linear, (layer.attn.qkv, layer.attn.proj))]
    linears.append(((spec.ffn.linear_0, spec.ffn.linear_1), (layer.mlp.fc1, layer.mlp.fc2)))
    norms = [(spec.self_attention, layer.norm1), (spec.ffn, layer.norm2)]
    if "attention" in vars(spec):  # a layer of the decoder
        linears.append((spec.attention.linear, (layer.cross.q, layer.cross.kv, layer.cross.proj)))
        norms = [(spec.self_attention, layer.norm1), (spec.attention, layer.norm2), (spec.ffn, layer.norm3)]
    for targets, modules in linears:
        for target, module in zip(targets, modules, strict=True):
            target.weight, target.bias = (each.detach().numpy() for each in (module.weight, module.bias))
    for target, module in norms:
        fill_norm(target.layer_norm, module)


def fill_norm(target: Any, module: Any) -> None:
    target.gamma, target.beta = module.weight.detach().numpy(), module.bias.detach().numpy()


def run_ctranslate2(peer: Any, sources: Tensor, *, length: int, **options: Any) -> list[list[list[int]]]:
    """The texts of each row that CTranslate2 writes, the best first, the end among their tokens."""
    words = [name_words([token for token in row if token != PAD]) for row in sources.tolist()]
    results = peer.translate_batch(
        words, min_decoding_length=0, max_decoding_length=length, return_end_token=True, max_input_length=0, **options
    )
    return [[read_words(text) for text in result.hypotheses] for result in results]


def name_words(tokens: Sequence[int]) -> list[str]:
    return ["</s>" if token == END else "<unk>" if token == 3 else str(token) for token in tokens]


def read_words(words: Sequence[str]) -> list[int]:
    return [END if word == "</s>" else 3 if word == "<unk>" else int(word) for word in words]
