"""Google's .npz files: the ViT authors', the same inside an optimiser's, big_vision's, its image towers, its scans."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import FIXED, HALF, TABLE_AT_STEM, Found, Layout, agreed, found, holds
from vitrail.checkpoint.names import SAME, Entry, Form, entry, to_theirs
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import write_whole

PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
POSITIONS, BIG_VISION_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"
OLD = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")  # numbered through
NEW = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")  # numbered by kind
ONLY = {
    "distilled": (False,),
    "registers": (0,),
    "pool": ("class", "mean", "map"),
    **TABLE_AT_STEM,
    "layer_scale": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def split_kernels(parts: int) -> Form:
    """(D, H, K) each of them, elsewhere; one matrix of `parts`·H·K rows here."""
    return Form(
        lambda each: torch.cat([kernel.reshape(kernel.shape[0], -1).T for kernel in each]),
        lambda matrix, heads: [part.T.reshape(matrix.shape[1], heads, -1) for part in matrix.chunk(parts)],
    )


def split_biases(parts: int) -> Form:
    return Form(
        lambda each: torch.cat([bias.reshape(-1) for bias in each]),
        lambda vector, heads: [part.reshape(heads, -1) for part in vector.chunk(parts)],
    )


DENSE = Form(lambda each: each[0].t(), lambda matrix, _: [matrix.T])
CONV = Form(lambda each: each[0].permute(3, 2, 0, 1), lambda kernel, _: [kernel.permute(2, 3, 1, 0)])
OUT = Form(  # (H, K, D)
    lambda each: each[0].reshape(-1, each[0].shape[-1]).T,
    lambda matrix, heads: [matrix.T.reshape(heads, -1, matrix.shape[0])],
)
GROUPS = Form(lambda each: each[0].reshape(-1), lambda vector, _: [vector.reshape(1, 1, 1, -1)])
INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Variant:
    """What the same model is called in one of Google's files."""

    prefix: str
    names: tuple[str, str, str, str]  # of a block's parts
    scanned: bool  # one tensor for all blocks
    positions: str

    def table(self, *, staged: bool) -> tuple[Entry, ...]:
        first, attention, second, mlp = (f"Transformer/encoderblock_#/{part}/" for part in self.names)
        return (
            entry("cls", "cls_token"),
            entry(self.positions, "pos_embed"),
            entry("embedding/kernel", "patch_embed.proj.weight", CONV),
            entry("embedding/bias", "patch_embed.proj.bias"),
            *norm(first, "blocks.#.norm1."),
            entry([f"{attention}{part}/kernel" for part in INPUTS], "blocks.#.attn.qkv.weight", split_kernels(3)),
            entry([f"{attention}{part}/bias" for part in INPUTS], "blocks.#.attn.qkv.bias", split_biases(3)),
            entry(f"{attention}out/kernel", "blocks.#.attn.proj.weight", OUT),
            entry(f"{attention}out/bias", "blocks.#.attn.proj.bias"),
            *norm(second, "blocks.#.norm2."),
            *dense(f"{mlp}Dense_0/", "blocks.#.mlp.fc1."),
            *dense(f"{mlp}Dense_1/", "blocks.#.mlp.fc2."),
            *norm("Transformer/encoder_norm/", "norm."),
            *pooling(),
            *dense("pre_logits/", "pre_logits."),
            *dense("head/", "head."),
            *resnet(staged),
        )


def norm(theirs: str, ours: str, form: Form = SAME) -> tuple[Entry, Entry]:
    return entry(f"{theirs}scale", f"{ours}weight", form), entry(f"{theirs}bias", f"{ours}bias", form)


def dense(theirs: str, ours: str) -> tuple[Entry, Entry]:
    return entry(f"{theirs}kernel", f"{ours}weight", DENSE), entry(f"{theirs}bias", f"{ours}bias")


def pooling() -> Iterator[Entry]:
    _, attention, _, mlp = (f"MAPHead_0/{part}/" for part in NEW)
    yield entry("MAPHead_0/probe", "attn_pool.latent")
    yield entry(f"{attention}query/kernel", "attn_pool.q.weight", split_kernels(1))
    yield entry(f"{attention}query/bias", "attn_pool.q.bias", split_biases(1))
    yield entry([f"{attention}{part}/kernel" for part in INPUTS[1:]], "attn_pool.kv.weight", split_kernels(2))
    yield entry([f"{attention}{part}/bias" for part in INPUTS[1:]], "attn_pool.kv.bias", split_biases(2))
    yield entry(f"{attention}out/kernel", "attn_pool.proj.weight", OUT)
    yield entry(f"{attention}out/bias", "attn_pool.proj.bias")
    yield from norm("MAPHead_0/LayerNorm_0/", "attn_pool.norm.")
    yield from dense(f"{mlp}Dense_0/", "attn_pool.mlp.fc1.")
    yield from dense(f"{mlp}Dense_1/", "attn_pool.mlp.fc2.")


