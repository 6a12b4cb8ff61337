"""The rows of a name table: how the tensors of a public layout are called and arranged."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorTransform:
    """Convert a tensor from a layout's arrangement, perhaps in several parts, and back, given the number of heads."""

    to_ours: Callable[[list[Tensor]], Tensor]
    to_theirs: Callable[[Tensor, int], list[Tensor]]


IDENTITY = TensorTransform(lambda parts: parts[0], lambda tensor, _: [tensor])
THREE_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(3)))  # queries, keys and values
TWO_PARTS = TensorTransform(torch.cat, lambda tensor, _: list(tensor.chunk(2)))  # gates and values


@dataclass(frozen=True)
class NameEntry:
    """One row of a name table, for both directions: our tensor is made of one or more of theirs.

    In a name, # stands for a number, % for a number that the layout counts from 1 and we from 0, ~ for one that the
    layout counts from 0 and we from 1, = for the number before it again, * for weight or bias.
    """

    theirs: tuple[str, ...]
    ours: str
    transform: TensorTransform = IDENTITY


def make_entry(theirs: str | Iterable[str], ours: str, transform: TensorTransform = IDENTITY) -> NameEntry:
    return NameEntry((theirs,) if isinstance(theirs, str) else tuple(theirs), ours, transform)


def make_same_name_entries(*names: str) -> tuple[NameEntry, ...]:
    """Rows of tensors that have our names in the layout."""
    return tuple(NameEntry((name,), name) for name in names)
