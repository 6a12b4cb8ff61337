"""Weights of one model made to fit another of the same family: another resolution, another patch, other classes."""

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
    resample_projection_weights,
)
from vitrail.errors import CheckpointError
from vitrail.layers.positions import Grid

HEAD_PREFIXES = ("head.", "head_dist.", "fc.")
CHANGEABLE_FIELDS = (
    *("image_size", "patch_size", "classes", "dropout", "attention_dropout", "stochastic_depth", "dynamic"),
    *("stage_dropout", "answer"),
)


def check_adaptable(config: Any, wanted: Any) -> Any:
    """The wanted config, if the weights of the other still mean the same in it."""
    for field in fields(config):
        saved, asked = getattr(config, field.name), getattr(wanted, field.name)
        if saved != asked and field.name not in CHANGEABLE_FIELDS:
            allowed = ", ".join(CHANGEABLE_FIELDS)
            raise CheckpointError(
                f"{field.name} is {saved!r} in the checkpoint, not {asked!r}; what may differ is {allowed}"
            )
    return wanted


def adapt_weights(
    tensors: Mapping[str, Tensor], source: Any, target: Any, policy: ResamplingPolicy
) -> tuple[dict[str, Tensor], LoadReport]:
    """All tensors that the target needs, from those of the source: as they are, resized, or in a new head zero."""
    expected: dict[str, Tensor] = target.state_dict()
    fitted: dict[str, Tensor] = {}
    matched, resized, initialised = list[str](), dict[str, str](), list[str]()
    for name, wanted in expected.items():
        given = tensors.get(name)
        old, new = find_grids(name, source, target)
        if given is not None and given.shape == wanted.shape and old == new:
            fitted[name] = given
            matched.append(name)
        elif name.startswith(HEAD_PREFIXES):
            like = next(t for t in tensors.values() if t.is_floating_point()) if given is None else given
            fitted[name] = torch.zeros(wanted.shape, dtype=like.dtype)
            initialised.append(name)
        elif given is not None and old != new:  # also where another grid has as many places
            kind = "projection" if name.endswith("projection") else "positions"
            fitted[name] = (resample_projection_weights if kind == "projection" else resample_positions)(
                given, old, new, policy
            )
            resized[name] = f"{policy} {kind}, {old[0]}×{old[1]} to {new[0]}×{new[1]}"
        elif given is not None and name == "patch_embed.proj.weight":
            fitted[name] = resample_patch_kernel(given, (wanted.shape[2], wanted.shape[3]))
            resized[name] = "flexivit kernel"
        else:
            raise CheckpointError(f"{name} cannot be made to fit shape {tuple(wanted.shape)}; expected the saved sizes")
    ignored = tuple(name for name in source.state_dict() if name not in fitted or name in initialised)
    return fitted, LoadReport(tuple(matched), resized, tuple(initialised), ignored)


def find_grids(name: str, source: Any, target: Any) -> tuple[Grid, Grid]:
    """The grids that a tensor is laid out on, of positions or of sums over them; equal for any other tensor."""
    (h, w), (new_h, new_w) = getattr(source, "grid", (1, 1)), getattr(target, "grid", (1, 1))
    grids = {
        "pos_embed": ((h, w), (new_h, new_w)),
        "projection": ((h, w), (new_h, new_w)),
        "pos_rows": ((h, 1), (new_h, 1)),
        "pos_columns": ((w, 1), (new_w, 1)),
        "offsets": ((2 * h - 1, 2 * w - 1), (2 * new_h - 1, 2 * new_w - 1)),
    }
    return grids.get(name.rpartition(".")[2], ((1, 1), (1, 1)))
