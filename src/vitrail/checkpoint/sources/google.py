"""Google's .npz files: of the ViT authors, with optimizer state, of big_vision, its image towers and scanned models."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import IDENTITY, NameEntry, TensorTransform, convert_to_their_tensors, make_entry
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError
from vitrail.files import write_atomically

PREFIXES = ("", "opt/target/", "params/", "params/img/", "img/")
POSITIONS, BIG_VISION_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"
# numbered consecutively, and by type
OLD_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
NEW_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
SUPPORTED_VALUES = {
    "distilled": (False,),
    "registers": (0,),
    "pool": ("class", "mean", "map"),
    **layout.STEM_POSITION_VALUES,
    "layer_scale": (None,),
    "qkv_bias": (True,),
    "activation": ("gelu", "gelu_tanh"),
}


def make_split_kernel_transform(parts: int) -> TensorTransform:
    """`parts` kernels (D, H, K) in the layout; one matrix of `parts`·H·K rows in ours."""
    return TensorTransform(
        lambda each: torch.cat([kernel.reshape(kernel.shape[0], -1).T for kernel in each]),
        lambda matrix, heads: [part.T.reshape(matrix.shape[1], heads, -1) for part in matrix.chunk(parts)],
    )


def make_split_bias_transform(parts: int) -> TensorTransform:
    return TensorTransform(
        lambda each: torch.cat([bias.reshape(-1) for bias in each]),
        lambda vector, heads: [part.reshape(heads, -1) for part in vector.chunk(parts)],
    )


DENSE_TRANSFORM = TensorTransform(lambda each: each[0].t(), lambda matrix, _: [matrix.T])
CONV_TRANSFORM = TensorTransform(
    lambda each: each[0].permute(3, 2, 0, 1), lambda kernel, _: [kernel.permute(2, 3, 1, 0)]
)
OUTPUT_TRANSFORM = TensorTransform(  # (H, K, D)
    lambda each: each[0].reshape(-1, each[0].shape[-1]).T,
    lambda matrix, heads: [matrix.T.reshape(heads, -1, matrix.shape[0])],
)
GROUP_NORM_TRANSFORM = TensorTransform(
    lambda each: each[0].reshape(-1), lambda vector, _: [vector.reshape(1, 1, 1, -1)]
)
QKV_NAMES = ("query", "key", "value")


@dataclass(frozen=True)
class GoogleVariant:
    """Names of the tensors in one kind of Google's files."""

    prefix: str
    part_names: tuple[str, str, str, str]  # of the parts of a block
    scanned: bool  # one stacked tensor for all blocks
    positions: str

    def make_name_table(self, *, staged: bool) -> tuple[NameEntry, ...]:
        first, attention, second, mlp = (f"Transformer/encoderblock_#/{part}/" for part in self.part_names)
        return (
            make_entry("cls", "cls_token"),
            make_entry(self.positions, "pos_embed"),
            make_entry("embedding/kernel", "patch_embed.proj.weight", CONV_TRANSFORM),
            make_entry("embedding/bias", "patch_embed.proj.bias"),
            *norm_entries(first, "blocks.#.norm1."),
            make_entry(
                [f"{attention}{part}/kernel" for part in QKV_NAMES],
                "blocks.#.attn.qkv.weight",
                make_split_kernel_transform(3),
            ),
            make_entry(
                [f"{attention}{part}/bias" for part in QKV_NAMES],
                "blocks.#.attn.qkv.bias",
                make_split_bias_transform(3),
            ),
            make_entry(f"{attention}out/kernel", "blocks.#.attn.proj.weight", OUTPUT_TRANSFORM),
            make_entry(f"{attention}out/bias", "blocks.#.attn.proj.bias"),
            *norm_entries(second, "blocks.#.norm2."),
            *dense_entries(f"{mlp}Dense_0/", "blocks.#.mlp.fc1."),
            *dense_entries(f"{mlp}Dense_1/", "blocks.#.mlp.fc2."),
            *norm_entries("Transformer/encoder_norm/", "norm."),
            *attention_pool_entries(),
            *dense_entries("pre_logits/", "pre_logits."),
            *dense_entries("head/", "head."),
            *resnet_entries(staged),
        )


