"""Image GPT (Chen 2020, "Generative Pretraining from Pixels"): a GPT-2 over the pixels of small images.

A pixel is the nearest of K palette colors. Each is predicted from the pixels before it, row by row. The features of an
image are the mean over the sequence at a middle layer, which are better than those of the last layer.
B batch, C channels, n = H·W pixels, K colors, D width, L layers.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.base.errors import ConfigError
from vitrail.layers.attention import attention, causal_mask, merge_heads
from vitrail.layers.positions import Grid
from vitrail.models.base import checkpoint_side as side
from vitrail.models.base.checks import MAY_BE_ZERO, Size, check_fields, check_heads, pair
from vitrail.models.base.contract import make_patch_sizes, make_single_level
from vitrail.models.base.family import Family, Presets
from vitrail.models.parts.encoder import PatchEncoder, make_head
from vitrail.models.text.decoder import KeyValues

NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class IGPTConfig:
    image_size: Size = 32  # rows, columns; one number for a square
    channels: int = 3
    classes: int = field(default=0, metadata=MAY_BE_ZERO)  # 0: no head, returns the pooled features
    colors: int = 512  # of the palette
    width: int = 512  # channels of a token
    depth: int = 24  # blocks
    heads: int = 8  # attention heads, each width / heads wide
    causal: bool = True  # False: every pixel attends to all, for masked prediction as in BERT
    feature_layer: int | None = None  # blocks before the features; default: depth / 2
    dynamic: bool = False  # accept any size at run time; the positions are resampled

    def __post_init__(self) -> None:
        check_fields(self)
        check_heads(self.width, self.heads)
        if self.feature_layer is not None and self.feature_layer > self.depth:
            raise ConfigError(f"feature_layer is {self.feature_layer}; expected at most {self.depth}, the depth")

    @property
    def feature_blocks(self) -> int:
        """The number of blocks that the features are computed by."""
        return self.feature_layer or max(self.depth // 2, 1)


class IGPT(PatchEncoder):
    """(B, C, H, W) → logits (B, classes), or without a head the features (B, D). `color_logits` predicts the pixels.

    Images are in [−1, 1], as the palette (mean and std 0.5). With a head, the layers above the features are frozen.
    """

    config: IGPTConfig
    no_maps_reason = "its attention is over single pixels, each of which attends only to those before it"
    no_masking_reason = "its tokens are palette colors of single pixels"

    def __init__(self, config: IGPTConfig) -> None:
        super().__init__(config)
        width, size, used = config.width, pair(config.image_size), config.feature_blocks
        self.levels = make_single_level(size, (1, 1), width, used)  # the blocks that `forward` runs
        self.sizes = make_patch_sizes((1, 1), dynamic=config.dynamic)
        self.classifiers = (("mean", "head"),) if config.classes else ()
        self.final_norm = (
            f"blocks.{used}.norm1" if used < config.depth else "norm"
        )  # of the layer above, as the authors
        if not config.causal:
            self.no_maps_reason = "its attention is over single pixels"

        self.register_buffer("palette", torch.empty(config.colors, config.channels))
        self.palette: Tensor
        self.colour_embed = nn.Embedding(config.colors + config.causal, width)  # last row: start of the sequence
        self.pos_embed = nn.Parameter(torch.empty(1, size[0] * size[1], width))
        blocks = [CausalBlock(width, config.heads, causal=config.causal) for _ in range(config.depth)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, NORM_EPS)
        self.output = nn.Linear(width, config.colors, bias=False)  # not tied to the embedding
        self.head = make_head(width, config.classes)
        if config.classes:
            for module in (*self.blocks[used:], self.norm, self.output):
                module.requires_grad_(False)
            self.get_submodule(self.final_norm).requires_grad_(True)
        self.init_weights()

    def draw_weights(self) -> None:
        """Every weight as in the authors' code; the output and the head are zero. The palette is a cube of colors."""
        width, depth = self.config.width, self.config.depth
        self.palette.copy_(make_cube_palette(*self.palette.shape))
        nn.init.normal_(self.colour_embed.weight, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.01)
        for block in self.blocks:
            nn.init.normal_(block.attn.qkv.weight, std=1 / math.sqrt(width))
            nn.init.normal_(block.attn.proj.weight, std=1 / math.sqrt(width * depth))
            nn.init.normal_(block.mlp.fc1.weight, std=0.02)
            nn.init.normal_(block.mlp.fc2.weight, std=0.02)
        nn.init.zeros_(self.output.weight)
        for weight in self.head.parameters():
            nn.init.zeros_(weight)

    @property
    def has_default_palette(self) -> bool:
        """Whether the palette is that of a new model, not one of training images."""
        return torch.equal(self.palette.cpu(), make_cube_palette(*self.palette.shape))

    def quantize(self, images: Tensor) -> Tensor:
        """The nearest palette color of each pixel, by its squared distance: (B, C, H, W) → (B, n)."""
        self.check_images(images)
        pixels, palette = images.float().flatten(2), self.palette.float()  # elementwise: autocast would round a product
        distances = [(pixels[:, c, :, None] - palette[:, c]).square() for c in range(self.config.channels)]
        return torch.stack(distances).sum(0).argmin(-1)

    def paint(self, colors: Tensor) -> Tensor:
        """The inverse of `quantize`, for images of the size in the config: (B, n) → (B, C, H, W)."""
        return self.palette[colors].transpose(1, 2).unflatten(2, self.grid)

    def embed_colors(self, colors: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Embed the inputs of the sequence, before positions are added: (B, n) → (B, n, D).

        If causal, the start of the sequence comes first, and the last pixel is dropped. The embeddings of `hidden`
        pixels, bool (B, n), are zero.
        """
        if self.config.causal:
            colors = F.pad(colors[:, :-1], (1, 0), value=self.config.colors)
        x = self.colour_embed(colors)
        return x if hidden is None else x.masked_fill(hidden[..., None], 0.0)

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        grid = self.check_images(images)
        return self.embed_colors(self.quantize(images)), grid

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:
        return patches + self.tables(grid)

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:  # noqa: ARG002
        """The blocks before the features: (B, n, D) → (B, n, D)."""
        for block in self.blocks[: self.config.feature_blocks]:
            x = block(x)
        return x

    def color_logits(
        self, colors: Tensor, hidden: Tensor | None = None, cache: list[KeyValues] | None = None
    ) -> Tensor:
        """The prediction of every pixel from those before it, or of all pixels if not causal: (B, n) → (B, n, K)."""
        return self.predict(self.embed_colors(colors, hidden) + self.pos_embed, cache)[0]

    def predict(self, x: Tensor, cache: list[KeyValues] | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, N, K) and features (B, D) of embedded pixels with their positions, (B, N, D), in one pass.

        With a `cache`, they follow the pixels in it, which is extended.
        """
        features = x
        for layer, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache[layer])
            features = x if layer + 1 == self.config.feature_blocks else features
        pooled = self.get_submodule(self.final_norm)(features).mean(1)
        return self.output(self.norm(x)), pooled

    @torch.no_grad()
    def sample(self, given: Tensor, generator: torch.Generator, temperature: float = 1.0) -> Tensor:
        """Draw the pixels after those that are `given`, one after the other: (B, m) → (B, n), for m < n.

        Keys and values of earlier pixels are kept, so that each pixel costs one token.
        """
        if not self.config.causal:
            raise ConfigError("sampling needs a causal model; this one was built with causal=False")
        n = self.pos_embed.shape[1]
        heads, width = self.config.heads, self.config.width // self.config.heads
        cache = [KeyValues.allocate((len(given), heads, n), width, width, self.pos_embed) for _ in self.blocks]
        colors = F.pad(given, (1, 0), value=self.config.colors)  # the start of the sequence first
        done = 0
        while colors.shape[1] <= n:
            x = self.colour_embed(colors[:, done:]) + self.pos_embed[:, done : colors.shape[1]]
            done = colors.shape[1]
            shares = (self.predict(x, cache)[0][:, -1].float() / temperature).softmax(-1)
            draws = torch.rand(len(given), 1, generator=generator).to(given.device)  # on the CPU: the same everywhere
            drawn = torch.searchsorted(shares.cumsum(-1), draws).clamp(max=self.config.colors - 1)
            colors = torch.cat([colors, drawn], dim=1)
        return colors[:, 1:]


