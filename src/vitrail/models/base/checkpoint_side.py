"""What a family declares about its checkpoints: its config from the shapes of tensors, and names in public layouts.

Plain data and small functions of shapes and configs. `vitrail.checkpoint` reads, writes and adapts files with them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.base.errors import CheckpointError


@dataclass(frozen=True)
class TensorTransform:
    """Convert a tensor from a layout's arrangement, perhaps in several parts, and back, given the number of heads."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], list[Tensor]]


IDENTITY = TensorTransform(lambda parts: parts[0], lambda tensor, _: [tensor])


MATRIX_AS_CONVOLUTION = TensorTransform(  # (D, C) ↔ (D, C, 1, 1)
    lambda parts: parts[0].flatten(1), lambda matrix, _: [matrix[..., None, None]]
)


def join_parts(count: int, transform: TensorTransform = IDENTITY) -> TensorTransform:
    """Tensors that are one after another along the first axis of ours, each transformed."""
    return TensorTransform(
        lambda parts: torch.cat([transform.to_ours([part]) for part in parts]),
        lambda tensor, heads: [part for each in tensor.chunk(count) for part in transform.to_theirs(each, heads)],
    )


@dataclass(frozen=True)
class NameEntry:
    """One row of a name table, for both directions: our tensor is made of one or more of theirs.

    In a name, # stands for a number, % for a number that the layout counts from 1 and we from 0, @ for such a number of
    two digits, ~ for one that the layout counts from 0 and we from 1, = for the number before it again, * for weight or
    bias, + for any tensor of a batch norm.
    """

    theirs: tuple[str, ...]
    ours: str
    transform: TensorTransform = IDENTITY


def parse_table(text: str, **transforms: TensorTransform) -> tuple[NameEntry, ...]:
    """The rows of a name table, which has one per line: `theirs -> ours`, or one name if both are the same.

    {a,b} stands for several rows; the first braces of theirs correspond to the first of ours, if ours has some.
    [a,b] stands for the parts of one tensor, see `join_parts`. A line that ends with a colon has the beginnings of the
    names in the indented lines below it. `| name` at the end of a line names one of the transforms.
    """
    rows, scopes = list[NameEntry](), [(-1, [("", "")])]  # indentation, beginnings
    for line in filter(str.strip, text.splitlines()):
        indentation = len(line) - len(line.lstrip())
        while scopes[-1][0] >= indentation:
            scopes.pop()
        names, _, transform = line.strip().removesuffix(":").partition(" | ")
        theirs, arrow, ours = names.partition(" -> ")
        expanded = [
            (start + their, our_start + our)
            for their, our in expand_braces(theirs, ours if arrow else theirs)
            for start, our_start in scopes[-1][1]
        ]
        if line.endswith(":"):
            scopes.append((indentation, expanded))
            continue
        for their, our in expanded:
            parts, chosen = list_choices(their, "[]"), transforms[transform] if transform else IDENTITY
            rows.append(NameEntry(parts, our, chosen if len(parts) == 1 else join_parts(len(parts), chosen)))
    return tuple(rows)


def expand_braces(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    their_names, our_names = list_choices(theirs, "{}"), list_choices(ours, "{}")
    if len(our_names) == 1:
        our_names *= len(their_names)
    for pair in zip(their_names, our_names, strict=True):
        yield from expand_braces(*pair) if "{" in pair[0] else [pair]


def list_choices(name: str, brackets: str) -> tuple[str, ...]:
    """The names that the first pair of brackets stands for; without brackets only the name."""
    start, *rest = name.split(brackets[0], 1)
    if not rest:
        return (name,)
    choices, end = rest[0].split(brackets[1], 1)
    outside = re.split(r",(?![^\[]*\])", choices)  # at commas that are not between the other brackets
    return tuple(f"{start}{choice}{end}" for choice in outside)


def make_entry(theirs: str | Iterable[str], ours: str, transform: TensorTransform = IDENTITY) -> NameEntry:
    return NameEntry((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, transform)


TensorShapes = Mapping[str, tuple[int, ...]]  # under our names
ConfigFields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """The tensor names of a family in one public layout; a family may have several tables per layout.

    Reading: of all families, the table is used whose markers are all among the names of the file's tensors; if several
    match, the one with most markers. Writing: the first table of the model's family that accepts its config is used.
    """

    layout: str
    table: tuple[NameEntry, ...]  # all names are read; for a tensor with several, the first is written
    markers: tuple[str, ...] = ()  # names in the layout by which a file is recognized; (): the table is only written
    named: str = ""  # prefix of the model name in the file, for models with the same tensors as another family
    accepts: Callable[[ConfigFields], bool] = lambda _: True
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])  # values by field
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields that its readers do not get from a file
    heads: Mapping[int, int] = field(default_factory=dict[int, int])  # attention heads of published models, by width
    card: Callable[[ConfigFields], dict[str, Any]] | None = None  # entries of config.json; None: only files are written
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the code of this layout, see its file


