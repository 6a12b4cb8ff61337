"""Adapt the weights of a model to another config of its family: image size, patch size, classes; and report on it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.base.errors import CheckpointError
from vitrail.base.text import abbreviate_list, format_table
from vitrail.checkpoint.resample import (
    ResamplingPolicy,
    resample_distances,
    resample_map,
    resample_patch_kernel,
    resample_positions,
    resample_projection,
)
from vitrail.layers.positions import Grid
from vitrail.models.base.checkpoint_side import CheckpointSide, ResampledKind
from vitrail.models.base.contract import ImageModel

CHANGEABLE_FIELDS = (
    *("image_size", "patch_size", "classes", "dropout", "attention_dropout", "stochastic_depth", "dynamic"),
    *("stage_dropout", "answer", "feature_layer", "mlp_dropout", "windows", "trained_windows", "intervals"),
    *("odd_windows", "window"),
)
RESAMPLING_FUNCTIONS = {
    "sums": resample_projection,
    "map": resample_map,
    "distances": resample_distances,
}  # of positions otherwise
NOT_CONFIG_FIELDS = ("preprocessing", "labels")


@dataclass(frozen=True)
class LoadReport:
    """Tensors of the model are matched, resized or initialized; tensors of the file that are not used are ignored."""

    matched: tuple[str, ...]
    resized: Mapping[str, str]  # name → method
    initialized: tuple[str, ...]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields that the file does not specify

    @property
    def initialised(self) -> tuple[str, ...]:
        """The former name of `initialized`."""
        return self.initialized

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that the text of the report names in backticks."""
        return (*format_assumed_fields(self.assumed)[1], "source")

    def __str__(self) -> str:
        resized = [f"{name} ({method})" for name, method in self.resized.items()]
        groups = {"resized": resized, "initialized": self.initialized, "ignored": self.ignored}
        rows = [("matched", str(len(self.matched)), "")] if self.matched else []
        rows += [(group, str(len(names)), abbreviate_list(names)) for group, names in groups.items() if names]
        assumption, _ = format_assumed_fields(self.assumed)
        warnings = [f"warning: {warning}" for warning in (assumption, *self.warnings) if warning]
        return "\n".join([*format_table(("", "tensors", ""), rows, "lrl"), *warnings])


def check_adaptable(config: Any, wanted: Any) -> Any:
    """Return the wanted config if it differs only in fields that weights can be adapted to."""
    requested = asdict(wanted)
    for name, saved in asdict(config).items():
        if saved != requested[name] and name not in CHANGEABLE_FIELDS:
            raise CheckpointError(
                f"{name} is {saved!r} in the checkpoint, not {requested[name]!r}; "
                f"only these fields can be changed: {', '.join(CHANGEABLE_FIELDS)}"
            )
    return wanted


def adapt_weights(
    tensors: Mapping[str, Tensor], source: Any, target: Any, side: CheckpointSide, policy: ResamplingPolicy
) -> tuple[dict[str, Tensor], LoadReport]:
    """Make the tensors of the target from those of the source: unchanged, resized, or zero in a new head."""
    heads = tuple(f"{module}." for _, module in target.classifiers) if isinstance(target, ImageModel) else ()
    adapted = dict[str, Tensor]()
    matched, resized, initialized = list[str](), dict[str, str](), list[str]()
    for name, wanted in target.state_dict().items():
        given = tensors.get(name)
        kind = find_resampled_kind(name, side)
        if kind in ("map", "distances") and given is not None and given.ndim == wanted.ndim >= 3:
            old, new = (given.shape[-2], given.shape[-1]), (wanted.shape[-2], wanted.shape[-1])
        else:
            old, new = find_old_and_new_grid(kind, source, target)
        if given is not None and given.shape == wanted.shape and old == new:
            adapted[name] = given
            matched.append(name)
        elif name.startswith(heads):
            like = next(t for t in tensors.values() if t.is_floating_point()) if given is None else given
            adapted[name] = make_head_tensor(name, target, like.dtype)
            initialized.append(name)
        elif given is not None and old != new:  # also if both grids have the same number of patches
            what = "projection" if kind == "sums" else "positions"
            adapted[name] = RESAMPLING_FUNCTIONS.get(kind or "", resample_positions)(given, old, new, policy)
            resized[name] = f"{policy} {what}, {old[0]}×{old[1]} to {new[0]}×{new[1]}"
        elif given is not None and kind == "kernel":
            adapted[name] = resample_patch_kernel(given, (wanted.shape[2], wanted.shape[3]))
            resized[name] = "flexivit kernel"
        else:
            raise CheckpointError(f"{name} cannot be adapted to shape {tuple(wanted.shape)}; expected the saved sizes")
    ignored = tuple(name for name in source.state_dict() if name not in adapted or name in initialized)
    return adapted, LoadReport(tuple(matched), resized, tuple(initialized), ignored)


def make_head_tensor(name: str, model: Any, dtype: torch.dtype) -> Tensor:
    """The initial value of a tensor in a new head: 0, but 1 for what a batch norm multiplies or divides by."""
    part, _, kind = name.rpartition(".")
    wanted, scales = model.state_dict()[name], isinstance(model.get_submodule(part), nn.BatchNorm1d)
    fill = torch.ones if scales and kind in ("weight", "running_var") else torch.zeros
    return fill(wanted.shape, dtype=dtype if wanted.is_floating_point() else wanted.dtype)


def find_resampled_kind(name: str, side: CheckpointSide) -> ResampledKind | None:
    return next((kind for end, kind in side.resampled.items() if name == end or name.endswith(f".{end}")), None)


def find_old_and_new_grid(kind: ResampledKind | None, source: Any, target: Any) -> tuple[Grid, Grid]:
    """Old and new grid of a tensor with one row per position; equal for all other tensors."""
    if kind in (None, "kernel", "map", "distances"):
        return (1, 1), (1, 1)
    if kind == "first_grid":  # as grid, of the first level
        return source.levels[0].grid, target.levels[0].grid
    (h, w), (new_h, new_w) = source.grid, target.grid
    grids: dict[ResampledKind, tuple[Grid, Grid]] = {
        "grid": ((h, w), (new_h, new_w)),
        "sums": ((h, w), (new_h, new_w)),
        "rows": ((h, 1), (new_h, 1)),
        "columns": ((w, 1), (new_w, 1)),
        "offsets": ((2 * h - 1, 2 * w - 1), (2 * new_h - 1, 2 * new_w - 1)),
    }
    return grids[kind]


def format_assumed_fields(assumed: Mapping[str, Any], given: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """One sentence with the fields that a file does not specify, the values assumed, and how to change them.

    `given` are fields that the user has set. The second result has the settings that the sentence names in backticks.
    """
    remaining = {name: value for name, value in assumed.items() if name not in given}
    if not remaining:
        return "", ()
    settings = [f"{name}=…" for name in remaining if name not in NOT_CONFIG_FIELDS][:1]
    settings += [name for name in NOT_CONFIG_FIELDS if name in remaining]
    remedy = " and ".join(f"`{setting}`" for setting in settings)
    text = f"does not specify {', '.join(remaining)}; assumed {format_fields(remaining)}. Change this with {remedy}"
    return text, tuple(settings)


def format_fields(values: Mapping[str, Any]) -> str:
    """Format fields as name=value, with sizes as the command line accepts them."""
    return ", ".join(
        f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in values.items()
    )