def resnet(staged: bool) -> Iterator[Entry]:
    """A root and stages; a root alone has shorter names here."""
    unit, ours = "block%/unit%/", "patch_embed.backbone.stages.#.blocks.#."
    root = "patch_embed.backbone.stem." if staged else "patch_embed.backbone."
    yield entry("conv_root/kernel", f"{root}conv.weight", CONV)
    yield from norm("gn_root/", f"{root}norm.", GROUPS)
    for n in (1, 2, 3):
        yield entry(f"{unit}conv{n}/kernel", f"{ours}conv{n}.weight", CONV)
        yield from norm(f"{unit}gn{n}/", f"{ours}norm{n}.", GROUPS)
    yield entry(f"{unit}conv_proj/kernel", f"{ours}downsample.conv.weight", CONV)
    yield from norm(f"{unit}gn_proj/", f"{ours}downsample.norm.", GROUPS)


def prefix_of(contents: Contents) -> str | None:
    return next((p for p in PREFIXES if f"{p}embedding/kernel" in contents.tensors), None)


def matches(contents: Contents) -> bool:
    return prefix_of(contents) is not None


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    prefix = prefix_of(contents)
    if prefix is None:
        raise CheckpointError(f"{contents.path} has no embedding/kernel; expected a Google ViT")
    inside = {n.removeprefix(prefix): tensor for n, tensor in contents.tensors.items() if n.startswith(prefix)}
    scanned = "Transformer/encoderblock/LayerNorm_0/scale" in inside
    old = any(name.endswith(f"{OLD[1]}/query/kernel") for name in inside)
    positions = BIG_VISION_POSITIONS if BIG_VISION_POSITIONS in inside else POSITIONS
    variant = Variant(prefix, OLD if old else NEW, scanned, positions)
    if scanned:
        inside = unscanned(inside)
    query = inside.get(f"Transformer/encoderblock_0/{variant.names[1]}/query/kernel")
    if query is None or query.ndim != 3:
        raise CheckpointError(f"{contents.path} has no attention of three dimensions; expected a Google ViT")
    if positions not in inside:
        raise CheckpointError(
            f"{contents.path} has no {positions}; expected learned positions (big_vision can fix them)"
        )
    hybrid = "conv_root/kernel" in inside
    own: dict[str, Any] = {"activation": "gelu_tanh", "constants": "google"}
    result = found(
        contents,
        inside,
        variant.table(staged="block1/unit1/conv1/kernel" in inside),
        layout="google",
        family="hybrid" if hybrid else "vit",
        known={**own, **agreed({"heads": query.shape[1]}, known)},
        policy="google",
        preprocessing=preprocessing,
        ignore="t|b|step|extra/.*",
        fixed=FIXED,
        variant={"prefix": prefix, "numbered through": old, "scanned": scanned, "positions": positions},
    )
    others = tuple(name for name in contents.tensors if not name.startswith(prefix))
    return replace(result, ignored=(*result.ignored, *others))


def unscanned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for all layers becomes one a layer."""
    apart = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch("Transformer/encoderblock/(.*)", name)
        if match is None:
            apart[name] = tensor
        else:
            layers = tensor.unbind() if tensor.ndim else ()
            apart |= {f"Transformer/encoderblock_{layer}/{match[1]}": each for layer, each in enumerate(layers)}
    return apart


def scanned_again(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    joined = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name)
        if match is None:
            joined[name] = tensor
        elif match[1] == "0":
            layers = [tensors[f"Transformer/encoderblock_{layer}/{match[2]}"] for layer in range(depth)]
            joined[f"Transformer/encoderblock/{match[2]}"] = torch.stack(layers)
    return joined


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As its authors evaluate: both sides resized at once, nothing cropped."""
    return Preprocessing(image_size=config["image_size"], crop=1.0, fit="squash", interpolation="bilinear", **HALF)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """An .npz of the form that the model was read from; else the ViT authors', or big_vision's where it must be."""
    config = description.config
    holds("google", config, ONLY)
    if config.get("pool", "class") != "class":
        holds("google", config, {"class_token": (False,)})
    if path.suffix != ".npz":
        raise CheckpointError(f"{path} ends in {path.suffix!r}; expected a file .npz")
    variant = variant_for(description)
    table = variant.table(staged=bool(config.get("stages")))
    renamed = to_theirs(tensors, table, config["heads"])
    if variant.scanned:
        renamed = scanned_again(renamed, config["depth"])
    arrays = {variant.prefix + name: to_array(tensor) for name, tensor in renamed.items()}

    def save(place: Path) -> None:
        with place.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_whole(path, save)
    return {"activation": "gelu_tanh", "constants": "google", "norm_eps": 1e-6}


def variant_for(description: Description) -> Variant:
    """Class tokens without a position, and pools other than by class, are big_vision's alone."""
    config = description.config
    bare = config.get("class_token", True) and not config.get("prefix_positions", True)
    big = bare or config.get("pool") == "map"
    default = Variant("params/", NEW, False, BIG_VISION_POSITIONS) if big else Variant("", OLD, False, POSITIONS)
    source = description.provenance.get("source")
    if not isinstance(source, Mapping) or source.get("layout") != "google" or source.get("prefix") not in PREFIXES:
        return default
    before = Variant(
        source["prefix"],
        OLD if source.get("numbered through") else NEW,
        bool(source.get("scanned")),
        BIG_VISION_POSITIONS if source.get("positions") == BIG_VISION_POSITIONS else POSITIONS,
    )
    return before if before.positions == default.positions or not config.get("class_token", True) else default


def to_array(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


LAYOUT = Layout(name="google", matches=matches, read=read, write=write)
