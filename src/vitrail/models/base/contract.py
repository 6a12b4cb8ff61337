"""What every model offers, and what it declares about itself. Read this file after vit.py.

The rest of the package reads these declarations; it neither probes a model for attributes nor depends on its family.
B batch, E prefix tokens, n = h·w patches, N = E + n tokens, D width, L layers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from warnings import warn

import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, describe_error
from vitrail.layers.positions import Grid
from vitrail.models.base.checks import check_grid, check_images, pair


@dataclass(frozen=True, kw_only=True)
class Level:
    """Blocks that work at one resolution: a plain ViT has one level, a pyramid several."""

    grid: Grid  # rows and columns of tokens for images of the size in the config
    stride: Grid  # pixels per row and per column of the grid
    width: int  # channels
    blocks: tuple[str, ...]  # names of its blocks in the module, in order: blocks.0, …


def make_single_level(image: Grid, stride: Grid, width: int, depth: int) -> tuple[Level]:
    """The level of a model that keeps its grid, with blocks.0, blocks.1, …"""
    blocks = tuple(f"blocks.{layer}" for layer in range(depth))
    return (Level(grid=check_grid(image, stride), stride=stride, width=width, blocks=blocks),)


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """The sizes of images that a model takes: the one in its config, or all multiples from a minimum on."""

    multiple: Grid | None = None  # rows and columns of pixels; (1, 1): any size; None: only the size in the config
    minimum: Grid = (1, 1)  # pixels; for a convnet, so many that its last map has more than one position

    @property
    def dynamic(self) -> bool:
        """Whether the model takes more than one size."""
        return self.multiple is not None


def make_patch_sizes(stride: Grid, *, dynamic: bool) -> ImageSizes:
    """The sizes of a model of patches: one, or if it is dynamic all multiples of a patch."""
    return ImageSizes(multiple=stride, minimum=stride) if dynamic else ImageSizes()


TIMM_NAMES = {  # what a user of timm looks for → ours
    "blocks": "levels, which names the blocks of each resolution",
    "default_cfg": "the preprocessing of vitrail.open_model(…)",
    "embed_dim": "feature_width, or config.width",
    "feature_info": "levels",
    "forward_features": "tokens(images)",
    "forward_head": "logits(tokens)",
    "forward_intermediates": "feature_maps(images)",
    "get_classifier": "get_submodule(name) for each name in classifiers",
    "get_intermediate_layers": "feature_maps(images)",
    "img_size": "config.image_size",
    "num_classes": "config.classes",
    "num_features": "feature_width",
    "num_prefix_tokens": "prefix",
    "pretrained_cfg": "the preprocessing of vitrail.open_model(…)",
    "reset_classifier": "vitrail.load(…, classes=10), which replaces the head",
}


class Model(nn.Module):
    """A module that is built from its config."""

    reads: ClassVar[Literal["images", "text"]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config: Any = config

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # for type checkers: the modules and parameters of each family

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize every weight, at the end of the constructor; on the meta device there is nothing to do."""
        if not next(self.parameters()).is_meta:
            self.draw_weights()

    def draw_weights(self) -> None:
        """The initial weights; by default those of torch's layers."""


