"""Names and arrangements of tensors in Google's files, which were written by Flax; for ViTs and their ResNet stems."""

import torch

from vitrail.models.base.checkpoint_side import IDENTITY, NameEntry, TensorTransform, make_entry

OLD_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")  # of a block: numbered
NEW_PART_NAMES = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")  # through, and by type
POSITIONS, BIG_VISION_POSITIONS = "Transformer/posembed_input/pos_embedding", "pos_embedding"
QKV_NAMES = ("query", "key", "value")


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


def make_norm_entries(theirs: str, ours: str, transform: TensorTransform = IDENTITY) -> tuple[NameEntry, ...]:
    weight = make_entry(f"{theirs}scale", f"{ours}weight", transform)
    return weight, make_entry(f"{theirs}bias", f"{ours}bias", transform)


def make_dense_entries(theirs: str, ours: str) -> tuple[NameEntry, ...]:
    return make_entry(f"{theirs}kernel", f"{ours}weight", DENSE_TRANSFORM), make_entry(f"{theirs}bias", f"{ours}bias")


def make_split_entries(theirs: str, names: tuple[str, ...], ours: str) -> tuple[NameEntry, ...]:
    """Kernels and biases of queries, keys or values, which are one matrix and one vector in ours."""
    kernels, biases = ([f"{theirs}{name}/{kind}" for name in names] for kind in ("kernel", "bias"))
    return (
        make_entry(kernels, f"{ours}weight", make_split_kernel_transform(len(names))),
        make_entry(biases, f"{ours}bias", make_split_bias_transform(len(names))),
    )


def make_output_entries(theirs: str, ours: str) -> tuple[NameEntry, ...]:
    weight = make_entry(f"{theirs}out/kernel", f"{ours}weight", OUTPUT_TRANSFORM)
    return weight, make_entry(f"{theirs}out/bias", f"{ours}bias")


def make_block_entries(part_names: tuple[str, ...]) -> tuple[NameEntry, ...]:
    first, attention, second, mlp = (f"Transformer/encoderblock_#/{part}/" for part in part_names)
    return (
        *make_norm_entries(first, "blocks.#.norm1."),
        *make_split_entries(attention, QKV_NAMES, "blocks.#.attn.qkv."),
        *make_output_entries(attention, "blocks.#.attn.proj."),
        *make_norm_entries(second, "blocks.#.norm2."),
        *make_dense_entries(f"{mlp}Dense_0/", "blocks.#.mlp.fc1."),
        *make_dense_entries(f"{mlp}Dense_1/", "blocks.#.mlp.fc2."),
    )


def make_attention_pool_entries() -> tuple[NameEntry, ...]:
    norm, attention, _, mlp = (f"MAPHead_0/{part}/" for part in NEW_PART_NAMES)
    return (
        make_entry("MAPHead_0/probe", "attn_pool.latent"),
        *make_split_entries(attention, QKV_NAMES[:1], "attn_pool.q."),
        *make_split_entries(attention, QKV_NAMES[1:], "attn_pool.kv."),
        *make_output_entries(attention, "attn_pool.proj."),
        *make_norm_entries(norm, "attn_pool.norm."),
        *make_dense_entries(f"{mlp}Dense_0/", "attn_pool.mlp.fc1."),
        *make_dense_entries(f"{mlp}Dense_1/", "attn_pool.mlp.fc2."),
    )


def make_resnet_entries(root: str) -> tuple[NameEntry, ...]:
    """Root, which is `root` in our names, and stages of a ResNet stem."""
    unit, ours = "block%/unit%/", "patch_embed.backbone.stages.#.blocks.#."
    parts = {f"{n}": (f"{ours}conv{n}.", f"{ours}norm{n}.") for n in (1, 2, 3)}
    parts["_proj"] = (f"{ours}downsample.conv.", f"{ours}downsample.norm.")
    return (
        make_entry("conv_root/kernel", f"{root}conv.weight", CONV_TRANSFORM),
        *make_norm_entries("gn_root/", f"{root}norm.", GROUP_NORM_TRANSFORM),
        *(make_entry(f"{unit}conv{n}/kernel", f"{conv}weight", CONV_TRANSFORM) for n, (conv, _) in parts.items()),
        *(
            row
            for n, each in parts.items()
            for row in make_norm_entries(f"{unit}gn{n}/", each[1], GROUP_NORM_TRANSFORM)
        ),
    )


ENCODER_TABLE = (
    make_entry("cls", "cls_token"),
    make_entry(POSITIONS, "pos_embed"),
    make_entry(BIG_VISION_POSITIONS, "pos_embed"),
    make_entry("embedding/kernel", "patch_embed.proj.weight", CONV_TRANSFORM),
    make_entry("embedding/bias", "patch_embed.proj.bias"),
    *make_block_entries(OLD_PART_NAMES),
    *make_block_entries(NEW_PART_NAMES),
    *make_norm_entries("Transformer/encoder_norm/", "norm."),
    *make_attention_pool_entries(),
    *make_dense_entries("pre_logits/", "pre_logits."),
    *make_dense_entries("head/", "head."),
)
