"""Learnable memory (Sandler 2022, arXiv 2203.15243): a frozen ViT learns a new task from a few tokens per layer.

A new token, the task token, attends to all tokens and to m learned memory tokens. The tokens of the frozen ViT attend
to neither, so its logits do not change. Only the memory, the task token and the new head are trained.
B batch, n = h·w patches, N = 2 + n tokens (class, task, patches), m memory tokens, D width, L layers.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import Mask, Projected, SelfAttention, attention, merge_heads
from vitrail.layers.block import Block
from vitrail.layers.embed import PatchEmbed
from vitrail.layers.positions import Grid, resample
from vitrail.models.base.checks import MAY_BE_ZERO, RATE, Size, check_patch_config, pair
from vitrail.models.base.contract import ImageModel, unwrap_compiled
from vitrail.models.base.family import Family, Presets
from vitrail.models.base.init import init_layers
from vitrail.models.parts.encoder import make_blocks, make_head, prepend_tokens, zero_head


@dataclass(frozen=True, kw_only=True)
class MemoryViTConfig:
    image_size: Size = 224  # rows, columns; one number for a square
    patch_size: Size = 32
    channels: int = 3
    classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # of the new task; 0: no head, returns the task token
    old_classes: int = field(default=1000, metadata=MAY_BE_ZERO)  # of the frozen ViT; 0: it has no head
    memory: int = 5  # rows of memory in each layer
    width: int = 768  # channels of a token
    depth: int = 12  # blocks
    heads: int = 12  # attention heads, each width / heads wide
    mlp_width: int | None = None  # default: 4·width
    norm_eps: float = 1e-6
    stochastic_depth: float = field(default=0.0, metadata=RATE)  # rate of the last block; linear from 0 at the first
    dynamic: bool = False  # accept any multiple of the patch size at run time; the table is resampled

    def __post_init__(self) -> None:
        check_patch_config(self)


class MemoryViT(ImageModel):
    """(B, C, H, W) → logits of the new task (B, classes), or without a head the task token (B, D)."""

    config: MemoryViTConfig
    prefix_tokens = ("class", "task")
    classifier_tokens = ("task",)
    first_filters = "patch_embed.proj.weight"
    no_masking_reason = "its ViT is frozen"

    def __init__(self, config: MemoryViTConfig) -> None:
        super().__init__(config)
        width, patch = config.width, pair(config.patch_size)
        self.declare_level(patch)
        self.memory_tokens = config.memory
        self.patch_embed = PatchEmbed(width, patch, config.channels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + math.prod(self.grid), width))
        rates, hidden = (0.0, 0.0, config.stochastic_depth), config.mlp_width or 4 * width
        self.blocks = make_blocks(
            config.depth, width, config.heads, hidden, norm_eps=config.norm_eps, rates=rates, kind=MemoryBlock
        )
        for block in self.blocks:
            block.attn = MemoryAttention(width, config.heads, config.memory)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.old_head = make_head(width, config.old_classes)
        self.requires_grad_(False)
        for block in self.blocks:
            block.register_parameter("memory", nn.Parameter(torch.empty(1, config.memory, width)))
        self.task_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = make_head(width, config.classes)
        self.init_weights()

    def draw_weights(self) -> None:
        """The ViT as in its authors' code, the memory and the task token from N(0, 0.02²); the heads are zero."""
        init_layers(self)
        nn.init.zeros_(self.cls_token)
        for table in (self.pos_embed, self.task_token, *(block.get_parameter("memory") for block in self.blocks)):
            nn.init.normal_(table, std=0.02)
        zero_head(self.head, self.old_head)

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        """Add class and task token, and the positions, of which the task token has none: (B, n, D) → (B, N, D)."""
        x = prepend_tokens(patches, self.cls_token) + resample(self.pos_embed, self.grid, grid)
        task = self.task_token.expand(x.shape[0], -1, -1)
        return torch.cat([x[:, :1], task, x[:, 1:]], dim=1)

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the new head for the task token: (B, N, D) → (B, classes)."""
        return self.head(tokens[:, 1])

    def old_logits(self, images: Tensor) -> Tensor:
        """The logits of the frozen ViT, bit-identical to those without memory: (B, C, H, W) → (B, old_classes)."""
        return self.old_head(self.tokens(images)[:, 0])


def split_task(x: Tensor, memory: int = 0) -> tuple[Tensor, Tensor]:
    """The tokens of the frozen ViT, (B, 1 + n, D), and the task token, (B, 1, D), without `memory` tokens after it."""
    return torch.cat([x[:, :1], x[:, 2 + memory :]], dim=1), x[:, 1:2]


class MemoryBlock(Block):
    """A block of the frozen ViT, and next to it the task token, which also attends to the block's `memory`."""

    def compute(self, x: Tensor, grid: Grid | None, queries: int | None, mask: Tensor | None = None) -> Tensor:
        memory = self.get_parameter("memory").expand(x.shape[0], -1, -1)
        seen = self.norm1(torch.cat([x[:, :2], memory, x[:, 2:]], dim=1))
        x = x + self.drop_path(self.ls1(self.attn(seen, grid, mask=mask)))
        parts = split_task(x)  # in an MLP of more tokens, the old ones might be rounded differently
        old, task = (part + self.drop_path(self.ls2(self.mlp(self.norm2(part)))) for part in parts)
        return torch.cat([old[:, :1], task, old[:, 1:]], dim=1)[:, :queries]


