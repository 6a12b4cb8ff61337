"""Rename tensors by the name tables of the families, in both directions. `NameEntry` explains the placeholders."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from torch import Tensor

from vitrail.base.errors import CheckpointError
from vitrail.models.base.checkpoint_side import NameEntry

PLACEHOLDER = re.compile("([#%@~=*+])")
NUMBER = r"(\d{1,6})"
PARTS = {"*": "(weight|bias)", "+": "(weight|bias|running_mean|running_var|num_batches_tracked)"}
NUMBER_SHIFTS = {"%": 1, "@": 1, "~": -1}  # from our number to theirs


@cache
def compile_name_pattern(name: str) -> re.Pattern[str]:
    """A group for each placeholder; = repeats the number before it and has none."""
    pattern, groups = "", 0
    for part in PLACEHOLDER.split(name):
        if part == "=":
            pattern += rf"(?:\{groups})"
        elif PLACEHOLDER.fullmatch(part):
            pattern += PARTS.get(part, NUMBER)
            groups += 1
        else:
            pattern += re.escape(part)
    return re.compile(pattern)


def fill_placeholders(name: str, values: Iterable[str]) -> str:
    remaining, last = iter(values), ""

    def fill(match: re.Match[str]) -> str:
        nonlocal last
        last = last if match[0] == "=" else next(remaining)
        return last

    return PLACEHOLDER.sub(fill, name)


def shift_numbers(name: str, values: Iterable[str], sign: int) -> tuple[str, ...]:
    """Convert numbers that the layout and we count from different starts: to theirs with sign 1, to ours with -1."""
    placeholders = [each for each in PLACEHOLDER.findall(name) if each != "="]
    pairs = [(NUMBER_SHIFTS.get(each), value) for each, value in zip(placeholders, values, strict=True)]
    shifted = tuple(value if shift is None else str(int(value) + sign * shift) for shift, value in pairs)
    two_digits = [sign > 0 and each == "@" for each in placeholders]
    return tuple(value.zfill(2) if padded else value for padded, value in zip(two_digits, shifted, strict=True))


def convert_to_our_tensors(
    tensors: Mapping[str, Tensor], table: Iterable[NameEntry]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Rename tensors to our names; also return the names that are not in the table."""
    names = [(row, index, compile_name_pattern(name)) for row in table for index, name in enumerate(row.theirs)]
    matched, unknown = dict[str, tuple[NameEntry, dict[int, str]]](), list[str]()
    for name in tensors:
        match = next(((row, index, m) for row, index, each in names if (m := each.fullmatch(name))), None)
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
    rows, theirs = [(row, compile_name_pattern(row.ours)) for row in table], dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = next(((row, m) for row, each in rows if (m := each.fullmatch(name))), None)
        if match is None:
            raise CheckpointError(f"{name} has no name in this layout; expected a model that it can represent")
        row, values = match
        for their_name, part in zip(row.theirs, row.transform.to_theirs(tensor, heads), strict=True):
            theirs[fill_placeholders(their_name, shift_numbers(their_name, values.groups(), 1))] = part.contiguous()
    return theirs


def add_name_prefix(
    table: Iterable[NameEntry], prefix: str, *, unless_containing: tuple[str, ...] = ()
) -> tuple[NameEntry, ...]:
    """The table of a layout that puts `prefix` before all its names, except those that contain one of these parts."""
    return tuple(
        row
        if any(part in row.theirs[0] for part in unless_containing)
        else replace(row, theirs=tuple(prefix + name for name in row.theirs))
        for row in table
    )
