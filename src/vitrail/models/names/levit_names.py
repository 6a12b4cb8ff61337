"""Checkpoints of LeViT: its config from the shapes, and its names in timm, in transformers and in the authors' files.

transformers and the authors count the layers of all blocks of a stage, or of all stages, so that their names depend on
the number of blocks: there is a table for each of the two numbers in the published models.
"""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.name_entries import IDENTITY, NameEntry, TensorTransform, make_entry
from vitrail.models.names.convnet_names import BATCH_NORM_PARTS
from vitrail.models.names.tensor_shapes import (
    count_classes,
    count_distinct_numbers_in_names,
    count_stage_blocks,
    get_tensor_shape,
)

PUBLISHED_STAGES = ((2, 3, 4), (4, 4, 4))
COMPUTED = r".*\.attention_bias_idxs"  # in older files; follows from the grid


def unflatten_square(parts: list[Tensor]) -> Tensor:
    side_length = isqrt(parts[0].shape[1])
    return parts[0].unflatten(1, (side_length, side_length))


BIASES = TensorTransform(unflatten_square, lambda table, _: [table.flatten(1)])  # (H, h·w) ↔ (H, h, w)
MATRIX = TensorTransform(lambda parts: parts[0].flatten(1), lambda matrix, _: [matrix])  # also of 1×1 convolutions


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    convolutions = count_distinct_numbers_in_names(shapes, r"stem\.conv(\d+)\.")
    stages = count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0." for stage in range(len(stages))]
    tables = [get_tensor_shape(shapes, f"{name}attn.attention_biases", 3) for name in first]
    maps = [get_tensor_shape(shapes, f"{name}attn.qkv.linear.weight", 2) for name in first]
    classes = count_classes(shapes, "head.linear.weight")
    fields = {
        "image_size": (tables[0][1] << convolutions, tables[0][2] << convolutions),
        "convolutions": convolutions,
        "channels": get_tensor_shape(shapes, "stem.conv1.linear.weight", 4)[1],
        "classes": classes,
        "stages": stages,
        "widths": tuple(width for _, width in maps),
        "heads": tuple(heads for heads, _, _ in tables),
        "key_width": maps[0][0] // (4 * tables[0][0]),  # queries, keys, and values of twice their width
        "distilled": not classes or "head_dist.linear.weight" in shapes,
    }
    return side.InferredConfig(fields=fields)


def make_layer_entries(
    theirs: str, ours: str, layer: str, norm: str, transform: TensorTransform = IDENTITY
) -> tuple[NameEntry, ...]:
    """A linear map or convolution and its batch norm, which they call `layer` and `norm`."""
    return (
        make_entry(f"{theirs}.{layer}.weight", f"{ours}.linear.weight", transform),
        *(make_entry(f"{theirs}.{norm}.{part}", f"{ours}.bn.{part}") for part in BATCH_NORM_PARTS),
    )


def make_head_entries(theirs: str, ours: str, layer: str, norm: str) -> tuple[NameEntry, ...]:
    return (make_entry(f"{theirs}.{layer}.bias", f"{ours}.linear.bias"), *make_layer_entries(theirs, ours, layer, norm))


BLOCK, DOWNSAMPLE = "stages.#.blocks.#", "stages.#.downsample"
LAYERS = (
    *(f"{BLOCK}.{part}" for part in ("attn.qkv", "attn.proj.ln", "mlp.ln1", "mlp.ln2")),
    *(f"{DOWNSAMPLE}.attn_downsample.{part}" for part in ("kv", "q.ln", "proj.ln")),
    *(f"{DOWNSAMPLE}.mlp.{part}" for part in ("ln1", "ln2")),
)
TIMM_TABLE = (
    *make_layer_entries("stem.conv#", "stem.conv#", "linear", "bn"),
    *(row for name in LAYERS for row in make_layer_entries(name, name, "linear", "bn", MATRIX)),
    *(
        make_entry(f"{name}.attention_biases", f"{name}.attention_biases", BIASES)
        for name in (f"{BLOCK}.attn", f"{DOWNSAMPLE}.attn_downsample")
    ),
    *(row for name in ("head", "head_dist") for row in make_head_entries(name, name, "linear", "bn")),
)
HF_PARTS = {
    "attn": {"qkv": "queries_keys_values", "proj.ln": "projection"},
    "attn_downsample": {"kv": "keys_values", "q.ln": "queries", "proj.ln": "projection"},
    "mlp": {"ln1": "linear_up", "ln2": "linear_down"},
}
AUTHORS_PARTS = {
    "attn": {"qkv": "qkv", "proj.ln": "proj.1"},
    "attn_downsample": {"kv": "kv", "q.ln": "q.1", "proj.ln": "proj.1"},
    "mlp": {"ln1": "0", "ln2": "2"},
}


