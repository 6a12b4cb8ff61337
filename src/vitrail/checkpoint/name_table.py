"""Name tables for both directions: the names of tensors in a layout, our names, and how the values are arranged.

In a name, # stands for a number, % for a number that the layout counts from 1 and we from 0, * for weight or bias.
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
    """Convert a tensor from the layout's arrangement, perhaps in several parts, and back, given the number of heads."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], list[Tensor]]


IDENTITY = TensorTransform(lambda parts: parts[0], lambda tensor, _: [tensor])
THREE_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(3)))  # queries, keys and values
TWO_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(2)))  # gates and values


@dataclass(frozen=True)
class NameEntry:
    """One row of a table: our tensor is made of one or more of theirs."""

    theirs: tuple[str, ...]
    ours: str
    transform: TensorTransform = IDENTITY

    @cached_property
    def their_patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_name_pattern(name) for name in self.theirs)

    @cached_property
    def our_pattern(self) -> re.Pattern[str]:
        return compile_name_pattern(self.ours)


def make_entry(theirs: str | Iterable[str], ours: str, transform: TensorTransform = IDENTITY) -> NameEntry:
    return NameEntry((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, transform)


def compile_name_pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(PLACEHOLDER_PATTERNS.get(part, re.escape(part)) for part in PLACEHOLDER.split(name)))


def fill_placeholders(name: str, values: Iterable[str]) -> str:
    remaining = iter(values)
    return PLACEHOLDER.sub(lambda _: next(remaining), name)


def shift_numbers(name: str, values: Iterable[str], by: int) -> tuple[str, ...]:
    """Add `by` to the values of the placeholders that are counted from 1."""
    pairs = zip(PLACEHOLDER.findall(name), values, strict=True)
    return tuple(str(int(value) + by) if placeholder == "%" else value for placeholder, value in pairs)


def convert_to_our_tensors(
    tensors: Mapping[str, Tensor], table: Iterable[NameEntry]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Rename tensors to our names; also return the names that are not in the table."""
    rows, matched, unknown = list(table), dict[str, tuple[NameEntry, dict[int, str]]](), list[str]()
    for name in tensors:
        match = next(
            ((r, n, m) for r in rows for n, each in enumerate(r.their_patterns) if (m := each.fullmatch(name))), None
        )
        if match is None:
            unknown.append(name)
            continue
        row, index, values = match
        ours = fill_placeholders(row.ours, shift_numbers(row.theirs[index], values.groups(), -1))
        earlier_row, parts = matched.setdefault(ours, (row, {}))
        if earlier_row is not row:
            raise CheckpointError(f"{ours} exists twice, as {name} and as {next(iter(parts.values()))}; expected one")
        parts[index] = name
    renamed = {ours: join_tensor_parts(ours, row, parts, tensors) for ours, (row, parts) in matched.items()}
    return renamed, tuple(unknown)


def join_tensor_parts(ours: str, row: NameEntry, parts: Mapping[int, str], tensors: Mapping[str, Tensor]) -> Tensor:
    if len(parts) != len(row.theirs):
        present = ", ".join(parts.values())
        raise CheckpointError(f"{ours} is made of {len(row.theirs)} tensors, but the file has only {present}")
    try:
        return row.transform.to_ours([tensors[parts[index]] for index in sorted(parts)])
    except (RuntimeError, IndexError, ValueError, TypeError):
        shapes = ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in parts.values())
        raise CheckpointError(f"{ours} cannot be made of {shapes}; expected other shapes") from None


def convert_to_their_tensors(
    tensors: Mapping[str, Tensor], table: Iterable[NameEntry], heads: int
) -> dict[str, Tensor]:
    """Rename our tensors to the names of a layout."""
    rows, theirs = list(table), dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = next(((row, m) for row in rows if (m := row.our_pattern.fullmatch(name))), None)
        if match is None:
            raise CheckpointError(f"{name} has no name in this layout; expected a model that it can represent")
        row, values = match
        for their_name, part in zip(row.theirs, row.transform.to_theirs(tensor, heads), strict=True):
            theirs[fill_placeholders(their_name, shift_numbers(their_name, values.groups(), 1))] = part.contiguous()
    return theirs
