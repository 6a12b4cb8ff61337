"""What a family tells about its checkpoints: its config from the shapes of tensors, and its names in public layouts.

Plain data and small functions of shapes and configs. The code that reads, writes and adapts files with them is
`vitrail.checkpoint`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.models.name_entries import NameEntry

TensorShapes = Mapping[str, tuple[int, ...]]  # under our names
ConfigFields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SourceNames:
    """A family in one public layout. A family may have several of one layout, for different kinds of models.

    A file is read by the one, of all families, whose markers are all among the names of its tensors; if there are
    several, by the one with most markers. A model is written by the first of its family that accepts its config.
    """

    layout: str
    table: tuple[NameEntry, ...]  # all names are read; for a tensor with several, the first is written
    markers: tuple[str, ...] = ()  # their names; none: files are not read as this family
    named: str = ""  # how names of models begin that have the tensors of another family
    accepts: Callable[[ConfigFields], bool] = lambda _: True
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])  # values of fields
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields that its readers do not get from a file
    heads: Mapping[int, int] = field(default_factory=dict[int, int])  # of the published models, by width
    card: Callable[[ConfigFields], dict[str, Any]] | None = None  # entries of config.json; None: only files are written
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the code of this layout, see its file


@dataclass(frozen=True, kw_only=True)
class InferredConfig:
    """Fields of a config that the shapes of tensors tell."""

    fields: dict[str, Any]
    stride: tuple[int, int] | None = None  # pixels per position of `pos_embed`; None: `fields` have the image size
    prefix: int = 0  # rows of `pos_embed` for prefix tokens


ResampledKind = Literal["grid", "rows", "columns", "offsets", "sums", "kernel"]
RESAMPLED: Mapping[str, ResampledKind] = {
    "pos_embed": "grid",  # (T, E + h·w, D), prefix rows first
    "pos_rows": "rows",  # (T, h, D)
    "pos_columns": "columns",  # (T, w, D)
    "offsets": "offsets",  # (T, (2h − 1)·(2w − 1), D)
    "patch_embed.proj.weight": "kernel",  # (D, C, P, Q)
}


@dataclass(frozen=True, kw_only=True)
class CheckpointSide:
    """By default of a family without public checkpoints, which is saved and loaded in vitrail's own layout."""

    infer_config: Callable[[TensorShapes], InferredConfig] | None = None  # for files without a config
    sources: tuple[SourceNames, ...] = ()
    resampled: Mapping[str, ResampledKind] = field(default_factory=lambda: RESAMPLED)  # by the end of a tensor's name
    mlp_ratio: int = 4  # of an MLP whose width the config does not specify
    heads_by_width: bool = False  # whether the presets tell the attention heads of other files of the same width
    implied: Mapping[str, Any] = field(default_factory=dict[str, Any])  # values of fields that the config does not have
    general_family: str = ""  # a family with these fields, whose models compute the same
