"""Name tables that run both ways: what tensors are called elsewhere, what they are called here, how they lie there.

In a name # stands for a number, % for one that is counted from 1 there and from 0 here, and * for weight or bias.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vitrail.errors import CheckpointError

PLACEHOLDER = re.compile("([#%*])")
PLACEHOLDER_PATTERNS = {"#": r"(\d{1,6})", "%": r"(\d{1,6})", "*": "(weight|bias)"}


@dataclass(frozen=True)
class TensorTransform:
    """How a tensor lies elsewhere, maybe in parts: there → here, and here → there for a number of heads."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], list[Tensor]]


IDENTITY = TensorTransform(lambda parts: parts[0], lambda tensor, _: [tensor])
THREE_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(3)))  # queries, keys and values
TWO_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(2)))  # gates and what they open


@dataclass(frozen=True)
class NameEntry:
    """One row of a table: tensor `ours` is made of `theirs`."""

    theirs: tuple[str, ...]
    ours: str
    transform: TensorTransform = IDENTITY

    @cached_property
    def their_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_name_pattern(name) for name in self.theirs)

    @cached_property
    def our_pattern(self) -> re.Pattern[str]:
        return compile_name_pattern(self.ours)


def make_entry(theirs: str | Iterable[str], ours: str, form: TensorTransform = IDENTITY) -> NameEntry:
    return NameEntry((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, form)


def compile_name_pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(PLACEHOLDER_PATTERNS.get(part, re.escape(part)) for part in PLACEHOLDER.split(name)))


def fill_placeholders(name: str, values: Iterable[str]) -> str:
    given = iter(values)
    return PLACEHOLDER.sub(lambda _: next(given), name)


def shift_numbers(name: str, values: Iterable[str], by: int) -> tuple[str, ...]:
    """What stands in the holes of a name, with those that are counted from 1 moved."""
    holes = zip(PLACEHOLDER.findall(name), values, strict=True)
    return tuple(str(int(value) + by) if hole == "%" else value for hole, value in holes)


def rename_to_ours(
    tensors: Mapping[str, Tensor], table: Iterable[NameEntry]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Their tensors under our names, and the names that the table does not know."""
    rows, found, unknown = list(table), dict[str, tuple[NameEntry, dict[int, str]]](), list[str]()
    for name in tensors:
        match = next(
            ((r, n, m) for r in rows for n, each in enumerate(r.their_patterns) if (m := each.fullmatch(name))), None
        )
        if match is None:
            unknown.append(name)
            continue
        row, place, values = match
        ours = fill_placeholders(row.ours, shift_numbers(row.theirs[place], values.groups(), -1))
        before, parts = found.setdefault(ours, (row, {}))
        if before is not row:
            raise CheckpointError(f"{ours} is there twice, as {name} and as {next(iter(parts.values()))}; expected one")
        parts[place] = name
    return {ours: join_tensor_parts(ours, row, parts, tensors) for ours, (row, parts) in found.items()}, tuple(unknown)


def join_tensor_parts(ours: str, row: NameEntry, parts: Mapping[int, str], tensors: Mapping[str, Tensor]) -> Tensor:
    if len(parts) != len(row.theirs):
        there = ", ".join(parts.values())
        raise CheckpointError(f"{ours} is made of {len(row.theirs)} tensors, and only {there} is there; expected all")
    try:
        return row.transform.to_ours([tensors[parts[place]] for place in sorted(parts)])
    except (RuntimeError, IndexError, ValueError, TypeError):
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in parts.values())
        raise CheckpointError(f"{ours} cannot be made of {shapes}; expected other shapes") from None


def rename_to_theirs(tensors: Mapping[str, Tensor], table: Iterable[NameEntry], heads: int) -> dict[str, Tensor]:
    """Our tensors under their names."""
    rows, theirs = list(table), dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = next(((row, m) for row in rows if (m := row.our_pattern.fullmatch(name))), None)
        if match is None:
            raise CheckpointError(f"{name} has no name in this layout; expected a model that it can hold")
        row, values = match
        for their_name, part in zip(row.theirs, row.transform.to_theirs(tensor, heads), strict=True):
            theirs[fill_placeholders(their_name, shift_numbers(their_name, values.groups(), 1))] = part.contiguous()
    return theirs
