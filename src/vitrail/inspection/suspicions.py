"""What makes one look twice at the tensors of a file: values that no training leaves behind, copies, odd types."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch
from torch import Tensor

from vitrail.checkpoint.report import listed

ENORMOUS = 1e4  # far above what trained weights reach, and half precision ends at 65504
NUMBER = re.compile(r"(^|[./]|encoderblock_|encoder_layer_|unit)\d+(?=[./]|$)")  # of a block, in a tensor's name
BLOCK = re.compile(rf"(.*?{NUMBER.pattern})[./](.*)")
HEAD = re.compile(r"(^|[./])(heads?|head_dist|\w*classifier)[./]|^(module\.)?(fc|linear)\.")
COUNTER = re.compile(r"\.num_batches_tracked$")  # of a batch norm, and whole
POSITIONS = re.compile(r"pos(ition)?_?embed|pos_(rows|columns)$")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor; mean, deviation, lowest and highest are of its finite values, and None where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float | None = None
    deviation: float | None = None
    lowest: float | None = None
    highest: float | None = None
    nan: int = 0
    infinite: int = 0

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def floats(self) -> bool:
        return "float" in self.dtype

    @property
    def constant(self) -> bool:
        whole = self.lowest is not None and not self.nan and not self.infinite
        return whole and self.count > 1 and self.lowest == self.highest

    @property
    def varied(self) -> bool:
        return self.lowest != self.highest

    @property
    def largest(self) -> float:
        return max(abs(self.lowest or 0.0), abs(self.highest or 0.0))


def look(name: str, tensor: Tensor) -> Row:
    """The tensor in a few numbers; at most it is copied once."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    values, nan, infinite = numbers(tensor), 0, 0
    if values.numel() and not all(bool(end.isfinite()) for end in values.aminmax()):
        nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
        values = values[values.isfinite()]
    if not values.numel():
        return Row(name=name, shape=shape, dtype=dtype, nan=nan, infinite=infinite)
    found = (*torch.std_mean(values, correction=0), *values.aminmax())
    deviation, mean, lowest, highest = (n if isfinite(n) else None for n in (each.item() for each in found))
    return Row(
        name=name,
        shape=shape,
        dtype=dtype,
        mean=mean,
        deviation=deviation,
        lowest=lowest,
        highest=highest,
        nan=nan,
        infinite=infinite,
    )


def numbers(tensor: Tensor) -> Tensor:
    """Its values in a type to compute with; none for packed types, with which nothing can be computed."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    try:
        if tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float() if tensor.is_floating_point() else tensor.double()
    except NotImplementedError:
        return torch.empty(0)
    return tensor.reshape(-1)


def pattern(name: str) -> str:
    """The name that a tensor shares with its like in other blocks."""
    return NUMBER.sub(r"\1#", name)


def suspicions(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> list[str]:
    """One line for each kind of finding."""
    floats = [row for row in rows if row.floats]
    constant = [row for row in floats if row.constant and row.lowest]
    zero = [row.name for row in floats if row.constant and not row.lowest]
    blocks, single = copies([row for row in floats if row.varied], tensors)
    found = {
        "NaN": [f"{row.name} ({row.nan:,} of {row.count:,} numbers)" for row in rows if row.nan],
        "infinite": [f"{row.name} ({row.infinite:,} of {row.count:,} numbers)" for row in rows if row.infinite],
        f"beyond ±{ENORMOUS:,.0f}": [f"{row.name} ({row.largest:.3g})" for row in floats if row.largest > ENORMOUS],
        "a head of zeros, as in Google's ImageNet-21k files": [name for name in zero if HEAD.search(name)],
        "all zeros": [pattern(name) for name in zero if not HEAD.search(name)],
        "one number everywhere, as before training": [f"{pattern(row.name)} ({row.lowest:.4g})" for row in constant],
        "equal rows of positions, as before training": equal_positions(floats, tensors),
        "blocks with the same weights": blocks,
        "the same numbers under two names": single,
        "not of floats": [
            f"{pattern(row.name)} ({row.dtype})" for row in rows if not row.floats and not COUNTER.search(row.name)
        ],
        "empty": [row.name for row in rows if not row.count],
    }
    kinds = Counter(row.dtype for row in floats)
    if len(kinds) > 1:
        found["mixed types"] = [f"{count} {kind}" for kind, count in kinds.most_common()]
    return [f"{what}: {listed(list(dict.fromkeys(where)))}" for what, where in found.items() if where]


def copies(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Whole blocks that are equal, and other equal tensors; only those alike in every statistic are compared."""
    alike, twins = dict[object, str](), dict[str, str]()
    for row in rows:
        key = (row.shape, row.dtype, row.mean, row.deviation, row.lowest, row.highest)
        earlier = alike.setdefault(key, row.name)
        if row.name != earlier and torch.equal(numbers(tensors[earlier]), numbers(tensors[row.name])):
            twins[row.name] = earlier
    places = {row.name: match.group(1, 3) for row in rows if (match := BLOCK.fullmatch(row.name))}
    sizes = Counter(block for block, _ in places.values())
    pairs = Counter(
        (places[one][0], places[other][0])
        for other, one in twins.items()
        if one in places and other in places and places[one][1] == places[other][1]
    )
    whole = {pair: f"{pair[0]} = {pair[1]}" for pair, count in pairs.items() if count == sizes[pair[1]]}
    single = [
        f"{one} = {other}"
        for other, one in twins.items()
        if one not in places or other not in places or (places[one][0], places[other][0]) not in whole
    ]
    return list(whole.values()), single


def equal_positions(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> list[str]:
    """Tables of which most rows are the last one; prefix tokens may have others."""
    found = list[str]()
    for row in rows:
        if POSITIONS.search(row.name) and len(row.shape) > 1 and row.varied:
            table = numbers(tensors[row.name]).reshape(-1, row.shape[-1])
            equal = int((table == table[-1]).all(dim=1).sum())
            if len(table) > 2 and 2 * equal > len(table):
                found.append(f"{row.name} ({equal} of {len(table)})")
    return found
