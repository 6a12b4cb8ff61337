"""What can be asked of a picture: a method, a layer, a head, a token, a class; checked before any picture is opened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from vitrail.checkpoint.class_mapping import index_classes_by_name, normalise_class_name, split_label
from vitrail.errors import ConfigError, unknown_name_error
from vitrail.inspection.capture import AnyAttention, prefix_token_names, resolve_index, why_no_attention_maps
from vitrail.inspection.rollout import HEAD_FUSIONS, HeadFusion
from vitrail.layers.attention import Attention

ExplainMethod = Literal["rollout", "grad-rollout", "attention", "pool", "norms"]
EXPLAIN_METHODS: tuple[str, ...] = get_args(ExplainMethod)
METHODS_WITHOUT_HEADS: tuple[ExplainMethod, ...] = ("grad-rollout", "pool", "norms")  # to choose from
HEAD_TOKEN = "head"  # the token that the classifier's head reads


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """What is asked of a picture; layers and heads count from 0, or from −1 backwards."""

    method: ExplainMethod = "rollout"
    layer: int | Literal["all"] = -1  # a rollout goes up to this one
    head: int | HeadFusion | Literal["all"] = "mean"  # one of them, all as one, or each
    token: str = (
        HEAD_TOKEN  # who attends: what the head reads, class, distill, register0, …, or a patch as "row,column"
    )
    of_class: int | str | None = None  # none: the likeliest
    discard: float = 0.0  # of a rollout: the share of each row, its smallest entries, that is left out

    @property
    def description(self) -> str:
        """For a title: grad-rollout from the class token."""
        token = f"patch {self.token}" if "," in self.token else f"the {self.token} token"
        return self.method if self.token == HEAD_TOKEN else f"{self.method} from {token}"

    def titles(self, layers: int, heads: int) -> tuple[tuple[str, ...], ...]:
        """What each of so many maps is, once the question is settled: in rows of layers and columns of heads."""
        start = "up to layer" if "rollout" in self.method else "layer"
        rows = [f"{start} {number}" for number in (range(layers) if self.layer == "all" else [self.layer])]
        if self.method == "pool":
            rows = ["attention pool"]
        if self.method in METHODS_WITHOUT_HEADS:
            return tuple((row,) for row in rows)
        columns = [f"head {number}" for number in (range(heads) if self.head == "all" else [self.head])]
        if self.head in HEAD_FUSIONS:
            columns = [f"{self.head} of the heads"]
        return tuple(tuple(f"{row}, {column}" for column in columns) for row in rows)


def resolve_options(
    options: ExplainOptions, model: Any, layers: Sequence[AnyAttention], labels: Sequence[str] | None
) -> ExplainOptions:
    """With layer, head and class as plain numbers; what cannot be asked of this model is refused."""
    method, layer, head, of_class = options.method, options.layer, options.head, options.of_class
    if method not in EXPLAIN_METHODS:
        raise unknown_name_error("method", method, EXPLAIN_METHODS)
    if method != "norms" and (why := why_no_attention_maps(model)):
        raise ConfigError(f"method {method!r} has no meaning here, {why}; expected 'norms'")
    if method == "pool" and not hasattr(getattr(model, "attn_pool", None), "weights"):
        raise ConfigError("method 'pool' of a model without an attention pool; expected another method")
    if method == "grad-rollout" and not model.config.classes:
        raise ConfigError("method 'grad-rollout' of a model without a head; expected one with classes, or 'rollout'")
    if method == "grad-rollout" and any(each.is_inference() for each in model.parameters()):
        raise ConfigError("method 'grad-rollout' of a model made in torch.inference_mode; expected one made outside it")
    if method == "norms" and not all(hasattr(model, name) for name in ("blocks", "norm", "tokens", "logits")):
        raise ConfigError("method 'norms' of a model without blocks and a norm of these names; expected another method")
    if layer != "all":
        layer = resolve_index(parse_integer("layer", layer, ("all",)), len(layers) or len(model.blocks), "layer")
    check_late_class_token(options, layer, layers)
    if method in ("rollout", "attention"):
        check_attention_shares(method, layer, layers, has_head=bool(model.config.classes))
    if method == "pool" and layer != len(layers) - 1:
        raise ConfigError(f"layer {layer} with method 'pool'; expected none: the pool comes after all layers")
    if head != "mean" and method in METHODS_WITHOUT_HEADS:
        raise ConfigError(f"head {head} with method {method!r}, which has no heads to choose; expected none")
    if head not in (*HEAD_FUSIONS, "all"):
        number = parse_integer("head", head, (*HEAD_FUSIONS, "all"))
        head = resolve_index(number, min(each.heads for each in layers), "head")
    if options.token != HEAD_TOKEN and method in ("pool", "norms"):
        raise ConfigError(f"token {options.token!r} with method {method!r}, which shows all at once; expected none")
    if not 0 <= options.discard < 1:
        raise ConfigError(f"discard is {options.discard}; expected a share from 0 up to, but not, 1")
    if options.discard and method != "rollout":
        raise ConfigError(f"discard {options.discard} with method {method!r}; expected it with 'rollout' alone")
    if hasattr(model, "grid") and hasattr(model, "prefix") and not getattr(model.config, "dynamic", False):
        find_token_index(options.token, model, model.prefix, model.grid)  # else when the pass has shown them
    if of_class is not None:
        of_class = find_class_index(of_class, model.config.classes, labels)
    return replace(options, layer=layer, head=head, of_class=of_class)


def check_late_class_token(
    options: ExplainOptions, layer: int | Literal["all"], layers: Sequence[AnyAttention]
) -> None:
    """Of a class token that joins after some layers and asks alone from there on: who asks where."""
    joins = next((n for n, each in enumerate(layers) if isinstance(each, Attention)), 0)
    if not joins:
        return
    last, patch = len(layers) - 1, "," in options.token
    if options.method == "grad-rollout" and not patch and (layer == "all" or layer < joins):
        raise ConfigError(f"layer {layer}, before the class token joins; expected {joins} to {last}, or -1")
    if options.method == "attention" and patch and (layer == "all" or layer >= joins):
        raise ConfigError(
            f"token {options.token!r} in layer {layer}, where the class token asks alone; expected 'class'"
        )


def default_method(model: Any, layers: Sequence[AnyAttention]) -> ExplainMethod:
    """What is asked where nothing is said: a rollout, if this model has one."""
    if not layers:
        return "norms"
    if not any(getattr(each, "no_shares", "") for each in layers):
        return "rollout"
    return "grad-rollout" if model.config.classes else "attention"


def check_attention_shares(
    method: ExplainMethod, layer: int | Literal["all"], layers: Sequence[AnyAttention], *, has_head: bool
) -> None:
    """Weights that are no shares cannot be followed as if they were, nor be shown as parts of a whole."""
    asked = range(len(layers)) if layer == "all" else range(layer + 1) if method == "rollout" else [layer]
    reasons = [getattr(each, "no_shares", "") for each in layers]
    if why := next((reasons[n] for n in asked if reasons[n]), ""):
        others = " or ".join(str(n) for n, reason in enumerate(reasons) if not reason)
        ways = ["'grad-rollout'"] * has_head + [f"'attention' of layer {others}"] * bool(others)
        expected = ", or ".join(ways) or "'norms'"
        raise ConfigError(f"method {method!r} has no meaning here, {why}; expected {expected}")


def parse_integer(what: str, given: object, words: Sequence[str]) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise ConfigError(f"{what} {given!r}; expected a number, or {', '.join(words)}") from None


def find_token_index(token: str, model: Any, prefix: int, grid: tuple[int, int]) -> int | None:
    """Its place among all tokens; None for what the head reads."""
    names = prefix_token_names(model, prefix)
    if token == HEAD_TOKEN:
        return None
    if token in names:
        return names.index(token)
    parts = token.split(",")
    if len(parts) == 2 and all(part.strip().isdecimal() and len(part) < 9 for part in parts):
        row, column = map(int, parts)
        if row < grid[0] and column < grid[1]:
            return prefix + row * grid[1] + column
    known = ", ".join((HEAD_TOKEN, *names))
    places = f"a patch as row,column from 0,0 to {grid[0] - 1},{grid[1] - 1}"
    raise ConfigError(f"token {token!r}; expected one of {known}, or {places}")


def find_class_index(given: int | str, classes: int, labels: Sequence[str] | None) -> int:
    """By number, by name, or by one of the names that a label lists, with WordNet's number or without."""
    if not classes:
        raise ConfigError(f"class {given!r} of a model without a head; expected one with classes")
    text = str(given).strip()
    if text.removeprefix("-").isdecimal() and len(text) < 9:
        if not 0 <= int(text) < classes:
            raise ConfigError(f"class {text}; expected 0 to {classes - 1}: there are {classes}")
        return int(text)
    names = index_classes_by_name(labels or ())
    if normalise_class_name(text) in names:
        return names[normalise_class_name(text)]
    same = [
        n
        for n, label in enumerate(labels or ())
        if normalise_class_name(text) in map(normalise_class_name, split_label(label))
    ]
    if same:
        raise ConfigError(
            f"class {given!r} is the name of {len(same)} classes; expected a number: {same[0]}, {same[1]}"
        )
    if labels is None:
        raise ConfigError(f"class {given!r} of a model whose classes have no names; expected 0 to {classes - 1}")
    raise unknown_name_error("class", given, names)