def list_layers(stages: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
    """The place of each layer in transformers, and our name of its block and of the layer in it."""
    for stage, depth in enumerate(stages):
        layers = [(f"stages.{stage}.blocks.{block}", part) for block in range(depth) for part in ("attn", "mlp")]
        if stage + 1 < len(stages):
            layers += [(f"stages.{stage + 1}.downsample", part) for part in ("attn_downsample", "mlp")]
        for number, (block, part) in enumerate(layers):
            yield f"encoder.stages.{stage}.layers.{number}", block, part


def make_counted_entries(
    stages: tuple[int, ...], parts: Mapping[str, Mapping[str, str]], branch: str, layer: str, norm: str
) -> Iterator[NameEntry]:
    """All layers, counted by stage in transformers and overall by the authors; those with a residual in a `branch`."""
    for count, (place, block, part) in enumerate(list_layers(stages)):
        theirs = (place if parts is HF_PARTS else f"blocks.{count}") + (f".{branch}" if part in ("attn", "mlp") else "")
        for ours, name in parts[part].items():
            yield from make_layer_entries(f"{theirs}.{name}", f"{block}.{part}.{ours}", layer, norm)
        if part != "mlp":
            yield make_entry(f"{theirs}.attention_biases", f"{block}.{part}.attention_biases", BIASES)


def make_timm_card(config: side.ConfigFields) -> dict[str, Any]:
    if not config["distilled"]:
        raise CheckpointError(
            "timm opens folders of a LeViT with two heads only; expected OUT.safetensors or OUT.pth, or distilled=True"
        )
    arguments = {
        "img_size": config["image_size"],
        "in_chans": config["channels"],
        "embed_dim": config["widths"],
        "key_dim": config["key_width"],
        "depth": config["stages"],
        "num_heads": config["heads"],
        "stem_type": "s16" if config["convolutions"] == 4 else "s8",
    }
    return {"architecture": "levit_128", "num_classes": config["classes"], "model_args": arguments}


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    ending = "ForImageClassificationWithTeacher" if config["distilled"] else "ForImageClassification"
    (rows, columns), count = config["image_size"], len(config["stages"])
    if rows != columns:
        raise CheckpointError(
            f"image_size is {(rows, columns)}, which transformers cannot represent; expected a square"
        )
    return {
        "architectures": ["Levit" + (ending if config["classes"] else "Model")],
        "model_type": "levit",
        "image_size": rows,
        "num_channels": config["channels"],
        "patch_size": 16,
        "hidden_sizes": config["widths"],
        "num_attention_heads": config["heads"],
        "depths": config["stages"],
        "key_dim": [config["key_width"]] * count,
        "mlp_ratio": [2] * count,
        "attention_ratio": [2] * count,
        "dtype": "float32",
    }


TIMM = side.SourceNames(
    layout="timm",
    table=TIMM_TABLE,
    markers=("stem.conv1.linear.weight", "stages.0.blocks.0.attn.attention_biases"),
    supported={"convolutions": (4, 3)},
    card=make_timm_card,
    details={
        "only_in_timm": True,
        "imagenet_mean": True,
        "ignored": COMPUTED,
        "model_args": (
            *("img_size", "in_chans", "num_classes", "embed_dim", "key_dim", "depth", "num_heads", "stem_type"),
        ),
        "argument_fields": {"img_size": "image_size"},
        "pretrained_cfg": {"crop_pct": 0.9},
        "refused_names": r"^levit_(conv_)?(384_s8|512|256d)",
        "refused_because": "has SiLU in place of Hardswish; expected levit_128s, 128, 192, 256 or 384",
    },
)


def make_hf_source(stages: tuple[int, ...]) -> side.SourceNames:
    return side.SourceNames(
        layout="hf",
        table=(
            *make_layer_entries("patch_embeddings.embedding_layer_#", "stem.conv#", "convolution", "batch_norm"),
            *make_counted_entries(stages, HF_PARTS, "module", "linear", "batch_norm"),
            *make_head_entries("classifier", "head", "linear", "batch_norm"),
            *make_head_entries("classifier_distill", "head_dist", "linear", "batch_norm"),
        ),
        markers=(
            "patch_embeddings.embedding_layer_1.convolution.weight",
            f"encoder.stages.0.layers.{2 * stages[0]}.keys_values.linear.weight",
        ),
        accepts=lambda config: config["stages"] == stages or stages == PUBLISHED_STAGES[-1],
        supported={"stages": PUBLISHED_STAGES, "convolutions": (4,)},
        card=make_hf_card,
        details={
            "model_type": "levit",
            "norm_eps": 1e-5,
            "imagenet_mean": True,
            "preprocessing": {"crop": 0.875, "fit": "short_side", "interpolation": "bicubic"},
            "ignored": COMPUTED,
            "argument_fields": {"num_attention_heads": "heads"},
            "enlarging_processors": "Levit",
        },
    )


def make_authors_source(stages: tuple[int, ...]) -> side.SourceNames:
    return side.SourceNames(
        layout="authors",
        table=(
            *(
                row
                for number in range(4)
                for row in make_layer_entries(f"patch_embed.{2 * number}", f"stem.conv{number + 1}", "c", "bn")
            ),
            *make_counted_entries(stages, AUTHORS_PARTS, "m", "c", "bn"),
            *(row for name in ("head", "head_dist") for row in make_head_entries(name, name, "l", "bn")),
        ),
        markers=("patch_embed.0.c.weight", f"blocks.{2 * stages[0]}.kv.c.weight"),
        accepts=lambda config: config["stages"] == stages or stages == PUBLISHED_STAGES[-1],
        supported={"stages": PUBLISHED_STAGES, "convolutions": (4,)},
        details={"wrapper": "model", "ignored": COMPUTED},
    )


CHECKPOINT = side.CheckpointSide(
    infer_config=infer_config,
    sources=(TIMM, *map(make_hf_source, PUBLISHED_STAGES), *map(make_authors_source, PUBLISHED_STAGES)),
    resampled={"attention_biases": "distances"},
)
