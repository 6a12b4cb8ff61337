"""Checkpoints of Swin and Swin-V2: the config from shapes, and the names in timm, torchvision and transformers.

H heads, r×c tokens of a window, D width.
"""

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.name_entries import (
    THREE_PARTS,
    TWO_PARTS,
    NameEntry,
    TensorTransform,
    make_entry,
    make_same_name_entries,
)
from vitrail.models.names.hf_names import make_hf_heading
from vitrail.models.names.tensor_shapes import count_classes, count_stage_blocks, get_tensor_shape
from vitrail.models.parts.qv_bias import QV_IN_QKV

BLOCK = "layers.#.blocks.#."
TABLE, MLP, QV_BIAS = "attn.position_bias.table", "attn.position_bias.mlp.#.*", "attn.qkv.qv_bias"
DEFAULT_WINDOW = {1: 7, 2: 8}  # by version; the weights of version 2 fit any window
COMPUTED = r".*\.(relative_position_index|relative_coords_table|attn_mask)"  # tensors that follow from the config
MAX_STAGES = 4  # of torchvision's names, which count stages and what is between them together


def offsets_to_ours(parts: list[Tensor]) -> Tensor:
    """Of query − key, ((2r−1)·(2c−1), H) → of key − query, (H, 2r−1, 2c−1), for square windows."""
    side_length = isqrt(len(parts[0]))
    return parts[0].T.reshape(-1, side_length, side_length).flip(1, 2)


