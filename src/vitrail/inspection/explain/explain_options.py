"""Options of `explain`: method, layer, head, token and class, checked before any image is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.base.text import format_count
from vitrail.data.images.class_names import index_classes_by_name, normalize_class_name, split_label
from vitrail.inspection.attention.capture import (
    AnyAttention,
    find_window_mixing,
    has_token_states,
    list_blocks,
    resolve_index,
    why_several_grids,
)
from vitrail.inspection.attention.rollout import HEAD_FUSIONS, HeadFusion
from vitrail.layers.attention import Attention
from vitrail.models.base.contract import ImageModel
from vitrail.models.parts.attention import TwoGridAttention
from vitrail.models.parts.windows import WindowAttention

ExplainMethod = Literal["rollout", "grad-rollout", "attention", "heads", "windows", "pool", "norms"]
EXPLAIN_METHODS: tuple[str, ...] = get_args(ExplainMethod)
METHODS_WITHOUT_HEADS: tuple[ExplainMethod, ...] = ("grad-rollout", "pool", "norms")
METHOD_NAMES: dict[ExplainMethod, str] = {
    "rollout": "rollout",
    "grad-rollout": "gradient rollout",
    "attention": "attention",
    "heads": "attention of each head",
    "windows": "attention between windows",
    "pool": "weights of the attention pool",
    "norms": "token norms",
}
METHODS_OF_SEVERAL_IMAGES = ("pca", "neighbors")  # methods of the explainer
HEAD_TOKEN = "head"  # the tokens that the classifier's head reads


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """How to explain an image. Layers and heads count from 0; −1 is the last."""

    method: ExplainMethod = "rollout"
    layer: int | Literal["all"] = -1  # the last layer of a rollout
    head: int | HeadFusion | Literal["all"] = "mean"  # one head, all heads fused, or each
    token: str = HEAD_TOKEN  # the query: HEAD_TOKEN, class, distill, register0, …, or a patch as "row,column"
    of_class: int | str | None = None  # default: the top class
    discard: float = 0.0  # share of the smallest entries in each row that a rollout ignores
    mass: float | None = None  # share of the attention of each head that a mask keeps; None: no masks

    @property
    def looks(self) -> str:
        """Who attends, in the words of a title: What the model looked at, What patch 1,2 looked at in layer 3."""
        place = "window" if self.method == "windows" else "patch"
        token = f"{place} {self.token}" if "," in self.token else f"the {self.token} token"
        who = "the model" if self.token == HEAD_TOKEN else token
        is_one_layer = self.method in ("attention", "windows") and self.layer not in (-1, "all")
        return f"What {who} looked at" + f" in layer {self.layer}" * is_one_layer

    @property
    def description(self) -> str:
        """The method and its settings, for a caption: gradient rollout over 12 layers."""
        parts = [METHOD_NAMES[self.method]]
        if "rollout" in self.method:
            every = {-1: "all layers", "all": "up to each layer"}
            parts[0] += f" over {every.get(self.layer) or format_count(int(self.layer) + 1, 'layer')}"
        elif self.method != "pool":
            every = {-1: "the last layer", "all": "each layer"}
            parts[0] += (
                f" {'after' if self.method == 'norms' else 'in'} {every.get(self.layer) or f'layer {self.layer}'}"
            )
        if self.method in ("rollout", "attention", "windows"):
            parts.append(f"{self.head} over heads" if self.head in HEAD_FUSIONS else f"head {self.head}")
        if self.discard:
            parts.append(f"without the smallest {self.discard:.0%} of each row")
        return ", ".join(parts).replace("head all", "each head")

    def titles(self, layers: int, heads: int) -> tuple[tuple[str, ...], ...]:
        """Title of each map, in rows of layers and columns of heads, of resolved options."""
        start = "up to layer" if "rollout" in self.method else "layer"
        rows = [f"{start} {number}" for number in (range(layers) if self.layer == "all" else [self.layer])]
        if self.method == "pool":
            rows = ["attention pool"]
        if self.method in METHODS_WITHOUT_HEADS:
            return tuple((row,) for row in rows)
        columns = [f"head {number}" for number in (range(heads) if self.head == "all" else [self.head])]
        if self.head in HEAD_FUSIONS:
            columns = [f"{self.head} over heads"]
        return tuple(tuple(f"{row}, {column}" for column in columns) for row in rows)


def resolve_options(
    options: ExplainOptions, model: ImageModel, layers: Sequence[AnyAttention], labels: Sequence[str] | None
) -> ExplainOptions:
    """Check the options against the model and resolve layer, head and class to numbers."""
    method, layer, head, of_class = options.method, options.layer, options.head, options.of_class
    if str(method) in METHODS_OF_SEVERAL_IMAGES:
        raise ConfigError(f"method {str(method)!r} is of several images; use `Explainer.{method}` with a list of them")
    if method not in EXPLAIN_METHODS:
        raise unknown_name_error("method", method, EXPLAIN_METHODS)
    if method != "norms" and model.no_maps_reason:
        raise ConfigError(f"method {method!r} is undefined for this model: {model.no_maps_reason}; use 'norms'")
    check_one_grid(options, model, layers)
    if method == "pool" and not model.attention_pool:
        raise ConfigError(
            "method 'pool' needs a model with attention pooling, which this one does not have; use another method"
        )
    if method == "grad-rollout" and not model.config.classes:
        raise ConfigError("method 'grad-rollout' needs a model with classes, but this one has no head; use 'rollout'")
    if method == "grad-rollout" and any(each.is_inference() for each in model.parameters()):
        raise ConfigError("method 'grad-rollout' needs gradients; create the model outside of torch.inference_mode")
    if method == "norms" and not has_token_states(model):
        raise ConfigError(
            "method 'norms' needs a model with blocks and a final norm, which this one does not have; use another"
        )
    if method == "heads":
        if head not in ("mean", "all") or layer == "all":
            raise ConfigError(
                f"method 'heads' shows all heads of one layer, not `layer` {layer} and `head` {head}; use 'attention'"
            )
        head = "all"
        if options.token == HEAD_TOKEN and len(model.classifier_tokens) == 1:
            options = replace(options, token=model.classifier_tokens[0])  # for the title
    check_mass(options)
    if layer != "all":
        layer = resolve_index(parse_integer("layer", layer, ("all",)), len(layers) or len(list_blocks(model)), "layer")
    check_late_class_token(options, layer, layers)
    check_late_prefix(options, layer, model)
    check_merged_tokens(options, layer, model)
    check_window_maps(options, layer, layers)
    if method in ("rollout", "attention", "heads"):
        check_rows_sum_to_one(method, layer, layers, has_head=bool(model.config.classes))
    if method == "pool" and layer != len(layers) - 1:
        raise ConfigError(
            f"layer {layer} cannot be combined with method 'pool', which comes after all layers; leave it out"
        )
    if head != "mean" and method in METHODS_WITHOUT_HEADS:
        raise ConfigError(f"head {head} cannot be combined with method {method!r}, which fuses all heads; leave it out")
    if head not in (*HEAD_FUSIONS, "all"):
        number = parse_integer("head", head, (*HEAD_FUSIONS, "all"))
        head = resolve_index(number, min(each.heads for each in layers), "head")
    if options.token != HEAD_TOKEN and method in ("pool", "norms"):
        raise ConfigError(f"token {options.token!r} cannot be combined with method {method!r}; leave it out")
    if not isinstance(options.discard, int | float) or not 0 <= options.discard < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"discard is {options.discard!r}; expected 0 or more, and less than 1")
    if options.discard and method != "rollout":
        raise ConfigError(
            f"discard {options.discard} cannot be combined with method {method!r}; it applies to 'rollout'"
        )
    if not model.sizes.dynamic and method != "windows":  # otherwise after the pass
        find_token_index(options.token, model.prefix_tokens, find_layer_grid(model, -1 if layer == "all" else layer))
    if of_class is not None:
        of_class = find_class_index(of_class, model.config.classes, labels)
    return replace(options, layer=layer, head=head, of_class=of_class)


def check_one_grid(options: ExplainOptions, model: ImageModel, layers: Sequence[AnyAttention]) -> None:
    """Refuse what follows tokens through several layers, or shows several, if the layers do not share a grid."""
    why = why_several_grids(model)
    if "rollout" in options.method and (why or lacks_square_maps(layers)):
        why = why or "its tokens attend within windows or to fewer keys, so layers have no matrix of all tokens"
        raise ConfigError(f"method {options.method!r} is undefined for this model: {why}; use 'attention' or 'heads'")
    if options.layer == "all" and why:
        raise ConfigError(f"layer 'all' is undefined for this model: {why}; use the number of a layer")


def lacks_square_maps(layers: Sequence[AnyAttention]) -> bool:
    """Whether some layers have no map from all tokens to all tokens."""
    return any(isinstance(each, WindowAttention | TwoGridAttention) for each in layers)


def find_layer_grid(model: ImageModel, layer: int) -> tuple[int, int]:
    """The grid of an attention layer for images of the size in the config; with several levels, a block has one."""
    return model.grid if len(model.levels) == 1 else [level.grid for level in model.levels for _ in level.blocks][layer]


def check_mass(options: ExplainOptions) -> None:
    if options.mass is None:
        return
    if options.method != "heads":
        raise ConfigError(f"`mass` {options.mass} cannot be combined with method {options.method!r}; use 'heads'")
    if not isinstance(options.mass, int | float) or not 0 < options.mass < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"`mass` is {options.mass!r}; expected more than 0 and less than 1, for example 0.6")


def check_late_class_token(
    options: ExplainOptions, layer: int | Literal["all"], layers: Sequence[AnyAttention]
) -> None:
    """Check which token can be a query in which layer if the class token joins late (CaiT)."""
    joins = next((n for n, each in enumerate(layers) if isinstance(each, Attention)), 0)
    if not joins:
        return
    last, patch = len(layers) - 1, "," in options.token
    if options.method == "grad-rollout" and not patch and (layer == "all" or layer < joins):
        raise ConfigError(f"layer {layer} comes before the class token joins; expected {joins} to {last}, or -1")
    if options.method in ("attention", "heads") and patch and (layer == "all" or layer >= joins):
        raise ConfigError(
            f"token {options.token!r} is not a query in layer {layer}, where only the class token is; use 'class'"
        )


def check_late_prefix(options: ExplainOptions, layer: int | Literal["all"], model: ImageModel) -> None:
    """Refuse attention of a class token in levels before the one that it joins at (CvT)."""
    joins, count = sum(len(level.blocks) for level in model.levels[: model.prefix_level]), len(list_blocks(model))
    asked = options.method in ("attention", "heads") and "," not in options.token
    if asked and layer != "all" and layer < joins:
        raise ConfigError(
            f"layer {layer} comes before the class token joins; expected {joins} to {count - 1}, or -1, or a patch as "
            "`token`: row,column"
        )


def check_merged_tokens(options: ExplainOptions, layer: int | Literal["all"], model: ImageModel) -> None:
    """Refuse a patch as the query of layers after patches are merged."""
    if model.merging_module and "," in options.token and (layer == "all" or layer >= model.merge_after):
        raise ConfigError(
            f"token {options.token!r} is not a query in layer {layer}: from layer {model.merge_after} on, patches are "
            f"merged; use a layer from 0 to {model.merge_after - 1}, or leave the token out"
        )


def check_window_maps(options: ExplainOptions, layer: int | Literal["all"], layers: Sequence[AnyAttention]) -> None:
    """Refuse attention between windows of layers that have none."""
    if options.method != "windows":
        return
    possible = [number for number, each in enumerate(layers) if find_window_mixing(each) is not None]
    if not possible:
        raise ConfigError(
            "method 'windows' is undefined for this model: it has no windows that attend to each other; use 'attention'"
        )
    if layer not in possible:
        raise ConfigError(
            f"method 'windows' is undefined for layer {layer}: its windows do not attend to each other; expected one "
            f"of {', '.join(map(str, possible))}"
        )


def default_method(
    model: ImageModel,
    layers: Sequence[AnyAttention],
    *,
    head: int | HeadFusion | Literal["all"] | str = "mean",
    discard: float = 0.0,
    mass: float | None = None,
) -> ExplainMethod:
    """The method used by default: grad-rollout for a model with classes, else rollout; attention if it is undefined.

    `head` and `discard` are options of rollout, and `mass` is one of heads, so they select it.
    """
    if not layers:
        return "norms"
    if mass is not None:
        return "heads"
    if why_several_grids(model) or lacks_square_maps(layers):
        return "attention"
    without_gradients = any(each.is_inference() for each in model.parameters())
    if model.config.classes and head == "mean" and not discard and not without_gradients:
        return "grad-rollout"
    if not any(each.no_shares_reason for each in layers):
        return "rollout"
    return "grad-rollout" if model.config.classes else "attention"


def default_methods(model: ImageModel, layers: Sequence[AnyAttention]) -> tuple[ExplainMethod, ...]:
    """The methods used by default if nothing else is given: for a model without a head, each head is shown, too."""
    first = default_method(model, layers)
    return (first,) if model.config.classes or first == "norms" else (first, "heads")


def check_rows_sum_to_one(
    method: ExplainMethod, layer: int | Literal["all"], layers: Sequence[AnyAttention], *, has_head: bool
) -> None:
    """Refuse rollout and attention maps of layers whose attention rows do not sum to 1."""
    needed = range(len(layers)) if layer == "all" else range(layer + 1) if method == "rollout" else [layer]
    reasons = [each.no_shares_reason for each in layers]
    if why := next((reasons[n] for n in needed if reasons[n]), ""):
        others = " or ".join(str(n) for n, reason in enumerate(reasons) if not reason)
        alternatives = ["'grad-rollout'"] * has_head + [f"'attention' of layer {others}"] * bool(others)
        expected = ", or ".join(alternatives) or "'norms'"
        raise ConfigError(f"method {method!r} is undefined for this model: {why}; use {expected}")


def parse_integer(what: str, given: object, words: Sequence[str]) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise ConfigError(f"{what} is {given!r}; expected a number, or {', '.join(words)}") from None


def find_token_index(
    token: str, names: Sequence[str], grid: tuple[int, int], place: Literal["patch", "window"] = "patch"
) -> int | None:
    """Index of a token among all tokens, after the prefix tokens of these names; None for what the head reads."""
    if token == HEAD_TOKEN:
        return None
    if token in names:
        return names.index(token)
    parts = str(token).split(",")
    if len(parts) == 2 and all(part.strip().isdecimal() and len(part) < 9 for part in parts):
        row, column = map(int, parts)
        if row < grid[0] and column < grid[1]:
            return len(names) + row * grid[1] + column
    known = ", ".join((HEAD_TOKEN, *names))
    patches = f"a {place} as row,column from 0,0 to {grid[0] - 1},{grid[1] - 1}"
    raise ConfigError(f"token is {token!r}; expected one of {known}, or {patches}")


def find_class_index(given: int | str, classes: int, labels: Sequence[str] | None) -> int:
    """Index of a class given by number, by label or by one of a label's names, with or without its WordNet id."""
    if not classes:
        raise ConfigError(f"class {given!r} needs a model with classes, but this one has no head")
    text = str(given).strip()
    if text.removeprefix("-").isdecimal() and len(text) < 9:
        if not 0 <= int(text) < classes:
            raise ConfigError(f"class is {text}; expected 0 to {classes - 1}: there are {classes}")
        return int(text)
    names = index_classes_by_name(labels or ())
    if normalize_class_name(text) in names:
        return names[normalize_class_name(text)]
    matches = [
        n
        for n, label in enumerate(labels or ())
        if normalize_class_name(text) in map(normalize_class_name, split_label(label))
    ]
    if matches:
        raise ConfigError(
            f"class {given!r} is the name of {len(matches)} classes; use a number: {matches[0]} or {matches[1]}"
        )
    if labels is None:
        raise ConfigError(
            f"class is {given!r}, but the classes of this model have no names; expected 0 to {classes - 1}"
        )
    raise unknown_name_error("class", given, [name for label in labels for name in split_label(label)])