class CausalAttention(nn.Module):
    """Self-attention without biases, in which a token attends to itself and those before it: (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # rows: all of q, then k, then v; in each head after head
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()  # (B, H, N, D/H)
        mask = None
        if cache is not None:
            k, v = cache.extend(k, v)
            mask = causal_mask(q.shape[2], k.shape[2], q.device)
        causal = self.causal and mask is None
        return self.proj(merge_heads(attention(q, k, v, mask, causal=causal)))


class QuickGeluMlp(nn.Module):
    """fc2(a·σ(1.702·a)), a = fc1(x), without biases: (B, N, D) → (B, N, D)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class CausalBlock(nn.Module):
    """A pre-norm block with RMS norms: (B, N, D) → (B, N, D)."""

    recompute = False  # set on a block: trades time for memory, activations are computed again in the backward pass

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, NORM_EPS)
        self.attn = CausalAttention(width, heads, causal=causal)
        self.norm2 = nn.RMSNorm(width, NORM_EPS)
        self.mlp = QuickGeluMlp(width, 4 * width)

    def forward(self, x: Tensor, cache: KeyValues | None = None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x, cache, use_reentrant=False)
        return self.compute(x, cache)

    def compute(self, x: Tensor, cache: KeyValues | None) -> Tensor:
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