class ImageModel(Model):
    """(B, C, H, W) → logits (B, classes), or without a head the pooled features (B, D).

    A model of one level that has `patch_embed`, `blocks`, `norm` and `head`, and reads one token or the mean of all,
    writes only `add_positions`; the defaults of the other methods use these modules. Models of several levels write
    `encode`, `feature_maps` and `logits`.
    """

    reads = "images"
    levels: tuple[Level, ...]  # from the finest grid to the coarsest
    sizes: ImageSizes
    prefix_tokens: tuple[str, ...] = ()  # tokens before the patches, by name: class, distill, register0, …
    memory_tokens: int = 0  # tokens of each layer's own, between prefix and patches, that only its attention reads
    prefix_level: int = 0  # the level, from 0, that the prefix tokens join at
    classifiers: tuple[tuple[str, str], ...] = ()  # what each head reads (a token, mean, map), its module; (): no head
    classifier_tokens: tuple[str, ...] = ()  # prefix tokens that the output is the mean of; (): all patches
    attention_pool: str = ""  # the module that pools the patches with its `weights`; empty: their mean
    merging_module: str = ""  # the module that merges all patches into a few tokens with its `weights`; empty: none
    merge_after: int = 0  # blocks before it
    final_norm: str = "norm"  # the module after the last block; empty: none
    normed_maps: bool = False  # whether `feature_maps` has the final norm, as in models whose levels end with a norm
    first_filters: str = ""  # the weight (D, C, P, Q) of the first layer; empty: it is not a convolution
    whitens: bool = False  # whether `whiten` is implemented
    takes_mask: bool = False  # whether `run` takes a mask of the attention, and no layer before it mixes patches
    no_tokens_reason: str = ""  # why it has no one sequence of tokens; empty if it has
    no_maps_reason: str = ""  # why its attention has no maps over the grid of a level; empty if it has
    no_export_reason: str = ""  # why it cannot be exported; empty if it can
    one_size_export_reason: str = ""  # why an exported file takes one image size; empty if it can take all `sizes`
    no_masking_reason: str = ""  # why a patch cannot be replaced by a mask token; empty if it can
    no_dropping_reason: str = ""  # why blocks need all patches; empty if some can be dropped before the first block

    if not TYPE_CHECKING:

        def __getattr__(self, name):  # called for names that the model does not have: those of its modules, and timm's
            if name in TIMM_NAMES and name not in self._modules:
                raise AttributeError(f"{type(self).__name__} has no {name}; use {TIMM_NAMES[name]}")
            return super().__getattr__(name)  # modules and parameters

    def declare_level(self, stride: Grid) -> None:
        """Set levels, sizes and classifiers of a model that keeps its grid, for patches of so many pixels."""
        config = self.config
        self.levels = make_single_level(pair(config.image_size), stride, config.width, config.depth)
        self.sizes = make_patch_sizes(stride, dynamic=config.dynamic)
        read = self.classifier_tokens[0] if self.classifier_tokens else "mean"
        self.classifiers = ((read, "head"),) if config.classes else ()

    @property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """The old name of `classifiers`: in configs and layers, `heads` are those of the attention."""
        warn("`heads` of a model is now `classifiers`", FutureWarning, stacklevel=2)
        return self.classifiers

    @heads.setter
    def heads(self, classifiers: tuple[tuple[str, str], ...]) -> None:
        warn(f"`heads` of {type(self).__name__} is now `classifiers`", FutureWarning, stacklevel=2)
        self.classifiers = classifiers

    @property
    def grid(self) -> Grid:
        """Rows and columns of the last level."""
        return self.levels[-1].grid

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return len(self.prefix_tokens)

    @property
    def sequence(self) -> tuple[str, ...]:
        """Modules that run one after another, for layer decay and partial training: the blocks of all levels."""
        return tuple(block for level in self.levels for block in level.blocks)

    @property
    def feature_width(self) -> int:
        """Number of features that the head reads, and that the model returns without a head."""
        return self.levels[-1].width

    def forward(self, images: Tensor) -> Tensor:
        # the last block computes only what the head reads: for the class token alone, 7% less work in 12 blocks
        read = [self.prefix_tokens.index(token) + 1 for token in self.classifier_tokens]
        return self.logits(self.encode(images, queries=max(read) if read else None))

    def tokens(self, images: Tensor) -> Tensor:
        """All tokens after the final norm, prefix first: (B, C, H, W) → (B, N, D)."""
        return self.encode(images)

    def encode(self, images: Tensor, queries: int | None = None) -> Tensor:
        """The tokens after the final norm; with `queries`, a model may compute only the first `queries` of them."""
        if self.no_tokens_reason:
            name = type(self).__name__
            raise ConfigError(f"{name} has no sequence of tokens: {self.no_tokens_reason}; use `feature_maps`")
        x, grid = self.embed(images)
        return self.get_submodule(self.final_norm)(self.run(x, grid, queries))

    def logits(self, tokens: Tensor) -> Tensor:
        """The output of the head for `tokens`, by default for the first prefix token or else the mean of all."""
        return self.head(tokens[:, 0] if self.prefix_tokens else tokens.mean(1))  # (B, classes)

    def head_logits(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The output of each of the `classifiers` for `tokens`: (B, N, D) → (B, classes), …"""
        return (self.logits(tokens),)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """One map per level, without prefix tokens and the final norm: (B, C, H, W) → [(B, D, h, w), …]."""
        x, grid = self.embed(images)
        return [self.run(x, grid)[:, self.prefix :].transpose(1, 2).unflatten(2, grid)]

    def embed(
        self, images: Tensor, hidden: Tensor | None = None, mask_token: Tensor | None = None, kept: Tensor | None = None
    ) -> tuple[Tensor, Grid]:
        """The input of the first block, (B, N, D), and the grid of the patches.

        `mask_token` (D,) replaces the patches that are `hidden` (B, n); only those at the indices `kept` (B, K) remain.
        """
        x, grid = self.patches(images)
        if hidden is not None or mask_token is not None:
            self.check_masking("masked", self.no_masking_reason)
            hidden, mask_token = check_mask(hidden, mask_token, x)
            x = torch.where(hidden[..., None], mask_token.to(x.dtype), x)
        x = self.add_positions(x, grid)
        if kept is not None:
            self.check_masking("dropped", self.no_masking_reason or self.no_dropping_reason)
            check_kept(kept, len(x))
            prefix = x.shape[1] - grid[0] * grid[1]  # a token that joins later is not there yet
            x = torch.cat([x[:, :prefix], x[:, prefix:].gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))], dim=1)
        return x, grid

    def patches(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The embedded patches without positions, (B, n, D), and their grid."""
        grid = self.check_images(images)
        return self.patch_embed(images), grid

    def add_positions(self, patches: Tensor, grid: Grid) -> Tensor:  # noqa: ARG002
        """Add the prefix tokens and the positions, by default none: (B, n, D) → (B, N, D)."""
        return patches

    def run(self, x: Tensor, grid: Grid, queries: int | None = None) -> Tensor:
        """All blocks; with `queries`, the last one may compute only the first `queries` tokens: (B, N, D)."""
        *body, last = self.blocks
        for block in body:
            x = block(x, grid)
        return last(x, grid, queries)

    def tables(self, grid: Grid) -> Tensor | None:  # noqa: ARG002
        """The positions added before the first layer, (1, N, D), or before each, (L, N, D); None: nothing is added."""
        return None

    def whiten(self, batches: Iterable[Tensor]) -> None:
        """Set the first filters to the principal components of image patches."""
        raise NotImplementedError

    def check_images(self, images: Tensor) -> Grid:
        """The grid of a batch of images; an error if the model does not take them."""
        multiple = self.sizes.multiple or self.levels[0].stride
        size = pair(self.config.image_size)
        return check_images(images, self.config.channels, size, multiple, dynamic=self.sizes.dynamic)

    def check_masking(self, what: str, reason: str) -> None:
        """Raise an error if there is a reason why patches cannot be masked or dropped."""
        if reason:
            raise ConfigError(f"patches of this {type(self).__name__} cannot be {what}: {reason}; use another model")


def check_mask(hidden: Tensor | None, token: Tensor | None, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Which `patches` (B, n, D) are hidden and what replaces them; an error for masks that torch would broadcast."""
    if hidden is None or token is None:
        given, missing = ("mask_token", "hidden") if hidden is None else ("hidden", "mask_token")
        raise ConfigError(f"{given} without {missing}; expected both, or none of them")
    if hidden.dtype != torch.bool or hidden.shape != patches.shape[:2]:
        raise ConfigError(
            f"hidden is a tensor of {hidden.dtype} and shape {tuple(hidden.shape)}; expected one of torch.bool and "
            f"shape {tuple(patches.shape[:2])}: images, patches"
        )
    if token.numel() != patches.shape[-1]:
        raise ConfigError(f"mask_token has the shape {tuple(token.shape)}; expected ({patches.shape[-1]},)")
    return hidden, token


def check_kept(kept: Tensor, images: int) -> None:
    """Raise an error for anything but indices of patches, for each image."""
    if kept.dtype not in (torch.int32, torch.int64) or kept.ndim != 2 or len(kept) != images:
        raise ConfigError(
            f"kept is a tensor of {kept.dtype} and shape {tuple(kept.shape)}; expected indices of patches, one of "
            f"torch.int64 and shape ({images}, number of patches to keep)"
        )


def check_declarations(model: Any) -> None:
    """Raise an error if an image model lacks a declaration, or declares parts that it does not have."""
    if not isinstance(model, ImageModel):
        return
    name = type(model).__name__
    try:
        _, levels, _ = model.config, model.levels, model.sizes
    except AttributeError as error:
        raise ConfigError(
            f"{describe_error(error)}; expected a model that calls super().__init__(config) and sets levels and sizes"
        ) from None
    if type(model).heads is not ImageModel.heads:
        raise ConfigError(f"{name} declares `heads`; expected `classifiers`, the new name")
    modules, weights = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    declared = {
        "levels": [block for level in levels for block in level.blocks],
        "classifiers": [module for _, module in model.classifiers],
        "final_norm": [model.final_norm] if type(model).encode is ImageModel.encode else [],
        "attention_pool": [model.attention_pool] if model.attention_pool else [],
        "merging_module": [model.merging_module] if model.merging_module else [],
    }
    for what, names in declared.items():
        if missing := [each for each in names if each not in modules]:
            raise ConfigError(f"{what} of {name} names {missing[0]!r}; expected one of its modules")
    if model.first_filters and model.first_filters not in weights:
        raise ConfigError(f"first_filters of {name} is {model.first_filters!r}; expected one of its parameters")
    if unknown := [token for token in model.classifier_tokens if token not in model.prefix_tokens]:
        known = ", ".join(model.prefix_tokens) or "none"
        raise ConfigError(
            f"classifier_tokens of {name} has {unknown[0]!r}; expected some of its prefix_tokens, which are {known}"
        )


def check_reads_images(model: object) -> None:
    """Refuse a model, or the class of one, that reads text; modules of other libraries pass."""
    kind = model if isinstance(model, type) else type(unwrap_compiled(model))
    if issubclass(kind, Model) and kind.reads != "images":
        raise ConfigError(
            f"{kind.__name__} reads {kind.reads}; expected a model that reads images: use vitrail translate"
        )


def find_image_model(model: object) -> ImageModel | None:
    """The model that makes declarations, without torch.compile's wrapper; None for a module of another library."""
    inner = unwrap_compiled(model)
    return inner if isinstance(inner, ImageModel) else None


def takes_other_sizes(model: nn.Module) -> bool:
    """Whether images may have another size than the one in the config; a module of another library takes one size."""
    declared = find_image_model(model)
    return declared is not None and declared.sizes.dynamic


def unwrap_compiled(model: Any) -> Any:
    """The module that torch.compile wrapped, whose code runs the hooks of its parts; any other object unchanged."""
    return getattr(model, "_orig_mod", model)  # importing the wrapper's class would import torch's compiler
