"""LeViT (Graham 2021, arXiv 2104.01136): a pyramid for fast inference; convolutions make few tokens, batch norms only.

B batch, n = h·w tokens, D width, H heads, K width of a head's keys; values are 2·K wide; h, w and D change by stage.
There is no table of positions: scores get a learned bias by distance in rows and columns. Between stages, every second
token of every second row attends to all tokens, which halves the grid.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt, sqrt
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.layers.attention import AttentionLayer, Mask, Projected, split_heads
from vitrail.layers.block import StochasticDepth
from vitrail.layers.positions import Grid, resample
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_fields, check_grid, pair
from vitrail.models.base.contract import Level, make_patch_sizes
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.attention import ReducedGrid, TwoGridAttention
from vitrail.models.parts.encoder import zero_head
from vitrail.models.parts.stages import (
    StagedModel,
    check_stages,
    flatten_map,
    halve_grid,
    make_halved_levels,
    name_blocks,
)
from vitrail.models.parts.windows import mirror_offsets, remember_tensor

VALUE_RATIO, DOWNSAMPLE_VALUE_RATIO = 2, 4  # width of a head's values, in widths of its keys
MLP_RATIO = 2  # width of an MLP, in widths of a token


@dataclass(frozen=True, kw_only=True)
class LeViTConfig:
    image_size: Size = 224  # rows, columns; one number for a square
    convolutions: int = 4  # of the stem; each halves the image
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # 0: no heads, returns the mean of the tokens
    stages: tuple[int, ...] = (4, 4, 4)  # blocks per stage; each stage but the first halves the grid
    widths: tuple[int, ...] = (128, 256, 384)  # channels of a token, per stage
    heads: tuple[int, ...] = (4, 8, 12)  # attention heads per stage; between stages width / key_width
    key_width: int = 16  # of a head
    distilled: bool = True  # a second head, which learns from a teacher
    answer: Literal["both", "class", "distill"] = "both"  # of a distilled model: the mean of both heads, or one of them
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of all blocks
    dynamic: bool = False  # accept any multiple of the stem's stride at run time; biases are resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_stages(self, divided=False)
        stride = 2**self.convolutions
        check_grid(pair(self.image_size), (stride, stride))
        if self.widths[0] % (stride // 2):
            raise ConfigError(
                f"a width of {self.widths[0]} after {self.convolutions} convolutions, each of twice the channels of "
                f"the one before; expected a multiple of {stride // 2}"
            )
        for width in self.widths[:-1]:
            if width % self.key_width:
                raise ConfigError(f"a stage of width {width}; expected a multiple of key_width {self.key_width}")
        if self.answer != "both" and not self.distilled:
            raise ConfigError(
                f"answer is {self.answer!r} for a LeViT with one head; expected 'both', or distilled=True"
            )


class LeViT(StagedModel):
    """(B, C, H, W) → logits (B, classes), by default the mean of both heads, see `answer`."""

    config: LeViTConfig
    first_filters = "stem.conv1.linear.weight"
    one_size_export_reason = "its grids are rounded up, which torch.export does not trace"
    no_masking_reason = "the convolutions before the first block mix them"

    def __init__(self, config: LeViTConfig) -> None:
        super().__init__(config)
        self.levels = make_levels(config)
        self.sizes = make_patch_sizes(self.levels[0].stride, dynamic=config.dynamic)
        names = ("head", "head_dist") if config.distilled else ("head",)
        self.classifiers = tuple(("mean", name) for name in names) if config.classes else ()
        self.stem = make_stem(config.channels, config.widths[0], config.convolutions)
        self.stages = nn.ModuleList()
        for stage, (depth, width, heads) in enumerate(zip(config.stages, config.widths, config.heads, strict=True)):
            before, key = config.widths[max(stage - 1, 0)], config.key_width
            grid, finer, rate = self.levels[stage].grid, self.levels[max(stage - 1, 0)].grid, config.stochastic_depth
            downsample = LeViTDownsample(before, width, key, finer, rate) if stage else None
            blocks = [LeViTBlock(width, heads, key, grid, rate) for _ in range(depth)]
            self.stages.append(LeViTStage(downsample, nn.ModuleList(blocks)))
        self.norm = nn.Identity()
        self.head = NormedHead(config.widths[-1], config.classes) if config.classes else nn.Identity()
        self.head_dist = NormedHead(config.widths[-1], config.classes) if len(self.classifiers) == 2 else None
        self.init_weights()

    def draw_weights(self) -> None:
        """torch's own, as in the authors' code; branches start as zero, biases and heads are zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm1d | nn.BatchNorm2d):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, DistanceAttention | SubsamplingAttention):
                nn.init.zeros_(module.attention_biases)
            elif isinstance(module, LeViTBlock):
                nn.init.zeros_(module.attn.proj.get_parameter("ln.bn.weight"))
            elif isinstance(module, HardswishMlp):
                nn.init.zeros_(module.ln2.bn.weight)
            elif isinstance(module, NormedHead):
                zero_head(module.linear)
                nn.init.zeros_(module.linear.bias)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return flatten_map(self.stem(images)), grid

    def run_stages(self, x: Tensor, grid: Grid) -> Iterator[tuple[Tensor, Grid]]:
        for stage in self.stages:
            x, grid = stage(x, grid)
            yield x, grid

    def logits(self, tokens: Tensor) -> Tensor:
        """The mean of the heads that answer: (B, n, D) → (B, classes)."""
        if not self.classifiers:
            return tokens.mean(1)
        each = self.head_logits(tokens)
        chosen = {"both": each, "class": each[:1], "distill": each[1:]}[self.config.answer]
        return torch.stack(chosen).mean(0)

    def head_logits(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The logits of the class head and of the head that learns from a teacher: (B, n, D) → (B, classes) each."""
        mean = tokens.mean(1)
        return tuple(self.get_submodule(name)(mean) for _, name in self.classifiers)


def make_levels(config: LeViTConfig) -> tuple[Level, ...]:
    """What halves the grid before a stage attends, too, and is the stage's first block."""
    stride, (first, *later) = pair(2**config.convolutions), name_blocks(config.stages, "stages.{}.blocks.{}")
    blocks = [first, *([f"stages.{stage}.downsample", *names] for stage, names in enumerate(later, start=1))]
    return make_halved_levels(check_grid(pair(config.image_size), stride), stride, config.widths, blocks)


def make_stem(channels: int, width: int, convolutions: int) -> nn.Sequential:
    """3×3 convolutions of stride 2, each of twice the channels of the one before: (B, C, H, W) → (B, D, h, w)."""
    widths = [channels, *(width >> (convolutions - number) for number in range(1, convolutions + 1))]
    parts = OrderedDict[str, nn.Module]()
    for number in range(1, convolutions + 1):
        parts[f"conv{number}"] = NormedConv(widths[number - 1], widths[number])
        if number < convolutions:
            parts[f"act{number}"] = nn.Hardswish()
    return nn.Sequential(parts)


class LeViTStage(nn.Module):
    """Halves the grid, then blocks: (B, n, D) and the grid → the same at half the size."""

    def __init__(self, downsample: "LeViTDownsample | None", blocks: nn.ModuleList) -> None:
        super().__init__()
        self.downsample, self.blocks = downsample, blocks

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.downsample is not None:
            x, grid = self.downsample(x, grid), halve_grid(grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


class LeViTBlock(nn.Module):
    """x' = x + attention(x); x' + MLP(x'), without norms before them: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int, heads: int, key_width: int, grid: Grid, rate: float) -> None:
        super().__init__()
        self.attn = DistanceAttention(width, heads, key_width, grid)
        self.mlp = HardswishMlp(width)
        self.drop_path = StochasticDepth(rate)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(x, grid))
        return x + self.drop_path(self.mlp(x))


class LeViTDownsample(nn.Module):
    """Every second token attends to all, without a residual; then an MLP: (B, n, D) → (B, n/4, D')."""

    def __init__(self, width: int, out_width: int, key_width: int, grid: Grid, rate: float) -> None:
        super().__init__()
        self.attn_downsample = SubsamplingAttention(width, out_width, key_width, grid)
        self.mlp = HardswishMlp(out_width)
        self.drop_path = StochasticDepth(rate)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = self.attn_downsample(x, grid)
        return x + self.drop_path(self.mlp(x))


def look_up_distances(table: Tensor, grid: Grid, step: int = 1) -> Tensor:
    """The bias of every `step`-th token of every `step`-th row with all tokens: (H, h, w) → (H, n/step², n)."""
    if (table.shape[1], table.shape[2]) != grid:
        table = resample_distances(table, grid)
    index = find_distances(grid, step, table.device)
    return table.flatten(1).index_select(1, index).view(len(table), -1, grid[0] * grid[1])


@remember_tensor
def find_distances(grid: Grid, step: int, device: torch.device) -> Tensor:
    """The place of each distance in a flattened table: (n/step²·n)."""
    rows, columns = (torch.arange(side, device=device) for side in grid)
    by_row, by_column = ((places[::step, None] - places).abs() for places in (rows, columns))
    return ((by_row * grid[1])[:, None, :, None] + by_column[:, None]).flatten()  # of (h/step, w/step, h, w)


def resample_distances(table: Tensor, grid: Grid) -> Tensor:
    """The table of another grid, resampled by offset to both sides, so that distance 0 stays in place: (H, h, w)."""
    old, new = ((2 * side[0] - 1, 2 * side[1] - 1) for side in (table.shape[1:], grid))
    offsets = resample(mirror_offsets(table).flatten(1).T[None], old, new)[0].T.unflatten(1, new)
    return offsets[:, grid[0] - 1 :, grid[1] - 1 :]


class UnfusedAttention(AttentionLayer):
    """Attention without torch's fused kernel, which is slower for values wider than keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        assert mask is not None, "all scores have a bias"
        scores = q / sqrt(q.shape[-1]) @ k.transpose(-2, -1)
        return (scores + mask.to(scores.dtype)).softmax(-1) @ v


class DistanceAttention(UnfusedAttention):
    """Self-attention with a bias by distance, and a Hardswish before the projection: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int, heads: int, key_width: int, grid: Grid) -> None:
        super().__init__()
        self.heads, self.dropout = heads, 0.0
        self.shares = (key_width, key_width, VALUE_RATIO * key_width)
        self.qkv = NormedLinear(width, heads * sum(self.shares))  # rows: head by head, each q, k, v
        self.proj = make_projection(heads * VALUE_RATIO * key_width, width)
        self.attention_biases = nn.Parameter(torch.empty(heads, *grid))  # by distance in rows and columns

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        assert mask is None
        assert queries is None, "there are no prefix tokens to compute alone"
        q, k, v = split_heads(self.qkv(x), self.heads).split(self.shares, dim=-1)
        return q, k, v, look_up_distances(self.attention_biases, grid)[None]


class SubsamplingAttention(UnfusedAttention, TwoGridAttention):
    """Every second token of every second row attends to all: (B, n, D) → (B, n/4, D')."""

    def __init__(self, width: int, out_width: int, key_width: int, grid: Grid) -> None:
        super().__init__()
        self.heads, self.dropout = width // key_width, 0.0
        self.shares = (key_width, DOWNSAMPLE_VALUE_RATIO * key_width)
        self.kv = NormedLinear(width, self.heads * sum(self.shares))
        self.q = nn.ModuleDict({"ln": NormedLinear(width, self.heads * key_width)})
        self.proj = make_projection(self.heads * DOWNSAMPLE_VALUE_RATIO * key_width, out_width)
        self.attention_biases = nn.Parameter(torch.empty(self.heads, *grid))

    def reduce_grid(self, grid: Grid) -> ReducedGrid:
        return ReducedGrid(queries=halve_grid(grid), keys=grid)

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        assert grid is not None
        assert mask is None
        assert queries is None, "there are no prefix tokens to compute alone"
        q = self.q["ln"](x.unflatten(1, grid)[:, ::2, ::2].flatten(1, 2))
        k, v = split_heads(self.kv(x), self.heads).split(self.shares, dim=-1)
        return split_heads(q, self.heads), k, v, look_up_distances(self.attention_biases, grid, 2)[None]


def make_projection(width: int, out_width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(act=nn.Hardswish(), ln=NormedLinear(width, out_width)))


class HardswishMlp(nn.Module):
    """ln2(Hardswish(ln1(x))), both with a batch norm: (B, n, D) → (B, n, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = NormedLinear(width, MLP_RATIO * width), NormedLinear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln2(F.hardswish(self.ln1(x)))


class NormedLinear(nn.Module):
    """A linear map, then a batch norm over all tokens; in an exported file they are one map: (B, n, D) → (B, n, D')."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(width, out_width, bias=False), nn.BatchNorm1d(out_width)

    def forward(self, x: Tensor) -> Tensor:
        if self.bn.training or not torch.compiler.is_exporting():
            y = self.linear(x)
            return self.bn(y.flatten(0, 1)).view_as(y)
        assert self.bn.running_mean is not None
        assert self.bn.running_var is not None
        scale = self.bn.weight / (self.bn.running_var + self.bn.eps).sqrt()
        return F.linear(x, self.linear.weight * scale[:, None], self.bn.bias - self.bn.running_mean * scale)


class NormedConv(nn.Module):
    """A 3×3 convolution of stride 2, then a batch norm: (B, C, H, W) → (B, D, H/2, W/2)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


class NormedHead(nn.Module):
    """A batch norm, then a linear map: (B, D) → (B, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.bn, self.linear = nn.BatchNorm1d(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.bn.training and len(x) == 1:
            raise ConfigError("a batch of one image in training, which has no statistics; expected at least two")
        return self.linear(self.bn(x))


PRESETS = Presets(
    lambda: {
        "levit_128s": LeViTConfig(stages=(2, 3, 4), heads=(4, 6, 8)),
        "levit_128": LeViTConfig(),
        "levit_192": LeViTConfig(widths=(192, 288, 384), heads=(3, 5, 6), key_width=32),
        "levit_256": LeViTConfig(widths=(256, 384, 512), heads=(4, 6, 8), key_width=32),
        "levit_384": LeViTConfig(widths=(384, 512, 768), heads=(6, 9, 12), key_width=32),
    }
)
ALIASES = {
    f"LeViT-{name.removeprefix('levit_').upper()}": name
    for name in ("levit_128s", "levit_128", "levit_192", "levit_256", "levit_384")
}

PUBLISHED_STAGES = ((2, 3, 4), (4, 4, 4))
COMPUTED = r".*\.attention_bias_idxs"  # in older files; follows from the grid


def unflatten_square(parts: list[Tensor]) -> Tensor:
    side_length = isqrt(parts[0].shape[1])
    return parts[0].unflatten(1, (side_length, side_length))


BIASES = side.TensorTransform(unflatten_square, lambda table, _: [table.flatten(1)])  # (H, h·w) ↔ (H, h, w)
MATRIX = side.TensorTransform(lambda parts: parts[0].flatten(1), lambda matrix, _: [matrix])  # also of 1×1 convolutions


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    convolutions = side.count_numbers(shapes, r"stem\.conv(\d+)\.")
    stages = side.count_stage_blocks(shapes, r"stages\.(\d+)\.", r"stages\.{}\.blocks\.(\d+)\.", first=0)
    first = [f"stages.{stage}.blocks.0." for stage in range(len(stages))]
    tables = [side.get_shape(shapes, f"{name}attn.attention_biases", 3) for name in first]
    maps = [side.get_shape(shapes, f"{name}attn.qkv.linear.weight", 2) for name in first]
    channels, widths = side.get_shape(shapes, "stem.conv1.linear.weight", 4)[1], tuple(width for _, width in maps)
    fields = side.describe_stages(shapes, channels, stages, widths, "head.linear.weight")
    fields |= {
        "image_size": (tables[0][1] << convolutions, tables[0][2] << convolutions),
        "convolutions": convolutions,
        "heads": tuple(heads for heads, _, _ in tables),
        "key_width": maps[0][0] // (4 * tables[0][0]),  # queries, keys, and values of twice their width
        "distilled": not fields["classes"] or "head_dist.linear.weight" in shapes,
    }
    return side.InferredConfig(fields=fields)


TIMM_TABLE = """
    stem.conv#.{linear.weight,bn.+}
    {stages.#.blocks.#.attn,stages.#.downsample.attn_downsample}.attention_biases | biases
    stages.#.blocks.#.{attn.qkv,attn.proj.ln,mlp.ln1,mlp.ln2}.:
        linear.weight | matrix
        bn.+
    stages.#.downsample.{attn_downsample.kv,attn_downsample.q.ln,attn_downsample.proj.ln,mlp.ln1,mlp.ln2}.:
        linear.weight | matrix
        bn.+
    {head,head_dist}.{linear.*,bn.+}
"""
# each number stands for the attention or the MLP of a block, or for those before a stage, which halve the grid
HF_LAYERS = {
    "attn": """
        module.{queries_keys_values,projection}.{linear.weight,batch_norm.+} -> {qkv,proj.ln}.{linear.weight,bn.+}
        module.attention_biases -> attention_biases | biases
    """,
    "attn_downsample": """
        {keys_values,queries,projection}.{linear.weight,batch_norm.+} -> {kv,q.ln,proj.ln}.{linear.weight,bn.+}
        attention_biases | biases
    """,
    "mlp": """
        module.{linear_up,linear_down}.{linear.weight,batch_norm.+} -> {ln1,ln2}.{linear.weight,bn.+}
    """,
}
AUTHORS_LAYERS = {
    "attn": """
        m.{qkv,proj.1}.{c.weight,bn.+} -> {qkv,proj.ln}.{linear.weight,bn.+}
        m.attention_biases -> attention_biases | biases
    """,
    "attn_downsample": """
        {kv,q.1,proj.1}.{c.weight,bn.+} -> {kv,q.ln,proj.ln}.{linear.weight,bn.+}
        attention_biases | biases
    """,
    "mlp": """
        m.{0,2}.{c.weight,bn.+} -> {ln1,ln2}.{linear.weight,bn.+}
    """,
}
HF_AROUND = side.parse_table(
    """
    patch_embeddings.embedding_layer_#.{convolution.weight,batch_norm.+} -> stem.conv#.{linear.weight,bn.+}
    {classifier,classifier_distill}.{linear.*,batch_norm.+} -> {head,head_dist}.{linear.*,bn.+}
    """
)
AUTHORS_AROUND = side.parse_table(
    """
    patch_embed.{0,2,4,6}.{c.weight,bn.+} -> stem.{conv1,conv2,conv3,conv4}.{linear.weight,bn.+}
    {head,head_dist}.{l.*,bn.+} -> {head,head_dist}.{linear.*,bn.+}
    """
)


def make_counted_table(stages: tuple[int, ...], layers: Mapping[str, str]) -> tuple[side.NameEntry, ...]:
    """All layers, counted by stage in transformers and overall by the authors."""
    rows, count = list[side.NameEntry](), 0
    for stage, depth in enumerate(stages):
        parts = [(f"stages.{stage}.blocks.{block}", part) for block in range(depth) for part in ("attn", "mlp")]
        if stage + 1 < len(stages):
            parts += [(f"stages.{stage + 1}.downsample", part) for part in ("attn_downsample", "mlp")]
        for number, (block, part) in enumerate(parts):
            theirs = f"encoder.stages.{stage}.layers.{number}." if layers is HF_LAYERS else f"blocks.{count + number}."
            rows += side.parse_table(f"{theirs} -> {block}.{part}.:\n{layers[part]}", biases=BIASES)
        count += len(parts)
    return tuple(rows)


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
    table=side.parse_table(TIMM_TABLE, biases=BIASES, matrix=MATRIX),
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
        table=HF_AROUND + make_counted_table(stages, HF_LAYERS),
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
        table=AUTHORS_AROUND + make_counted_table(stages, AUTHORS_LAYERS),
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
FAMILY = Family("levit", LeViTConfig, LeViT, PRESETS, ALIASES, CHECKPOINT)
