"""What a family declares about its checkpoints: its config from the shapes of tensors, and names in public layouts.

Plain data and small functions of shapes and configs. `vitrail.checkpoint` reads, writes and adapts files with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.models.base.name_entries import NameEntry

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
    markers: tuple[str, ...] = ()  # names in the layout by which a file is recognised; (): the table is only written
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
