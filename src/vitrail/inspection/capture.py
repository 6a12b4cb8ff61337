"""What a model attends to, read by hooks while it answers: fused attention stays on and `forward` has no flag.

B images, H heads, N = E + n tokens: E prefix tokens and n = h·w patches; Nq of them ask; K width of a head, D tokens'.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError, VitrailError
from vitrail.layers.attention import Attention, SelfAttention, attention_weights, split_heads
from vitrail.layers.positions import Grid

AnyAttention = Attention | SelfAttention
FAMILIES_WITH_MAPS = "vit, deit, hybrid, cct, cait, t2t or axial"
MapReduction = Callable[[Tensor, Grid], Any]  # of probabilities (B, H, Nq, N) and the grid of patches


class AttentionCapture:
    """What was seen in the last forward pass."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int],
        heads: Mapping[int, list[int]] | None,
        keep: MapReduction | None,
        *,
        with_gradients: bool,
    ) -> None:
        self.model, self.layers, self.heads, self.keep, self.with_gradients = (
            model,
            tuple(layers),
            heads,
            keep,
            with_gradients,
        )
        self.grid: Grid | None = getattr(model, "grid", None)
        self.token_count = 0  # of all tokens
        self.late_tokens = 0  # of these, the first that the first layers do not know: a class token that joins later
        self.maps_by_layer = dict[int, Any]()  # of each layer its probabilities, or what `keep` made of them
        self.query_counts = dict[int, int]()  # and where slopes are wanted: Nq
        self.values = dict[int, Tensor]()  # v: (B, H, N, K)
        self.head_outputs = dict[int, Tensor]()  # A·v, the heads side by side: (B, Nq, D)
        self.pool_shares: Tensor | None = None  # how much of each token an attention pool took: (B, N)

    @property
    def maps(self) -> list[Any]:
        """Probabilities of the layers asked for, in their order, each (B, H, Nq, N); or what `keep` made of them."""
        if missing := [layer for layer in self.layers if layer not in self.maps_by_layer]:
            raise VitrailError(
                f"nothing was seen of layer {missing[0]}; expected a forward pass of the model itself inside the "
                "capture: what torch.compile or DataParallel made of it is another"
            )
        return [self.maps_by_layer[layer] for layer in self.layers]

    @property
    def patch_grid(self) -> Grid:
        """Rows and columns of the patches."""
        if self.grid is None:
            raise ConfigError(f"{type(self.model).__name__} says no grid of patches; expected an attribute `grid`")
        return self.grid

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.token_count - self.patch_grid[0] * self.patch_grid[1]

    def compute_gradients(self, score: Tensor) -> list[Tensor]:
        """The slope of `score` in every probability, each (B, H, N, N), exact though the fused kernel kept none.

        What a head gives is A·v, so the slope in A is the slope in what it gave, times vᵀ; rows not computed have none.
        """
        made = [self.head_outputs[layer] for layer in self.layers if layer in self.head_outputs]
        if len(made) < len(self.layers) or not score.requires_grad:
            raise VitrailError(
                "no slopes were kept; expected a forward pass, with gradients on, inside capture(model, gradients=True)"
            )
        slopes = torch.autograd.grad(score, made, retain_graph=True)  # for the next class
        found = list[Tensor]()
        for layer, slope in zip(self.layers, slopes, strict=True):
            v = self.values[layer].float()
            by_row = split_heads(slope.float(), v.shape[1]) @ v.transpose(-2, -1)  # (B, H, Nq, N)
            by_row = by_row if self.heads is None else by_row[:, self.heads[layer]]
            found.append(self.pad_late_tokens(F.pad(by_row, (0, 0, 0, self.query_counts[layer] - by_row.shape[2]))))
        return found

    def record_token_grid(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before the first layer: how many tokens there are, and in what grid."""
        given = bind_arguments(module, args, named)
        count, self.grid = given.get("inputs", given["x"]).shape[1], given.get("grid", self.grid)
        whole = 0 if self.grid is None else getattr(self.model, "prefix", 0) + self.grid[0] * self.grid[1]
        self.token_count = max(count, whole)
        self.late_tokens = self.token_count - count

    def pad_late_tokens(self, maps: Tensor) -> Tensor:
        """A map among all tokens; of those that join later nothing is taken and nothing given, they keep themselves."""
        late = self.late_tokens if maps.shape[3] == self.token_count - self.late_tokens else 0
        return F.pad(maps, (late, 0, late, 0)) if late else maps

    @torch.no_grad()
    def record_layer(self, layer: int, module: AnyAttention, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before a layer."""
        q, k, v, mask = project_qkv(module, bind_arguments(module, args, named))
        with torch.autocast(q.device.type, enabled=False):
            weigh = module.weigh if isinstance(module, SelfAttention) else attention_weights
            weights = weigh(q.float(), k.float(), mask)
        weights = weights if self.heads is None else weights[:, self.heads[layer]]
        if self.with_gradients:
            self.values[layer], self.query_counts[layer] = v, weights.shape[2]
        weights = self.pad_late_tokens(weights)
        self.maps_by_layer[layer] = weights if self.keep is None else self.keep(weights, self.patch_grid)

    def record_head_outputs(self, layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        """A hook between a layer's attention and its projection."""
        # of frozen weights nothing has a slope yet: it starts here
        self.head_outputs[layer] = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        return self.head_outputs[layer]

    @torch.no_grad()
    def record_pool(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """A hook before an attention pool."""
        shares = module.weights(args[0]).float().mean(1)[:, 0]  # (B, n)
        shares = shares / shares.sum(-1, keepdim=True)  # half precision rounds
        self.pool_shares = F.pad(shares, (self.token_count - shares.shape[1], 0))


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    keep: MapReduction | None = None,
    gradients: bool = False,
) -> Generator[AttentionCapture]:
    """Every forward pass inside also gives the attention probabilities of these layers and heads; unless said, of all.

    They are softmax(q·kᵀ/√K) once more, from the q and k of the pass, with its positions and masks, in float32, of all
    tokens, also where the pass itself computes fewer; where heads are mixed (CaiT), what they are after it.
    `keep` makes of a layer's what is to be held of it in its place.
    """
    found = [] if layers is not None and not layers and why_no_attention_maps(model) else find_attention_layers(model)
    chosen = (
        list(range(len(found))) if layers is None else [resolve_index(each, len(found), "layer") for each in layers]
    )
    picked = (
        None if heads is None else {n: [resolve_index(each, found[n].heads, "head") for each in heads] for n in chosen}
    )
    seen = AttentionCapture(model, chosen, picked, keep, with_gradients=gradients)
    pool: Any = getattr(model, "attn_pool", None)
    with ExitStack() as hooks:  # each is removed at the end, also after an exception
        first: nn.Module = found[0] if found else model.get_submodule("blocks.0")
        hooks.enter_context(first.register_forward_pre_hook(seen.record_token_grid, with_kwargs=True))
        for layer in chosen:
            hooks.enter_context(
                found[layer].register_forward_pre_hook(partial(seen.record_layer, layer), with_kwargs=True)
            )
            if gradients:
                hooks.enter_context(
                    found[layer].proj.register_forward_pre_hook(partial(seen.record_head_outputs, layer))
                )
        if hasattr(pool, "weights"):
            hooks.enter_context(pool.register_forward_pre_hook(seen.record_pool))
        hooks.enter_context(force_eager(model))
        yield seen


def force_eager(model: nn.Module) -> AbstractContextManager[object]:
    """What torch.compile made of the model or its parts, which is blind to hooks, rests."""
    parts = list(model.modules())
    if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None for each in parts):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def bind_arguments(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What the module was called with, by name; None is as good as left out."""
    given = signature(module.forward).bind(*args, **named).arguments
    return {name: value for name, value in given.items() if value is not None}


def project_qkv(module: AnyAttention, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and mask as in the pass, but every token asks; under a mask, which may be of them alone, the queries."""
    mask = given.get("mask")
    if isinstance(module, SelfAttention):
        return module.project(given["x"], given.get("grid"), mask, None if mask is None else given.get("queries"))
    return *module.project(given["x"], given.get("inputs")), mask


@contextmanager
def capture_tokens(model: Any, keep: Callable[[Tensor], Tensor] = Tensor.detach) -> Generator[list[Tensor]]:
    """The tokens of the last forward pass, (B, N, D): after the embedding, after each block, after the final norm.

    Or what `keep` makes of each. After the last block there are those that the pass computed; `model.tokens` has all.
    """
    seen = list[Tensor]()

    def enter(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen[:] = [keep(given[0])]

    def leave(_: nn.Module, __: tuple[Any, ...], made: Tensor) -> None:
        seen.append(keep(made))

    with ExitStack() as hooks:
        hooks.enter_context(model.blocks[0].register_forward_pre_hook(enter))
        for part in (*model.blocks, *getattr(model, "blocks_token_only", ()), model.norm):
            hooks.enter_context(part.register_forward_hook(leave))
        hooks.enter_context(force_eager(model))
        yield seen


def find_attention_layers(model: nn.Module) -> list[AnyAttention]:
    """In the order of the model; one without any is refused. What is called twice is one layer, its last call seen."""
    found = [module for module in model.modules() if isinstance(module, Attention | SelfAttention)]
    if why := why_no_attention_maps(model):
        raise ConfigError(
            f"{type(model).__name__} has no attention to look at: {why}; expected a model whose tokens ask each other, "
            f"such as {FAMILIES_WITH_MAPS}; the tokens of any model are in token_states"
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no attention to look at; expected a transformer of vitrail's layers, such as "
            f"{FAMILIES_WITH_MAPS}: weights of timm and others become one by vitrail.load"
        )
    return found


def why_no_attention_maps(model: nn.Module) -> str:
    """Why the attention of its blocks has no maps; of other models nothing."""
    blocks = getattr(model, "blocks", None)
    parts = (blocks if isinstance(blocks, nn.Module) else model).modules()  # no stem is looked at
    return next((str(module.unseen) for module in parts if hasattr(module, "unseen")), "")


def resolve_index(given: int, count: int, what: str) -> int:
    """Counted from 0, or from −1 backwards."""
    if not -count <= given < count:
        raise ConfigError(f"{what} {given}; expected 0 to {count - 1}, or -1 for the last: there are {count}")
    return given % count


def prefix_token_names(model: Any, prefix: int) -> tuple[str, ...]:
    """What the tokens before the patches are: class, distill, register0, register1, …"""
    names = [
        name
        for name, part in (("class", "cls_token"), ("distill", "dist_token"))
        if getattr(model, part, None) is not None
    ]
    return (*names, *(f"register{number}" for number in range(prefix - len(names))))[:prefix]


def head_token_shares(seen: AttentionCapture) -> Tensor:
    """The share of each token in what the head reads, (B or 1, N): of the class token all, of averaged patches 1/n."""
    if seen.pool_shares is not None:
        return seen.pool_shares
    shares = torch.zeros(1, seen.token_count)
    names, config = prefix_token_names(seen.model, seen.prefix), getattr(seen.model, "config", None)
    if "class" in names and getattr(config, "pool", "class") == "class":
        answer = getattr(config, "answer", "both")
        read = [names.index(name) for name in ("class", "distill") if name in names and answer in ("both", name)]
    else:
        read = list(range(seen.prefix, seen.token_count))
    shares[:, read] = 1 / len(read)
    return shares
