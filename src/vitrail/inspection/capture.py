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
SEEN = "vit, deit, hybrid, cct, cait, t2t or axial"
Keep = Callable[[Tensor, Grid], Any]  # of probabilities (B, H, Nq, N) and the grid of patches


class Capture:
    """What was seen in the last forward pass."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[int],
        heads: Mapping[int, list[int]] | None,
        keep: Keep | None,
        *,
        sloped: bool,
    ) -> None:
        self.model, self.layers, self.heads, self.keep, self.sloped = model, tuple(layers), heads, keep, sloped
        self.grid: Grid | None = getattr(model, "grid", None)
        self.count = 0  # of all tokens
        self.late = 0  # of these, the first that the first layers do not know: a class token that joins later
        self.kept = dict[int, Any]()  # of each layer its probabilities, or what `keep` made of them
        self.asking = dict[int, int]()  # and where slopes are wanted: Nq
        self.values = dict[int, Tensor]()  # v: (B, H, N, K)
        self.made = dict[int, Tensor]()  # A·v, the heads side by side: (B, Nq, D)
        self.pooled: Tensor | None = None  # how much of each token an attention pool took: (B, N)

    @property
    def maps(self) -> list[Any]:
        """Probabilities of the layers asked for, in their order, each (B, H, Nq, N); or what `keep` made of them."""
        if missing := [layer for layer in self.layers if layer not in self.kept]:
            raise VitrailError(
                f"nothing was seen of layer {missing[0]}; expected a forward pass of the model itself inside the "
                "capture: what torch.compile or DataParallel made of it is another"
            )
        return [self.kept[layer] for layer in self.layers]

    @property
    def patches(self) -> Grid:
        """Rows and columns of the patches."""
        if self.grid is None:
            raise ConfigError(f"{type(self.model).__name__} says no grid of patches; expected an attribute `grid`")
        return self.grid

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.count - self.patches[0] * self.patches[1]

    def gradients(self, score: Tensor) -> list[Tensor]:
        """The slope of `score` in every probability, each (B, H, N, N), exact though the fused kernel kept none.

        What a head gives is A·v, so the slope in A is the slope in what it gave, times vᵀ; rows not computed have none.
        """
        made = [self.made[layer] for layer in self.layers if layer in self.made]
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
            found.append(self.placed(F.pad(by_row, (0, 0, 0, self.asking[layer] - by_row.shape[2]))))
        return found

    def orient(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before the first layer: how many tokens there are, and in what grid."""
        given = arguments(module, args, named)
        count, self.grid = given.get("inputs", given["x"]).shape[1], given.get("grid", self.grid)
        whole = 0 if self.grid is None else getattr(self.model, "prefix", 0) + self.grid[0] * self.grid[1]
        self.count = max(count, whole)
        self.late = self.count - count

    def placed(self, maps: Tensor) -> Tensor:
        """A map among all tokens; of those that join later nothing is taken and nothing given, they keep themselves."""
        late = self.late if maps.shape[3] == self.count - self.late else 0
        return F.pad(maps, (late, 0, late, 0)) if late else maps

    @torch.no_grad()
    def look(self, layer: int, module: AnyAttention, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook before a layer."""
        q, k, v, mask = projected(module, arguments(module, args, named))
        with torch.autocast(q.device.type, enabled=False):
            weigh = module.weigh if isinstance(module, SelfAttention) else attention_weights
            weights = weigh(q.float(), k.float(), mask)
        weights = weights if self.heads is None else weights[:, self.heads[layer]]
        if self.sloped:
            self.values[layer], self.asking[layer] = v, weights.shape[2]
        weights = self.placed(weights)
        self.kept[layer] = weights if self.keep is None else self.keep(weights, self.patches)

    def hold(self, layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        """A hook between a layer's attention and its projection."""
        # of frozen weights nothing has a slope yet: it starts here
        self.made[layer] = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        return self.made[layer]

    @torch.no_grad()
    def look_at_pool(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """A hook before an attention pool."""
        shares = module.weights(args[0]).float().mean(1)[:, 0]  # (B, n)
        shares = shares / shares.sum(-1, keepdim=True)  # half precision rounds
        self.pooled = F.pad(shares, (self.count - shares.shape[1], 0))


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    *,
    keep: Keep | None = None,
    gradients: bool = False,
) -> Generator[Capture]:
    """Every forward pass inside also gives the attention probabilities of these layers and heads; unless said, of all.

    They are softmax(q·kᵀ/√K) once more, from the q and k of the pass, with its positions and masks, in float32, of all
    tokens, also where the pass itself computes fewer; where heads are mixed (CaiT), what they are after it.
    `keep` makes of a layer's what is to be held of it in its place.
    """
    found = [] if layers is not None and not layers and unseen(model) else attention_layers(model)
    chosen = list(range(len(found))) if layers is None else [index_of(each, len(found), "layer") for each in layers]
    picked = None if heads is None else {n: [index_of(each, found[n].heads, "head") for each in heads] for n in chosen}
    seen = Capture(model, chosen, picked, keep, sloped=gradients)
    pool: Any = getattr(model, "attn_pool", None)
    with ExitStack() as hooks:  # each is removed at the end, also after an exception
        first: nn.Module = found[0] if found else model.get_submodule("blocks.0")
        hooks.enter_context(first.register_forward_pre_hook(seen.orient, with_kwargs=True))
        for layer in chosen:
            hooks.enter_context(found[layer].register_forward_pre_hook(partial(seen.look, layer), with_kwargs=True))
            if gradients:
                hooks.enter_context(found[layer].proj.register_forward_pre_hook(partial(seen.hold, layer)))
        if hasattr(pool, "weights"):
            hooks.enter_context(pool.register_forward_pre_hook(seen.look_at_pool))
        hooks.enter_context(as_written(model))
        yield seen


def as_written(model: nn.Module) -> AbstractContextManager[object]:
    """What torch.compile made of the model or its parts, which is blind to hooks, rests."""
    parts = list(model.modules())
    if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None for each in parts):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def arguments(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What the module was called with, by name; None is as good as left out."""
    given = signature(module.forward).bind(*args, **named).arguments
    return {name: value for name, value in given.items() if value is not None}


def projected(module: AnyAttention, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and mask as in the pass, but every token asks; under a mask, which may be of them alone, the queries."""
    mask = given.get("mask")
    if isinstance(module, SelfAttention):
        return module.project(given["x"], given.get("grid"), mask, None if mask is None else given.get("queries"))
    return *module.project(given["x"], given.get("inputs")), mask


@contextmanager
def token_states(model: Any, keep: Callable[[Tensor], Tensor] = Tensor.detach) -> Generator[list[Tensor]]:
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
        hooks.enter_context(as_written(model))
        yield seen


def attention_layers(model: nn.Module) -> list[AnyAttention]:
    """In the order of the model; one without any is refused. What is called twice is one layer, its last call seen."""
    found = [module for module in model.modules() if isinstance(module, Attention | SelfAttention)]
    if why := unseen(model):
        raise ConfigError(
            f"{type(model).__name__} has no attention to look at: {why}; expected a model whose tokens ask each other, "
            f"such as {SEEN}; the tokens of any model are in token_states"
        )
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no attention to look at; expected a transformer of vitrail's layers, such as "
            f"{SEEN}: weights of timm and others become one by vitrail.load"
        )
    return found


