"""Adapt the weights of a model to another config of its family: image size, patch size, classes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoint.load_report import LoadReport
from vitrail.checkpoint.resample import (
    ResamplingPolicy,
    resample_patch_kernel,
    resample_positions,
    resample_projection,
)
from vitrail.errors import CheckpointError
from vitrail.layers.positions import Grid

HEAD_PREFIXES = ("head.", "head_dist.", "fc.")
CHANGEABLE_FIELDS = (
    *("image_size", "patch_size", "classes", "dropout", "attention_dropout", "stochastic_depth", "dynamic"),
    *("stage_dropout", "answer"),
)


def check_adaptable(config: Any, wanted: Any) -> Any:
    """Return the wanted config if it differs only in fields that weights can be adapted to."""
    for field in fields(config):
        saved, requested = getattr(config, field.name), getattr(wanted, field.name)
        if saved != requested and field.name not in CHANGEABLE_FIELDS:
            raise CheckpointError(
                f"{field.name} is {saved!r} in the checkpoint, not {requested!r}; "
                f"only these fields can be changed: {', '.join(CHANGEABLE_FIELDS)}"
            )
    return wanted


def adapt_weights(
    tensors: Mapping[str, Tensor], source: Any, target: Any, policy: ResamplingPolicy
) -> tuple[dict[str, Tensor], LoadReport]:
    """Make the tensors of the target from those of the source: unchanged, resized, or zero in a new head."""
    adapted = dict[str, Tensor]()
    matched, resized, initialised = list[str](), dict[str, str](), list[str]()
    for name, wanted in target.state_dict().items():
        given = tensors.get(name)
        old, new = find_old_and_new_grid(name, source, target)
        if given is not None and given.shape == wanted.shape and old == new:
            adapted[name] = given
            matched.append(name)
        elif name.startswith(HEAD_PREFIXES):
            like = next(t for t in tensors.values() if t.is_floating_point()) if given is None else given
            adapted[name] = torch.zeros(wanted.shape, dtype=like.dtype)
            initialised.append(name)
        elif given is not None and old != new:  # also if both grids have the same number of patches
            kind = "projection" if name.endswith("projection") else "positions"
            resample = resample_projection if kind == "projection" else resample_positions
            adapted[name] = resample(given, old, new, policy)
            resized[name] = f"{policy} {kind}, {old[0]}×{old[1]} to {new[0]}×{new[1]}"
        elif given is not None and name == "patch_embed.proj.weight":
            adapted[name] = resample_patch_kernel(given, (wanted.shape[2], wanted.shape[3]))
            resized[name] = "flexivit kernel"
        else:
            raise CheckpointError(f"{name} cannot be adapted to shape {tuple(wanted.shape)}; expected the saved sizes")
    ignored = tuple(name for name in source.state_dict() if name not in adapted or name in initialised)
    return adapted, LoadReport(tuple(matched), resized, tuple(initialised), ignored)


def find_old_and_new_grid(name: str, source: Any, target: Any) -> tuple[Grid, Grid]:
    """Old and new grid of a tensor with one row per position; equal for all other tensors."""
    (h, w), (new_h, new_w) = getattr(source, "grid", (1, 1)), getattr(target, "grid", (1, 1))
    grids = {
        "pos_embed": ((h, w), (new_h, new_w)),
        "projection": ((h, w), (new_h, new_w)),
        "pos_rows": ((h, 1), (new_h, 1)),
        "pos_columns": ((w, 1), (new_w, 1)),
        "offsets": ((2 * h - 1, 2 * w - 1), (2 * new_h - 1, 2 * new_w - 1)),
    }
    return grids.get(name.rpartition(".")[2], ((1, 1), (1, 1)))