OFFSETS = TensorTransform(offsets_to_ours, lambda table, _: [table.flip(1, 2).flatten(1).T])


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """Version 1 has a table of offsets in each window; of version 2, the size of the windows is not in the weights."""
    width, channels, *patch = get_tensor_shape(shapes, "patch_embed.proj.weight", 4)
    stages = count_stage_blocks(shapes, r"layers\.(\d+)\.", r"layers\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"layers.{stage}.blocks.0." for stage in range(len(stages))]
    version = 2 if f"{first[0]}attn.logit_scale" in shapes else 1
    tables = [get_tensor_shape(shapes, f"{name}{TABLE}", 3) for name in first] if version == 1 else []
    scales = [get_tensor_shape(shapes, f"{name}attn.logit_scale", 3) for name in first] if version == 2 else []
    windows = tuple((table[1] + 1) // 2 for table in tables) or (DEFAULT_WINDOW[version],) * len(stages)
    stride = [pixels * 2 ** (len(stages) - 1) for pixels in patch]
    return side.InferredConfig(
        fields={
            "image_size": (windows[-1] * stride[0], windows[-1] * stride[1]),  # one window at the end
            "patch_size": tuple(patch),
            "channels": channels,
            "classes": count_classes(shapes, "head.weight"),
            "version": version,
            "stages": stages,
            "widths": tuple(get_tensor_shape(shapes, f"{name}attn.proj.weight", 2)[0] for name in first),
            "heads": tuple(shape[0] for shape in tables or scales),
            "windows": windows,
            "mlp_ratio": get_tensor_shape(shapes, f"{first[0]}mlp.fc1.weight", 2)[0] / width,
        },
        certain=frozenset({"version"}),
    )


def describe_sizes(config: side.ConfigFields, library: str) -> dict[str, Any]:
    """The arguments that timm and transformers share; both know one width, which doubles."""
    widths = config["widths"]
    if any(width != widths[0] * 2**stage for stage, width in enumerate(widths)):
        raise CheckpointError(f"widths is {widths}, which {library} cannot represent; expected each twice the last")
    patch = config["patch_size"]
    return {
        "patch_size": patch[0] if patch[0] == patch[1] else patch,
        "embed_dim": widths[0],
        "depths": config["stages"],
        "num_heads": config["heads"],
        "mlp_ratio": config["mlp_ratio"],
        **(
            {"pretrained_window_sizes": config["trained_windows"] or (0,) * len(widths)}
            if config["version"] == 2
            else {}
        ),
    }


def find_one_window(config: side.ConfigFields, library: str) -> int:
    """The window of all stages; an error if they differ, or if the last grid is smaller than a window."""
    windows, scale = set(config["windows"]), 2 ** (len(config["stages"]) - 1)
    smallest = min(
        -(-size // (patch * scale)) for size, patch in zip(config["image_size"], config["patch_size"], strict=True)
    )
    if len(windows) > 1 or min(windows) > smallest:
        raise CheckpointError(
            f"windows is {config['windows']} and the last grid has {smallest} rows or columns, which {library} cannot "
            "represent; expected one window, no larger than that"
        )
    return windows.pop()


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {"img_size": config["image_size"], "in_chans": config["channels"], "window_size": config["windows"]}
    arguments |= describe_sizes(config, "timm")
    name = "swin_tiny_patch4_window7_224" if config["version"] == 1 else "swinv2_tiny_window8_256"
    return {"architecture": name, "num_classes": config["classes"], "model_args": arguments}


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    name = "Swin" if config["version"] == 1 else "Swinv2"
    return make_hf_heading(config, name.lower(), name) | {
        "window_size": find_one_window(config, "transformers"),
        **describe_sizes(config, "transformers"),
        "qkv_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": config["dropout"],
        "attention_probs_dropout_prob": config["attention_dropout"],
        "drop_path_rate": config["stochastic_depth"],
        "dtype": "float32",
    }


def make_torchvision_buffers(config: side.ConfigFields) -> dict[str, Tensor]:
    """The index of each pair's offset, and of version 2 the offsets, which torchvision stores in every block."""
    window = find_one_window(config, "torchvision")
    place = (torch.arange(window)[:, None] * (2 * window - 1) + torch.arange(window)).flatten()
    index = (place[:, None] - place + (window - 1) * 2 * window).flatten()
    steps = torch.arange(1 - window, window).float() / max(window - 1, 1) * 8
    offsets = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), dim=-1)[None]
    offsets = offsets.sign() * (offsets.abs() + 1).log2() / 3
    buffers = dict[str, Tensor]()
    for stage, depth in enumerate(config["stages"]):
        for block in range(depth):
            name = f"features.{2 * stage + 1}.{block}.attn."
            buffers[f"{name}relative_position_index"] = index
            if config["version"] == 2:
                buffers[f"{name}relative_coords_table"] = offsets
    return buffers


RESIZED = {  # the short side before the crop, by version, width and depth
    (1, 96, 6): 232,
    (1, 96, 18): 246,
    (1, 128, 18): 238,
    (2, 96, 6): 260,
    (2, 96, 18): 260,
    (2, 128, 18): 272,
}


def find_torchvision_crop(config: side.ConfigFields) -> float:
    size = config["image_size"][0]
    return size / RESIZED.get((config["version"], config["widths"][0], max(config["stages"])), size)


SAME_PARTS = ("norm1.*", "norm2.*", "attn.proj.*", "attn.qkv.*", "mlp.fc#.*", "attn.logit_scale")
TIMM_BLOCKS = (
    *make_same_name_entries(*(BLOCK + part for part in SAME_PARTS)),
    make_entry(f"{BLOCK}attn.relative_position_bias_table", BLOCK + TABLE, OFFSETS),
    make_entry([f"{BLOCK}attn.q_bias", f"{BLOCK}attn.v_bias"], BLOCK + QV_BIAS, TWO_PARTS),
    make_entry(f"{BLOCK}attn.cpb_mlp.#.*", BLOCK + MLP),
    *make_same_name_entries("patch_embed.proj.*", "norm.*"),
    make_entry("patch_embed.norm.*", "patch_norm.*"),
)
MERGES = ("norm.*", "reduction.weight")
TIMM_TABLE = (
    *TIMM_BLOCKS,
    make_entry("head.fc.*", "head.*"),
    *make_same_name_entries(*(f"layers.#.downsample.{part}" for part in MERGES)),
)
AUTHORS_TABLE = (
    *TIMM_BLOCKS,
    make_entry("head.*", "head.*"),
    *(make_entry(f"layers.~.downsample.{part}", f"layers.#.downsample.{part}") for part in MERGES),
)
TIMM_ARGUMENTS = (
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depths", "num_heads", "window_size"),
    *("mlp_ratio", "pretrained_window_sizes", "drop_path_rate"),
)


def make_torchvision_table(version: int) -> tuple[NameEntry, ...]:
    """Stages have odd numbers, what merges the tokens before them even ones."""
    rows = [make_entry("features.0.0.*", "patch_embed.proj.*"), make_entry("features.0.2.*", "patch_norm.*")]
    for stage in range(MAX_STAGES):
        theirs, ours = f"features.{2 * stage + 1}.#.", f"layers.{stage}.blocks.#."
        rows += [make_entry(theirs + part, ours + part) for part in ("norm1.*", "norm2.*", "attn.proj.*")]
        rows += [make_entry(f"{theirs}mlp.{n}.*", f"{ours}mlp.fc{m}.*") for n, m in ((0, 1), (3, 2))]
        rows += [make_entry(f"features.{2 * stage}.{part}", f"layers.{stage}.downsample.{part}") for part in MERGES]
        rows.append(make_entry(f"{theirs}attn.qkv.weight", f"{ours}attn.qkv.weight"))
        if version == 1:
            rows.append(make_entry(f"{theirs}attn.qkv.bias", f"{ours}attn.qkv.bias"))
            rows.append(make_entry(f"{theirs}attn.relative_position_bias_table", ours + TABLE, OFFSETS))
        else:
            rows.append(make_entry(f"{theirs}attn.qkv.bias", ours + QV_BIAS, QV_IN_QKV))
            rows.append(make_entry(f"{theirs}attn.logit_scale", f"{ours}attn.logit_scale"))
            rows.append(make_entry(f"{theirs}attn.cpb_mlp.#.*", ours + MLP))
    return (*rows, *make_same_name_entries("norm.*", "head.*"))


HF_BLOCK, HF_PARTS = "encoder.layers.#.blocks.#.", ("query", "key", "value")
HF_TABLE = (
    make_entry("embeddings.patch_embeddings.projection.*", "patch_embed.proj.*"),
    make_entry("embeddings.norm.*", "patch_norm.*"),
    make_entry("layernorm.*", "norm.*"),
    make_entry("classifier.*", "head.*"),
    make_entry(f"{HF_BLOCK}layernorm_before.*", f"{BLOCK}norm1.*"),
    make_entry(f"{HF_BLOCK}layernorm_after.*", f"{BLOCK}norm2.*"),
    make_entry(f"{HF_BLOCK}attention.output.dense.*", f"{BLOCK}attn.proj.*"),
    make_entry(f"{HF_BLOCK}intermediate.dense.*", f"{BLOCK}mlp.fc1.*"),
    make_entry(f"{HF_BLOCK}output.dense.*", f"{BLOCK}mlp.fc2.*"),
    *(make_entry(f"encoder.layers.~.downsample.{part}", f"layers.#.downsample.{part}") for part in MERGES),
)
HF_TABLE_1 = (
    *HF_TABLE,
    make_entry([f"{HF_BLOCK}attention.self.{part}.*" for part in HF_PARTS], f"{BLOCK}attn.qkv.*", THREE_PARTS),
    make_entry(f"{HF_BLOCK}attention.self.relative_position_bias_table", BLOCK + TABLE, OFFSETS),
    # in memory since v5
    make_entry([f"{HF_BLOCK}attention.{part}_proj.*" for part in "qkv"], f"{BLOCK}attn.qkv.*", THREE_PARTS),
    make_entry(f"{HF_BLOCK}attention.o_proj.*", f"{BLOCK}attn.proj.*"),
    make_entry(f"{HF_BLOCK}attention.relative_position_bias.relative_position_bias_table", BLOCK + TABLE, OFFSETS),
    make_entry(f"{HF_BLOCK}mlp.fc#.*", f"{BLOCK}mlp.fc#.*"),
)
HF_TABLE_2 = (
    *HF_TABLE,
    make_entry(
        [f"{HF_BLOCK}attention.self.{part}.weight" for part in HF_PARTS], f"{BLOCK}attn.qkv.weight", THREE_PARTS
    ),
    make_entry([f"{HF_BLOCK}attention.self.{part}.bias" for part in ("query", "value")], BLOCK + QV_BIAS, TWO_PARTS),
    make_entry(f"{HF_BLOCK}attention.self.logit_scale", f"{BLOCK}attn.logit_scale"),
    make_entry(f"{HF_BLOCK}attention.self.continuous_position_bias_mlp.#.*", BLOCK + MLP),
)


def make_timm_source(table: tuple[NameEntry, ...], *markers: str) -> side.SourceNames:
    return side.SourceNames(
        layout="timm",
        table=table,
        markers=("patch_embed.norm.weight", "layers.0.blocks.0.attn.proj.weight", *markers),
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "ignored": COMPUTED,
            "model_args": TIMM_ARGUMENTS,
            "argument_fields": {
                "window_size": "windows",
                "pretrained_window_sizes": "trained_windows",
                "img_size": "image_size",
            },
            "preset_fields": ("windows", "trained_windows"),
            "pretrained_cfg": {"crop_pct": 0.9},
        },
    )