def unseen(model: nn.Module) -> str:
    """Why the attention of its blocks has no maps; of other models nothing."""
    blocks = getattr(model, "blocks", None)
    parts = (blocks if isinstance(blocks, nn.Module) else model).modules()  # no stem is looked at
    return next((str(module.unseen) for module in parts if hasattr(module, "unseen")), "")


def index_of(given: int, count: int, what: str) -> int:
    """Counted from 0, or from −1 backwards."""
    if not -count <= given < count:
        raise ConfigError(f"{what} {given}; expected 0 to {count - 1}, or -1 for the last: there are {count}")
    return given % count


def prefix_names(model: Any, prefix: int) -> tuple[str, ...]:
    """What the tokens before the patches are: class, distill, register0, register1, …"""
    names = [
        name
        for name, part in (("class", "cls_token"), ("distill", "dist_token"))
        if getattr(model, part, None) is not None
    ]
    return (*names, *(f"register{number}" for number in range(prefix - len(names))))[:prefix]


def read_by_head(seen: Capture) -> Tensor:
    """The share of each token in what the head reads, (B or 1, N): of the class token all, of averaged patches 1/n."""
    if seen.pooled is not None:
        return seen.pooled
    shares = torch.zeros(1, seen.count)
    names, config = prefix_names(seen.model, seen.prefix), getattr(seen.model, "config", None)
    if "class" in names and getattr(config, "pool", "class") == "class":
        answer = getattr(config, "answer", "both")
        read = [names.index(name) for name in ("class", "distill") if name in names and answer in ("both", name)]
    else:
        read = list(range(seen.prefix, seen.count))
    shares[:, read] = 1 / len(read)
    return shares