@dataclass(frozen=True, kw_only=True)
class InferredConfig:
    """Fields of a config that follow from the shapes of tensors."""

    fields: dict[str, Any]
    stride: tuple[int, int] | None = (
        None  # pixels per position of `pos_embed`; None: `fields` have the image size, or None for it
    )
    prefix: int = 0  # rows of `pos_embed` for prefix tokens
    certain: frozenset[str] = frozenset()  # fields that the tensors decide, whatever a config or a user says


# first_grid: the grid of the first level; map: (…, h, w), any grid
# distances: (H, h, w), any grid, by distance in rows and columns
ResampledKind = Literal["grid", "first_grid", "rows", "columns", "offsets", "sums", "kernel", "map", "distances"]
RESAMPLED: Mapping[str, ResampledKind] = {
    "pos_embed": "grid",  # (T, E + h·w, D), prefix rows first
    "pos_rows": "rows",  # (T, h, D)
    "pos_columns": "columns",  # (T, w, D)
    "offsets": "offsets",  # (T, (2h − 1)·(2w − 1), D)
    "patch_embed.proj.weight": "kernel",  # (D, C, P, Q)
}


@dataclass(frozen=True, kw_only=True)
class CheckpointSide:
    """The checkpoints of a family; by default it has no public ones, and vitrail's layout is the only one."""

    infer_config: Callable[[TensorShapes], InferredConfig] | None = None  # for files without a config
    sources: tuple[SourceNames, ...] = ()
    resampled: Mapping[str, ResampledKind] = field(default_factory=lambda: RESAMPLED)  # by the end of a tensor's name
    mlp_ratio: int = 4  # of an MLP whose width the config does not specify
    heads_by_width: bool = False  # whether files of the same width as a preset have its number of attention heads
    implied: Mapping[str, Any] = field(default_factory=dict[str, Any])  # values of fields that the config does not have
    general_family: str = ""  # a family that has the fields of `implied` and computes the same


def get_shape(shapes: TensorShapes, name: str, dimensions: int) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(f"{name} is missing; expected the tensors of a Vision Transformer or a convnet")
    if len(shapes[name]) != dimensions or 0 in shapes[name]:
        raise CheckpointError(f"{name} has shape {shapes[name]}; expected {dimensions} dimensions")
    return shapes[name]


def count_classes(shapes: TensorShapes, head: str) -> int:
    """Rows of the head's weight; 0 without a head."""
    return get_shape(shapes, head, 2)[0] if head in shapes else 0


def count_numbers(names: Mapping[str, object], pattern: str) -> int:
    """How many different numbers the first group of `pattern` has in the names: blocks, stages."""
    return len({match[1] for name in names if (match := re.match(pattern, name))})


def count_stage_blocks(shapes: TensorShapes, stage: str, block: str, first: int = 1) -> tuple[int, ...]:
    """Number of blocks in each stage, from the numbers in the names; stages are counted from `first`."""
    stages = count_numbers(shapes, stage)
    return tuple(count_numbers(shapes, block.format(n)) for n in range(first, first + stages))


def describe_stages(
    shapes: TensorShapes, channels: int, stages: tuple[int, ...], widths: tuple[int, ...], head: str = "head.weight"
) -> dict[str, Any]:
    """Fields of every model of stages; its weights do not tell the image size."""
    classes = count_classes(shapes, head)
    return {"image_size": (224, 224), "channels": channels, "classes": classes, "stages": stages, "widths": widths}


def find_published_heads(presets: Mapping[str, Any], widths: tuple[int, ...]) -> dict[str, Any]:
    """The field `heads` of the published model of these widths, since weights do not tell; nothing for other widths."""
    return next(({"heads": each.heads} for each in presets.values() if each.widths == widths), {})


ARGUMENTS_IN_SHAPES = ("in_chans", "num_classes", "layers", "depth", "w0", "wa", "wm", "group_size")


def make_preset_card(config: ConfigFields, family: str, presets: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a preset: timm opens a folder of a convnet only if it is one of its own models."""
    shape = config.keys() - {"image_size", "channels", "classes"}
    same = (name for name, each in presets.items() if all(asdict(each)[key] == config[key] for key in shape))
    name = next(same, None)
    if name is None:
        raise CheckpointError(
            f"timm cannot open a folder of a custom {family}; expected OUT.safetensors or OUT.pth, "
            f"or a preset: {', '.join(presets)}"
        )
    return {"architecture": name, "num_classes": config["classes"], "model_args": {"in_chans": config["channels"]}}