def make_torchvision_source(version: int, marker: str) -> side.SourceNames:
    return side.SourceNames(
        layout="torchvision",
        table=make_torchvision_table(version),
        markers=("features.0.0.weight", marker),
        accepts=lambda config: config["version"] == version,
        supported={"channels": (3,), "trained_windows": (None,), "number of stages": tuple(range(1, MAX_STAGES + 1))},
        details={"ignored": COMPUTED, "buffers": make_torchvision_buffers, "crop": find_torchvision_crop},
    )


def make_hf_source(version: int, table: tuple[NameEntry, ...], *markers: str) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=table,
        markers=("embeddings.norm.weight", f"{HF_BLOCK}layernorm_before.weight", *markers),
        accepts=lambda config: config["version"] == version,
        card=make_hf_card,
        details={
            "model_type": "swin" if version == 1 else "swinv2",
            "norm_eps": 1e-5,
            "imagenet_mean": True,
            "preprocessing": {"interpolation": "bicubic"},
            "ignored": COMPUTED,
            "argument_fields": {
                "num_heads": "heads",
                "window_size": "windows",
                "pretrained_window_sizes": "trained_windows",
            },
        },
    )


SOURCES = (
    make_timm_source(TIMM_TABLE),
    make_timm_source(AUTHORS_TABLE, "layers.0.downsample.reduction.weight"),
    make_torchvision_source(1, "features.1.0.attn.relative_position_bias_table"),
    make_torchvision_source(2, "features.1.0.attn.cpb_mlp.0.weight"),
    make_hf_source(1, HF_TABLE_1),
    make_hf_source(2, HF_TABLE_2, f"{HF_BLOCK}attention.self.logit_scale"),
)
CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=SOURCES,
    resampled={"position_bias.table": "map", "patch_embed.proj.weight": "kernel"},
)