def norm_entries(theirs: str, ours: str, transform: TensorTransform = IDENTITY) -> tuple[NameEntry, NameEntry]:
    weight = make_entry(f"{theirs}scale", f"{ours}weight", transform)
    return weight, make_entry(f"{theirs}bias", f"{ours}bias", transform)


def dense_entries(theirs: str, ours: str) -> tuple[NameEntry, NameEntry]:
    return make_entry(f"{theirs}kernel", f"{ours}weight", DENSE_TRANSFORM), make_entry(f"{theirs}bias", f"{ours}bias")


def attention_pool_entries() -> Iterator[NameEntry]:
    _, attention, _, mlp = (f"MAPHead_0/{part}/" for part in NEW_PART_NAMES)
    yield make_entry("MAPHead_0/probe", "attn_pool.latent")
    yield make_entry(f"{attention}query/kernel", "attn_pool.q.weight", make_split_kernel_transform(1))
    yield make_entry(f"{attention}query/bias", "attn_pool.q.bias", make_split_bias_transform(1))
    yield make_entry(
        [f"{attention}{part}/kernel" for part in QKV_NAMES[1:]], "attn_pool.kv.weight", make_split_kernel_transform(2)
    )
    yield make_entry(
        [f"{attention}{part}/bias" for part in QKV_NAMES[1:]], "attn_pool.kv.bias", make_split_bias_transform(2)
    )
    yield make_entry(f"{attention}out/kernel", "attn_pool.proj.weight", OUTPUT_TRANSFORM)
    yield make_entry(f"{attention}out/bias", "attn_pool.proj.bias")
    yield from norm_entries("MAPHead_0/LayerNorm_0/", "attn_pool.norm.")
    yield from dense_entries(f"{mlp}Dense_0/", "attn_pool.mlp.fc1.")
    yield from dense_entries(f"{mlp}Dense_1/", "attn_pool.mlp.fc2.")


def resnet_entries(staged: bool) -> Iterator[NameEntry]:
    """Root and stages of the ResNet; our names of a root without stages are shorter."""
    unit, ours = "block%/unit%/", "patch_embed.backbone.stages.#.blocks.#."
    root = "patch_embed.backbone.stem." if staged else "patch_embed.backbone."
    yield make_entry("conv_root/kernel", f"{root}conv.weight", CONV_TRANSFORM)
    yield from norm_entries("gn_root/", f"{root}norm.", GROUP_NORM_TRANSFORM)
    for n in (1, 2, 3):
        yield make_entry(f"{unit}conv{n}/kernel", f"{ours}conv{n}.weight", CONV_TRANSFORM)
        yield from norm_entries(f"{unit}gn{n}/", f"{ours}norm{n}.", GROUP_NORM_TRANSFORM)
    yield make_entry(f"{unit}conv_proj/kernel", f"{ours}downsample.conv.weight", CONV_TRANSFORM)
    yield from norm_entries(f"{unit}gn_proj/", f"{ours}downsample.norm.", GROUP_NORM_TRANSFORM)


def find_tensor_name_prefix(contents: RawContents) -> str | None:
    return next((p for p in PREFIXES if f"{p}embedding/kernel" in contents.tensors), None)


def matches(contents: RawContents) -> bool:
    return find_tensor_name_prefix(contents) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    prefix = find_tensor_name_prefix(contents)
    if prefix is None:
        raise CheckpointError(f"{contents.path} has no embedding/kernel; expected a ViT of Google")
    tensors = {n.removeprefix(prefix): tensor for n, tensor in contents.tensors.items() if n.startswith(prefix)}
    scanned = "Transformer/encoderblock/LayerNorm_0/scale" in tensors
    old = any(name.endswith(f"{OLD_PART_NAMES[1]}/query/kernel") for name in tensors)
    positions = BIG_VISION_POSITIONS if BIG_VISION_POSITIONS in tensors else POSITIONS
    variant = GoogleVariant(prefix, OLD_PART_NAMES if old else NEW_PART_NAMES, scanned, positions)
    if scanned:
        tensors = unstack_layers(tensors)
    query = tensors.get(f"Transformer/encoderblock_0/{variant.part_names[1]}/query/kernel")
    if query is None or query.ndim != 3:
        raise CheckpointError(f"{contents.path} has no query kernel of 3 dimensions; expected a ViT of Google")
    if positions not in tensors:
        raise CheckpointError(
            f"{contents.path} has no {positions}; expected learned positions, not the fixed ones of big_vision"
        )
    owner_fields: dict[str, Any] = {"activation": "gelu_tanh", "constants": "google"}
    model = layout.UntranslatedModel(
        layout="google",
        family="hybrid" if "conv_root/kernel" in tensors else "vit",
        tensors=tensors,
        table=variant.make_name_table(staged="block1/unit1/conv1/kernel" in tensors),
        known={**owner_fields, **layout.merge_agreeing_fields({"heads": query.shape[1]}, known)},
        policy="google",
        preprocessing=make_preprocessing,
        ignore="t|b|step|extra/.*",
        fixed_fields=layout.OWNER_FIXED_FIELDS,
        variant={"prefix": prefix, "numbered through": old, "scanned": scanned, "positions": positions},
    )
    translated = layout.translate_checkpoint(contents, model)
    others = tuple(name for name in contents.tensors if not name.startswith(prefix))
    return replace(translated, ignored=(*translated.ignored, *others))


