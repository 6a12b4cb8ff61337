"""Capture attention maps and tokens with hooks, so that fused attention stays on and `forward` has no flag.

B images, H heads, N = E + n tokens: E prefix tokens and n = h·w patches, Nq queries, K head width, D width.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import islice, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.layers.attention import Attention, AttentionLayer, attention_weights, split_heads
from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel, find_image_model, unwrap_compiled
from vitrail.models.catalog.families import load_built_in_families
from vitrail.models.parts.attention import ReducedGrid, TwoGridAttention
from vitrail.models.parts.windows import WindowAttention, WindowMixing, Windows

AnyAttention = Attention | AttentionLayer
# called with probabilities (B, H, Nq, N) and the grid of patches; with those within windows, (B·W, H, m, m), and the
# windows; or with those of fewer keys or queries and both grids
MapReduction = Callable[[Tensor, Grid | Windows | ReducedGrid], Any]


class AttentionCapture:
    """Attention captured in the last forward pass."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int],
        heads: Mapping[int, list[int]] | None,
        keep: MapReduction | None,
        *,
        with_gradients: bool,
    ) -> None:
        self.model, self.layers, self.heads = model, tuple(layers), heads
        self.keep, self.with_gradients = keep, with_gradients
        self.declared = find_image_model(model)
        self.grid: Grid | None = None if self.declared is None else self.declared.grid  # of the last layer recorded
        self.grids = dict[int, Grid]()  # of all layers, also of those whose maps are not captured
        self.windows = dict[int, Windows]()  # of layers that attend within windows; their maps are (B·W, H, m, m)
        self.window_maps = dict[int, Tensor]()  # of layers whose windows attend to each other: (B, H, W, W)
        self.reduced = dict[int, ReducedGrid]()  # of layers with fewer keys or queries; their maps are (B, H, n, k)
        self.token_count = 0
        self.late_tokens = 0  # tokens, the first ones, that join after some layers: CaiT's class token
        self.maps_by_layer = dict[int, Any]()  # attention probabilities, or what `keep` returned for them
        self.query_counts = dict[int, int]()  # Nq, if gradients are wanted
        self.values = dict[int, Tensor]()  # v: (B, H, N, K)
        self.head_outputs = dict[int, Tensor]()  # A·v, heads concatenated: (B, Nq, D)
        self.pool_shares: Tensor | None = None  # weight of each token in attention pooling: (B, N)
        self.merge_weights: Tensor | None = None  # of each patch in each token that they are merged to: (B, M, n)

    @property
    def maps(self) -> list[Any]:
        """Attention probabilities of the selected layers, each (B, H, Nq, N), or what `keep` returned for them."""
        if missing := [layer for layer in self.layers if layer not in self.maps_by_layer]:
            raise VitrailError(
                f"layer {missing[0]} was not captured; run a forward pass of the model itself inside the context, "
                "not of its copy made by torch.compile or DataParallel"
            )
        return [self.maps_by_layer[layer] for layer in self.layers]

    @property
    def patch_grid(self) -> Grid:
        """Rows and columns of the patches, in a model of several grids those of the last layer captured."""
        if self.grid is None:
            raise ConfigError(f"{type(self.model).__name__} has no grid of patches; expected an ImageModel with levels")
        return self.grid

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.token_count - self.patch_grid[0] * self.patch_grid[1]

    def compute_gradients(self, score: Tensor) -> list[Tensor]:
        """Exact gradients of `score` with respect to the attention probabilities, each (B, H, N, N).

        The fused kernel keeps no probabilities A, but a head's output is A·v: ∂score/∂A = ∂score/∂(A·v)·vᵀ. Rows that
        the pass did not compute are 0.
        """
        outputs = [self.head_outputs[layer] for layer in self.layers if layer in self.head_outputs]
        if len(outputs) < len(self.layers) or not score.requires_grad:
            raise VitrailError(
                "no gradients were captured; run a forward pass with gradients enabled inside "
                "capture_attention(model, gradients=True)"
            )
        output_gradients = torch.autograd.grad(score, outputs, retain_graph=True)  # kept for the next class
        gradients = list[Tensor]()
        for layer, output_gradient in zip(self.layers, output_gradients, strict=True):
            v = self.values[layer].float()
            gradient = split_heads(output_gradient.float(), v.shape[1]) @ v.transpose(-2, -1)  # (B, H, Nq, N)
            gradient = gradient if self.heads is None else gradient[:, self.heads[layer]]
            missing = self.query_counts[layer] - gradient.shape[2]
            gradients.append(self.pad_late_tokens(F.pad(gradient, (0, 0, 0, missing))))
        return gradients

    def record_token_grid(self, layer: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Pre-hook of a layer: record its grid; in the first one and in those captured, the number of tokens, too."""
        given = bind_arguments(module, args, named)
        self.merge_weights = self.merge_weights if layer else None  # of this pass
        count, grid = given.get("inputs", given["x"]).shape[1], given.get("grid", self.grid)
        if isinstance(module, TwoGridAttention) and grid is not None:
            self.reduced[layer] = module.reduce_grid(grid)
            queries = self.reduced[layer].queries
            count, grid = count + queries[0] * queries[1] - grid[0] * grid[1], queries
        if grid is not None:
            self.grids[layer] = grid
        if (layer and layer not in self.layers) or self.merge_weights is not None:
            return
        prefix, self.grid = 0 if self.declared is None else self.declared.prefix, grid
        expected = 0 if grid is None else prefix + grid[0] * grid[1]
        self.token_count = max(count, expected)
        if layer == 0 and not isinstance(module, WindowAttention):  # whose tokens may be in windows already
            self.late_tokens = self.token_count - count

    def pad_late_tokens(self, maps: Tensor, axis: int = 3) -> Tensor:
        """Extend a map to tokens that join later, with zero rows and columns; if they do, all tokens lie on `axis`."""
        late = self.late_tokens if maps.shape[axis] == self.token_count - self.late_tokens else 0
        return F.pad(maps, (late, 0, late, 0)) if late else maps

    @torch.no_grad()
    def record_layer(self, layer: int, module: AnyAttention, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Pre-hook of an attention layer: record its probabilities."""
        q, k, v, mask = project_qkv(module, bind_arguments(module, args, named))
        with torch.autocast(q.device.type, enabled=False):
            weigh = module.weigh if isinstance(module, AttentionLayer) else attention_weights
            weights = weigh(q.float(), k.float(), mask)
        weights = weights if self.heads is None else weights[:, self.heads[layer]]
        if self.with_gradients:
            self.values[layer], self.query_counts[layer] = v, weights.shape[2]
        weights = self.pad_late_tokens(weights, axis=2 if layer in self.reduced else 3)
        if isinstance(module, WindowAttention):
            self.windows[layer] = module.cut(self.patch_grid)
        place = self.windows.get(layer) or self.reduced.get(layer)
        self.maps_by_layer[layer] = weights if self.keep is None else self.keep(weights, place or self.patch_grid)

    @torch.no_grad()
    def record_windows(self, layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Pre-hook of attention between windows: record its probabilities."""
        with torch.autocast(args[0].device.type, enabled=False):
            weights = attention_weights(args[0].float(), args[1].float())
        self.window_maps[layer] = weights if self.heads is None else weights[:, self.heads[layer]]

    def record_head_outputs(self, layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        """Pre-hook of a layer's output projection: record the heads' outputs."""
        # with frozen weights nothing requires a gradient yet: it starts here
        self.head_outputs[layer] = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        return self.head_outputs[layer]

    @torch.no_grad()
    def record_pool(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Pre-hook of attention pooling: record the weight of each token."""
        shares = module.weights(args[0]).float().mean(1)[:, 0]  # (B, n)
        shares = shares / shares.sum(-1, keepdim=True)  # undo rounding of half precision
        self.pool_shares = F.pad(shares, (self.token_count - shares.shape[1], 0))

    @torch.no_grad()
    def record_merger(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Pre-hook of what merges patches: record the weight of each patch in each merged token."""
        weights = module.weights(args[0]).float()
        self.merge_weights = weights / weights.sum(-1, keepdim=True)  # undo rounding of half precision


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    keep: MapReduction | None = None,
    gradients: bool = False,
) -> Generator[AttentionCapture]:
    """Capture the attention probabilities of every forward pass inside the context; default: all layers and heads.

    They are recomputed as softmax(q·kᵀ/√K) from the q and k of the pass, with its positions and masks, in float32, for
    all tokens, even if the pass computes fewer; after the mixing of heads in CaiT. `keep` reduces each layer's
    probabilities to what should be stored.
    """
    found = [] if layers is not None and not layers and why_no_attention_maps(model) else find_attention_layers(model)
    chosen = (
        list(range(len(found))) if layers is None else [resolve_index(each, len(found), "layer") for each in layers]
    )
    chosen_heads = (
        None if heads is None else {n: [resolve_index(each, found[n].heads, "head") for each in heads] for n in chosen}
    )
    captured = AttentionCapture(model, chosen, chosen_heads, keep, with_gradients=gradients)
    declared = captured.declared
    with ExitStack() as hooks:  # removes all hooks, also after an exception
        for layer, part in enumerate(found if found or declared is None else list_blocks(declared)):
            record = partial(captured.record_token_grid, layer)
            hooks.enter_context(part.register_forward_pre_hook(record, with_kwargs=True))
        for layer in chosen:
            hooks.enter_context(
                found[layer].register_forward_pre_hook(partial(captured.record_layer, layer), with_kwargs=True)
            )
            if (mixing := find_window_mixing(found[layer])) is not None:
                hooks.enter_context(mixing.register_forward_pre_hook(partial(captured.record_windows, layer)))
            if gradients:
                hooks.enter_context(
                    found[layer].proj.register_forward_pre_hook(partial(captured.record_head_outputs, layer))
                )
        if declared is not None and declared.attention_pool:
            pool = declared.get_submodule(declared.attention_pool)
            hooks.enter_context(pool.register_forward_pre_hook(captured.record_pool))
        if declared is not None and declared.merging_module:
            merger = declared.get_submodule(declared.merging_module)
            hooks.enter_context(merger.register_forward_pre_hook(captured.record_merger))
        hooks.enter_context(force_eager(model))
        yield captured


def force_eager(model: nn.Module) -> AbstractContextManager[object]:
    """Disable torch.compile for a compiled model or parts of it: compiled code ignores hooks."""
    parts: list[Any] = list(model.modules())
    if any(unwrap_compiled(each) is not each or each._compiled_call_impl is not None for each in parts):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def bind_arguments(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, without those that are None."""
    given = signature(module.forward).bind(*args, **named).arguments
    return {name: value for name, value in given.items() if value is not None}


def project_qkv(module: AnyAttention, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and mask of the pass; every token is a query, unless a mask restricts the queries."""
    mask = given.get("mask")
    if isinstance(module, AttentionLayer):
        return module.project(given["x"], given.get("grid"), mask, None if mask is None else given.get("queries"))
    return *module.project(given["x"], given.get("inputs")), mask


@contextmanager
def capture_tokens(model: nn.Module, keep: Callable[[Tensor], Tensor] = Tensor.detach) -> Generator[list[Tensor]]:
    """Capture the tokens of the last forward pass, (B, N, D): after the embedding, each block and the final norm.

    N and D differ between the levels of a model. `keep` reduces each. The last block may compute fewer tokens in
    `forward`; `model.tokens` computes all.
    """
    declared = find_image_model(model)
    if declared is None or not declared.final_norm:
        raise ConfigError(
            f"{type(model).__name__} declares no blocks of tokens; expected a transformer with a final norm"
        )
    blocks, norm = list_blocks(declared), declared.get_submodule(declared.final_norm)
    captured = list[Tensor]()

    def enter(_: nn.Module, given: tuple[Any, ...]) -> None:
        captured[:] = [keep(given[0])]

    def leave(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        captured.append(keep(output))

    with ExitStack() as hooks:
        hooks.enter_context(blocks[0].register_forward_pre_hook(enter))
        for part in (*blocks, norm):
            hooks.enter_context(part.register_forward_hook(leave))
        hooks.enter_context(force_eager(model))
        yield captured


def find_attention_layers(model: nn.Module) -> list[AnyAttention]:
    """Attention layers in model order; an error if there are none. Of a layer called twice the last call counts."""
    declared = find_image_model(model)
    if why := why_no_attention_maps(model):
        others = "; capture_tokens works for this model" if has_token_states(model) else ""
        raise ConfigError(
            f"{type(model).__name__} has no attention maps: {why}; expected a model whose tokens attend to each other, "
            f"such as {list_families_with_maps()}{others}"
        )
    parts = [model] if declared is None else list_blocks(declared)  # not the stem
    found = [layer for part in parts for layer in find_outermost_layers(part)]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no attention layers; expected a transformer made of vitrail's layers, such as "
            f"{list_families_with_maps()}; vitrail.load converts weights of timm and others"
        )
    return found


def find_outermost_layers(module: nn.Module) -> list[AnyAttention]:
    """The attention layers of a module; those inside of another are its parts, such as branches that it adds."""
    if isinstance(module, Attention | AttentionLayer):
        return [module]
    return [layer for child in module.children() for layer in find_outermost_layers(child)]


def find_window_mixing(layer: AnyAttention) -> WindowMixing | None:
    """The part of a layer in which windows attend to each other; None if they do not."""
    return next((part for part in layer.children() if isinstance(part, WindowMixing)), None)


def why_no_attention_maps(model: nn.Module) -> str:
    """Why the attention in the model's blocks has no maps; empty if it has."""
    declared = find_image_model(model)
    return "" if declared is None else declared.no_maps_reason


def has_token_states(model: nn.Module) -> bool:
    """Whether the tokens after each block and the final norm can be captured."""
    declared = find_image_model(model)
    return declared is not None and bool(declared.final_norm)


def why_several_grids(model: ImageModel) -> str:
    """How the grid changes between the layers, for what is defined on one grid; empty if it does not."""
    layer = -1
    for level, following in pairwise(model.levels):
        layer += len(level.blocks)
        if level.grid != following.grid:
            (h, w), (rows, columns) = level.grid, following.grid
            return f"the grid changes from {h}×{w} to {rows}×{columns} between layers {layer} and {layer + 1}"
    return ""


def list_blocks(model: ImageModel) -> list[nn.Module]:
    """All blocks, in order."""
    return [model.get_submodule(name) for level in model.levels for name in level.blocks]


def list_families_with_maps() -> str:
    """The first three, as examples."""
    built = ((each.name, each.build) for each in load_built_in_families())
    found = (name for name, kind in built if issubclass(kind, ImageModel) and not kind.no_maps_reason)
    *names, last = islice(found, 3)
    return f"{', '.join(names)} or {last}"


def resolve_index(given: int, count: int, what: str) -> int:
    """Check an index and make it non-negative: −1 is the last."""
    if not -count <= given < count:
        raise ConfigError(f"{what} is {given}; expected 0 to {count - 1}, or -1 for the last: there are {count}")
    return given % count


def compute_classifier_token_weights(captured: AttentionCapture) -> Tensor:
    """Weight of each token in the input of the head, (B or 1, N): 1 for a class token, 1/n for averaged patches."""
    if captured.pool_shares is not None:
        return captured.pool_shares
    if captured.merge_weights is not None:
        merged = captured.merge_weights.shape[1]
        return torch.full((1, merged), 1 / merged)
    shares = torch.zeros(1, captured.token_count)
    declared = captured.declared
    read = [] if declared is None else [declared.prefix_tokens.index(name) for name in declared.classifier_tokens]
    if read and declared is not None and captured.prefix > declared.prefix + declared.memory_tokens:
        read = list(range(captured.prefix))  # a name stands for several: of regions
    indices = read or list(range(captured.prefix, captured.token_count))
    shares[:, indices] = 1 / len(indices)
    return shares
