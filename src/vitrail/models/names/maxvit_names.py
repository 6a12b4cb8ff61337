"""Checkpoints of MaxViT: the config from shapes, and the names in timm and torchvision. H heads, D width."""

from typing import Any

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import pair
from vitrail.models.base.name_entries import NameEntry, TensorTransform, make_entry, make_same_name_entries
from vitrail.models.names.convnet_names import BATCH_NORM_PARTS, list_batch_norm_names
from vitrail.models.names.swin_names import OFFSETS
from vitrail.models.names.tensor_shapes import count_classes, count_stage_blocks, get_tensor_shape

HEAD_WIDTH = 32  # of all published models
BLOCK, TABLE = "stages.#.blocks.#.", "attn.position_bias.table"
TABLE_END = "relative_position_bias_table"
ATTENTIONS = {"attn_block": "window_attention", "attn_grid": "grid_attention"}  # in torchvision
BATCH_NORMS = {"pre_norm": "pre_norm", "norm1": "conv_a.1", "norm2": "conv_b.1"}
CONVOLUTIONS = {"conv1_1x1": "conv_a.0", "conv2_kxk": "conv_b.0", "conv3_1x1": "conv_c"}
GATES = {f"se.fc{n}": f"squeeze_excitation.fc{n}" for n in (1, 2)}
LAYERS = {
    "norm1": "attn_layer.0",
    "attn.proj": "attn_layer.1.merge",
    "norm2": "mlp_layer.0",
    "mlp.fc1": "mlp_layer.1",
    "mlp.fc2": "mlp_layer.3",
}
HEAD = {"head.norm": "classifier.2", "head.pre_logits.fc": "classifier.3", "head.fc": "classifier.5"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """A window fills the map of the last stage, as in all published models; torchvision's stem has no bias."""
    stem_width, channels, _, _ = get_tensor_shape(shapes, "stem.conv1.weight", 4)
    stages = count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0.attn_block." for stage in range(len(stages))]
    tables = [get_tensor_shape(shapes, f"{name}{TABLE}", 3) for name in first]
    stride = 2 ** (len(stages) + 1)
    fields = {
        "image_size": ((tables[0][1] + 1) // 2 * stride, (tables[0][2] + 1) // 2 * stride),
        "channels": channels,
        "classes": count_classes(shapes, "head.fc.weight"),
        "stem_width": stem_width,
        "stages": stages,
        "widths": tuple(get_tensor_shape(shapes, f"{name}norm1.weight", 1)[0] for name in first),
        "heads": tuple(table[0] for table in tables),
        "constants": "google" if "stem.conv1.bias" in shapes else "torchvision",
    }
    return side.InferredConfig(fields=fields)


def check_head_width(config: side.ConfigFields, library: str) -> int:
    """The width of all heads; an error if they differ."""
    widths = {width // heads for width, heads in zip(config["widths"], config["heads"], strict=True)}
    if len(widths) > 1 or (library == "torchvision" and widths != {HEAD_WIDTH}):
        expected = f"heads of width {HEAD_WIDTH}" if library == "torchvision" else "heads of one width"
        raise CheckpointError(f"heads is {config['heads']}, which {library} cannot represent; expected {expected}")
    return widths.pop()


def get_window(config: side.ConfigFields) -> Grid:
    if config["window"] is not None:
        return pair(config["window"])
    rows, columns = (side // (config["stem_stride"] * 2 ** len(config["stages"])) for side in config["image_size"])
    return rows, columns


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    arguments = {
        "img_size": config["image_size"],
        "in_chans": config["channels"],
        "stem_width": config["stem_width"],
        "embed_dim": config["widths"],
        "depths": config["stages"],
        "head_hidden_size": config["widths"][-1],
        "transformer_dim_head": check_head_width(config, "timm"),
    }
    if config["window"] is None:
        arguments["transformer_partition_ratio"] = config["stem_stride"] * 2 ** len(config["stages"])
    else:
        arguments |= dict.fromkeys(("transformer_window_size", "transformer_grid_size"), config["window"])
    return {"architecture": "maxvit_tiny_tf_224", "num_classes": config["classes"], "model_args": arguments}


def make_torchvision_buffers(config: side.ConfigFields) -> dict[str, Tensor]:
    """The index of each pair's offset, which torchvision stores for every attention."""
    check_head_width(config, "torchvision")
    rows, columns = get_window(config)
    if rows != columns:
        raise CheckpointError(f"a window of {rows}×{columns}, which torchvision cannot represent; expected a square")
    place = (torch.arange(rows)[:, None] * (2 * rows - 1) + torch.arange(rows)).flatten()
    names = [f"blocks.{stage}.layers.{n}.layers." for stage, depth in enumerate(config["stages"]) for n in range(depth)]
    kinds = [f"{kind}.attn_layer.1.relative_position_index" for kind in ("window_attention", "grid_attention")]
    return {name + kind: place[:, None] - place + (rows - 1) * 2 * rows for name in names for kind in kinds}


def scale_queries(tensor: Tensor, power: float) -> Tensor:
    """torchvision divides scores by the root of the width, not of a head's: the rest becomes part of the queries."""
    q, k, v = tensor.chunk(3)
    return torch.cat([q * (len(q) // HEAD_WIDTH) ** power, k, v])


BY_WIDTH = TensorTransform(lambda parts: scale_queries(parts[0], -0.5), lambda tensor, _: [scale_queries(tensor, 0.5)])


def make_timm_table() -> tuple[NameEntry, ...]:
    layers = [f"{BLOCK}conv.{name}.*" for name in (*CONVOLUTIONS, *GATES, "shortcut.expand")]
    layers += [f"{BLOCK}{block}.{name}.*" for block in ATTENTIONS for name in (*LAYERS, "attn.qkv")]
    norms = [each for name in BATCH_NORMS for each in list_batch_norm_names(f"{BLOCK}conv.{name}")]
    tables = (make_entry(f"{BLOCK}{each}.attn.rel_pos.{TABLE_END}", f"{BLOCK}{each}.{TABLE}") for each in ATTENTIONS)
    stem = ("stem.conv1.*", "stem.conv2.*", *list_batch_norm_names("stem.norm1"))
    return (*make_same_name_entries(*stem, *layers, *norms, *(f"{name}.*" for name in HEAD)), *tables)


def make_torchvision_table() -> tuple[NameEntry, ...]:
    start, ours = "blocks.#.layers.#.layers.", f"{BLOCK}conv."
    names = {"stem.conv1": "stem.0.0", "stem.conv2": "stem.1.0", **HEAD}
    names |= {ours + name: f"{start}MBconv.layers.{theirs}" for name, theirs in (CONVOLUTIONS | GATES).items()}
    names[f"{ours}shortcut.expand"] = f"{start}MBconv.proj.1"
    norms = {"stem.norm1": "stem.0.1"}
    norms |= {ours + name: f"{start}MBconv.layers.{theirs}" for name, theirs in BATCH_NORMS.items()}
    rows = list[NameEntry]()
    for block, kind in ATTENTIONS.items():
        attention = f"{start}{kind}.attn_layer.1."
        names |= {f"{BLOCK}{block}.{name}": f"{start}{kind}.{theirs}" for name, theirs in LAYERS.items()}
        rows.append(make_entry(f"{attention}to_qkv.*", f"{BLOCK}{block}.attn.qkv.*", BY_WIDTH))
        rows.append(make_entry(attention + TABLE_END, f"{BLOCK}{block}.{TABLE}", OFFSETS))
    rows += [make_entry(f"{theirs}.*", f"{name}.*") for name, theirs in names.items()]
    return (*rows, *(make_entry(f"{b}.{part}", f"{a}.{part}") for a, b in norms.items() for part in BATCH_NORM_PARTS))


def find_torchvision_crop(config: side.ConfigFields) -> float:  # noqa: ARG001  # the same for all
    """The share of an image that torchvision's weights see."""
    return 1.0


SOURCES = (
    side.SourceNames(
        layout="timm",
        table=make_timm_table(),
        markers=("stem.conv1.weight", f"{BLOCK}attn_block.attn.qkv.weight", f"{BLOCK}conv.conv1_1x1.weight"),
        supported={"constants": ("google",), "stem_stride": (2,)},
        card=make_timm_card,
        details={
            "only_in_timm": True,
            "imagenet_mean": True,
            "model_args": (
                *("img_size", "in_chans", "num_classes", "stem_width", "embed_dim", "depths", "head_hidden_size"),
                *(
                    "transformer_dim_head",
                    "transformer_window_size",
                    "transformer_grid_size",
                    "transformer_partition_ratio",
                ),
                "drop_path_rate",
            ),
            "argument_fields": {"img_size": "image_size", "transformer_window_size": "window"},
            "pretrained_cfg": {"crop_pct": 0.95},
        },
    ),
    side.SourceNames(
        layout="torchvision",
        table=make_torchvision_table(),
        markers=("stem.0.0.weight", "blocks.#.layers.#.layers.MBconv.layers.conv_a.0.weight"),
        supported={"channels": (3,), "constants": ("torchvision",), "stem_stride": (2,)},
        details={
            "ignored": r".*\.relative_position_index",
            "buffers": make_torchvision_buffers,
            "crop": find_torchvision_crop,
        },
    ),
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=SOURCES, resampled={"position_bias.table": "map"})