def unstack_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split tensors that are stacked over all layers into one per layer."""
    unstacked = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch("Transformer/encoderblock/(.*)", name)
        if match is None:
            unstacked[name] = tensor
        else:
            layers = tensor.unbind() if tensor.ndim else ()
            unstacked |= {f"Transformer/encoderblock_{layer}/{match[1]}": each for layer, each in enumerate(layers)}
    return unstacked


def stack_layers(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    stacked = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"Transformer/encoderblock_(\d+)/(.*)", name)
        if match is None:
            stacked[name] = tensor
        elif match[1] == "0":
            layers = [tensors[f"Transformer/encoderblock_{layer}/{match[2]}"] for layer in range(depth)]
            stacked[f"Transformer/encoderblock/{match[2]}"] = torch.stack(layers)
    return stacked


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """As its authors evaluate: the image is squashed to the size, without a crop."""
    return Preprocessing(
        image_size=config["image_size"], crop=1.0, fit="squash", interpolation="bilinear", **layout.HALF_MEAN_STD
    )


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    """Write an .npz of the kind that the model was read from; else of the ViT authors, or of big_vision if needed."""
    config = description.config
    layout.check_representable("google", config, SUPPORTED_VALUES)
    if config.get("pool", "class") != "class":
        layout.check_representable("google", config, {"class_token": (False,)})
    if path.suffix != ".npz":
        raise CheckpointError(f"{path} has the suffix {path.suffix!r}; expected a file .npz")
    variant = choose_variant_for_writing(description)
    table = variant.make_name_table(staged=bool(config.get("stages")))
    renamed = convert_to_their_tensors(tensors, table, config["heads"])
    if variant.scanned:
        renamed = stack_layers(renamed, config["depth"])
    arrays = {variant.prefix + name: array_from_tensor(tensor) for name, tensor in renamed.items()}

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, save)
    return {"activation": "gelu_tanh", "constants": "google", "norm_eps": 1e-6}


def choose_variant_for_writing(description: Description) -> GoogleVariant:
    """The variant that the model was read from, if it still fits; else a default one.

    Only big_vision has class tokens without a position, and the pool "map".
    """
    config = description.config
    default = GoogleVariant("", OLD_PART_NAMES, False, POSITIONS)
    unpositioned = config.get("class_token", True) and not config.get("prefix_positions", True)
    if unpositioned or config.get("pool") == "map":
        default = GoogleVariant("params/", NEW_PART_NAMES, False, BIG_VISION_POSITIONS)
    source = description.provenance.get("source")
    if not isinstance(source, Mapping) or source.get("layout") != "google" or source.get("prefix") not in PREFIXES:
        return default
    original = GoogleVariant(
        source["prefix"],
        OLD_PART_NAMES if source.get("numbered through") else NEW_PART_NAMES,
        bool(source.get("scanned")),
        BIG_VISION_POSITIONS if source.get("positions") == BIG_VISION_POSITIONS else POSITIONS,
    )
    return original if original.positions == default.positions or not config.get("class_token", True) else default


def array_from_tensor(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view("V2")
    return tensor.numpy()


LAYOUT = layout.Layout(name="google", matches=matches, read=read, write=write)