def make_cube_palette(colors: int, channels: int) -> Tensor:
    """Colors evenly spaced in the cube [−1, 1] of all channels, for a new model: (K, C)."""
    side = max(round(colors ** (1 / channels)), 2)
    side += side**channels < colors
    steps = torch.linspace(-1, 1, side)
    cube = torch.cartesian_prod(*[steps] * channels).reshape(-1, channels)
    return cube[torch.linspace(0, len(cube) - 1, colors).round().long()]


PRESETS = Presets(
    lambda: {
        "igpt_small": IGPTConfig(),
        "igpt_medium": IGPTConfig(width=1024, depth=36),
        "igpt_large": IGPTConfig(width=1536, depth=48, heads=16),
        "igpt_cpu": IGPTConfig(image_size=16, colors=64, width=128, depth=8, heads=4),  # ours
    }
)
ALIASES = {"iGPT-S": "igpt_small", "iGPT-M": "igpt_medium", "iGPT-L": "igpt_large"}
PUBLISHED_HEADS = {preset.width: preset.heads for name, preset in PRESETS.items() if name != "igpt_cpu"}


def infer_config(shapes: side.TensorShapes) -> side.InferredConfig:
    """From the embedding (K + 1, D), which has a row for the start, the palette and the number of blocks."""
    (colors, channels), (rows, width) = (side.get_shape(shapes, n, 2) for n in ("palette", "colour_embed.weight"))
    depth = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")), default=0)
    heads = PUBLISHED_HEADS.get(width)
    fields = {
        "width": width,
        "depth": depth,
        **({"heads": heads} if heads else {}),
        "colors": colors,
        "channels": channels,
        "causal": rows > colors,
    }
    classes = shapes.get("head.weight", (0,))[0]
    return side.InferredConfig(fields={**fields, "classes": classes}, stride=(1, 1))


def make_hf_card(config: side.ConfigFields) -> dict[str, Any]:
    """The entries of transformers' config.json; its biases are zero, and its sequence starts with color K."""
    rows, columns = pair(config["image_size"])
    return {
        "architectures": ["ImageGPTForCausalImageModeling"],
        "model_type": "imagegpt",
        "vocab_size": config["colors"] + 1,
        "n_positions": rows * columns,
        "n_embd": config["width"],
        "n_layer": config["depth"],
        "n_head": config["heads"],
        "activation_function": "quick_gelu",
        "layer_norm_epsilon": NORM_EPS,
        "tie_word_embeddings": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "dtype": "float32",
    }


TRANSPOSED = side.TensorTransform(lambda parts: parts[0].T, lambda tensor, _: [tensor.T])  # transformers' Conv1D
ONE_TABLE = side.TensorTransform(lambda parts: parts[0][None], lambda tensor, _: [tensor[0]])
HF_IMAGEGPT = side.SourceNames(
    layout="imagegpt",
    table=side.parse_table(  # the palette is `clusters` of its preprocessor_config.json
        """
        palette
        {transformer.wte,lm_head,transformer.ln_f}.weight -> {colour_embed,output,norm}.weight
        transformer.wpe.weight -> pos_embed | one_table
        transformer.h.#. -> blocks.#.:
            {ln_1,ln_2}.weight -> {norm1,norm2}.weight
            attn.{c_attn,c_proj}.weight -> attn.{qkv,proj}.weight | transposed
            mlp.{c_fc,c_proj}.weight -> mlp.{fc1,fc2}.weight | transposed
        """,
        one_table=ONE_TABLE,
        transposed=TRANSPOSED,
    ),
    markers=("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight", "lm_head.weight"),
    supported={"classes": (0,), "causal": (True,), "channels": (3,)},
    assumed={"feature_layer": None},
    heads=PUBLISHED_HEADS,
    card=make_hf_card,
)
CHECKPOINT = side.CheckpointSide(infer_config=infer_config, sources=(HF_IMAGEGPT,), resampled={"pos_embed": "grid"})
FAMILY = Family("igpt", IGPTConfig, IGPT, PRESETS, ALIASES, CHECKPOINT)