class MemoryAttention(SelfAttention):
    """The attention of the frozen ViT, and of its task token, which sees all: (B, 2 + m + n, D) → (B, N, D).

    Memory is between the task token and the patches. In maps it attends to itself: there, a rollout ends.
    """

    def __init__(self, width: int, heads: int, memory: int) -> None:
        super().__init__(width, heads)
        self.memory = memory
        self.proj = MemoryDroppingLinear(width, memory)

    def forward(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Tensor:
        assert mask is None, "the mask of the task token is its own"
        assert queries is None, "the class token and the task token are computed apart"
        old, task = split_task(x, self.memory)
        memory = x[:, 2 : 2 + self.memory]
        q, k, v, _ = super().project(old, grid)  # the same operations as without memory
        y = merge_heads(attention(q, k, v))
        q, k, v, _ = super().project(torch.cat([task, old, memory], dim=1), grid, queries=1)
        y_task = merge_heads(attention(q, k, v))
        return self.proj(torch.cat([y[:, :1], y_task, torch.zeros_like(memory), y[:, 1:]], dim=1))

    def project(self, x: Tensor, grid: Grid | None = None, mask: Mask = None, queries: int | None = None) -> Projected:
        """q, k and v of all tokens and memory, with a mask, for maps: `forward` computes the old tokens apart."""
        assert mask is None, "the mask of the task token is its own"
        q, k, v, _ = super().project(x, grid, queries=queries)
        old = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
        old[1 : 2 + self.memory] = False
        shown = torch.eye(len(old), dtype=torch.bool, device=x.device) | (old & old[:, None])
        shown[1] = True
        return q, k, v, shown[:queries]


class MemoryDroppingLinear(nn.Linear):
    """A linear map of the old tokens and, apart from them, of the task token; memory is dropped: (B, N, D)."""

    def __init__(self, width: int, memory: int) -> None:
        super().__init__(width, width)
        self.memory = memory

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        old, task = (super(MemoryDroppingLinear, self).forward(part) for part in split_task(input, self.memory))
        return torch.cat([old[:, :1], task, old[:, 1:]], dim=1)


PLAIN_FIELDS: dict[str, Any] = {  # of a ViT or DeiT that memory can be added to
    "class_token": True,
    "registers": 0,
    "distilled": False,
    "pool": "class",
    "head": "linear",
    "layer_scale": None,
    "positions": "learned",
    "positions_at": "stem",
    "prefix_positions": True,
    "activation": "gelu",
    "qkv_bias": True,
}
SAME_FIELDS = ("image_size", "patch_size", "channels", "width", "depth", "heads", "norm_eps")


def add_memory(model: nn.Module, memory: int, classes: int) -> MemoryViT:
    """A model with the weights of a ViT, frozen, and new memory, task token and head for `classes` classes."""
    model = unwrap_compiled(model)
    kind = type(model).__name__
    blocks: list[Any] = list(model.blocks) if isinstance(model, ImageModel) and len(model.levels) == 1 else []
    if not blocks or any(type(block) is not Block or type(block.attn) is not SelfAttention for block in blocks):
        raise ConfigError(f"memory cannot be added to a {kind}; expected a plain ViT or DeiT")
    config: Any = model.config
    given = asdict(config)
    for name, expected in PLAIN_FIELDS.items():
        if given.get(name, expected) != expected:
            raise ConfigError(f"{name} is {given[name]!r}; expected {expected!r}, a ViT that memory can be added to")
    if not set(SAME_FIELDS) <= given.keys():
        raise ConfigError(f"memory cannot be added to a {kind}; expected a plain ViT or DeiT")
    own: dict[str, Any] = {name: given[name] for name in SAME_FIELDS} | {"mlp_width": given.get("mlp_width")}
    extended = MemoryViT(MemoryViTConfig(**own, old_classes=given["classes"], classes=classes, memory=memory))
    old = {f"old_{name}" if name.startswith("head.") else name: each for name, each in model.state_dict().items()}
    extended.load_state_dict({**extended.state_dict(), **old})
    return extended.train(model.training)


BASE = MemoryViTConfig()
PRESETS = Presets(
    lambda: {
        "memory_vit_base_patch32_224": BASE,
        "memory_vit_base_patch16_224": replace(BASE, patch_size=16),
        "memory_vit_tiny_patch16_224": replace(BASE, patch_size=16, width=192, heads=3),
    }
)
FAMILY = Family("memory_vit", MemoryViTConfig, MemoryViT, PRESETS)
