"""Find suspicious tensors in a file: implausible values, copies and unusual dtypes."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod

import torch
from torch import Tensor

from vitrail.base.text import abbreviate_list

MAX_PLAUSIBLE_WEIGHT = 1e4  # far above trained weights; float16 ends at 65504
BLOCK_NUMBER = re.compile(r"(^|[./]|encoderblock_|encoder_layer_|unit)\d+(?=[./]|$)")  # in a tensor's name
BLOCK_NAME = re.compile(rf"(.*?{BLOCK_NUMBER.pattern})[./](.*)")
HEAD_NAME = re.compile(r"(^|[./])(heads?|head_dist|\w*classifier)[./]|^(module\.)?(fc|linear)\.")
BATCH_COUNTER_NAME = re.compile(r"\.num_batches_tracked$")  # integer buffer of batch norm
POSITION_NAME = re.compile(r"pos(ition)?_?embed|pos_(rows|columns)$")


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Statistics of a tensor. Mean, deviation, lowest and highest are over finite values, None if there are none."""

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
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def is_constant(self) -> bool:
        finite = self.lowest is not None and not self.nan and not self.infinite
        return finite and self.count > 1 and self.lowest == self.highest

    @property
    def is_varied(self) -> bool:
        return self.lowest != self.highest

    @property
    def largest_magnitude(self) -> float:
        return max(abs(self.lowest or 0.0), abs(self.highest or 0.0))


def compute_tensor_statistics(name: str, tensor: Tensor) -> TensorStatistics:
    """Compute a tensor's statistics, with at most one copy of it."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    values, nan, infinite = flatten_to_float(tensor), 0, 0
    if values.numel() and not all(bool(end.isfinite()) for end in values.aminmax()):
        nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
        values = values[values.isfinite()]
    if not values.numel():
        return TensorStatistics(name=name, shape=shape, dtype=dtype, nan=nan, infinite=infinite)
    found = (*torch.std_mean(values, correction=0), *values.aminmax())
    deviation, mean, lowest, highest = (n if isfinite(n) else None for n in (each.item() for each in found))
    return TensorStatistics(
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


def flatten_to_float(tensor: Tensor) -> Tensor:
    """Values as float32 or float64; empty for packed dtypes, which cannot be converted."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    try:
        if tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float() if tensor.is_floating_point() else tensor.double()
    except NotImplementedError:
        return torch.empty(0)
    return tensor.reshape(-1)


def replace_block_number(name: str) -> str:
    """The tensor's name with # for the block's number, equal for all blocks."""
    return BLOCK_NUMBER.sub(r"\1#", name)


def find_suspicious_weights(rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]) -> list[str]:
    """Findings, one line per kind."""
    floats = [row for row in rows if row.is_float]
    constant = [row for row in floats if row.is_constant and row.lowest]
    zero = [row.name for row in floats if row.is_constant and not row.lowest]
    blocks, single = find_identical_blocks_and_tensors([row for row in floats if row.is_varied], tensors)
    found = {
        "NaN": [f"{row.name} ({row.nan:,} of {row.count:,} values)" for row in rows if row.nan],
        "infinite": [f"{row.name} ({row.infinite:,} of {row.count:,} values)" for row in rows if row.infinite],
        f"beyond ±{MAX_PLAUSIBLE_WEIGHT:,.0f}": [
            f"{row.name} ({row.largest_magnitude:.3g})"
            for row in floats
            if row.largest_magnitude > MAX_PLAUSIBLE_WEIGHT
        ],
        "head of zeros, as in Google's ImageNet-21k files": [name for name in zero if HEAD_NAME.search(name)],
        "all zeros": [replace_block_number(name) for name in zero if not HEAD_NAME.search(name)],
        "constant, as before training": [f"{replace_block_number(row.name)} ({row.lowest:.4g})" for row in constant],
        "equal position embeddings, as before training": find_mostly_constant_position_tables(floats, tensors),
        "blocks with the same weights": blocks,
        "identical tensors": single,
        "not floating point": [
            f"{replace_block_number(row.name)} ({row.dtype})"
            for row in rows
            if not row.is_float and not BATCH_COUNTER_NAME.search(row.name)
        ],
        "empty": [row.name for row in rows if not row.count],
    }
    kinds = Counter(row.dtype for row in floats)
    if len(kinds) > 1:
        found["mixed dtypes"] = [f"{count} {kind}" for kind, count in kinds.most_common()]
    return [f"{what}: {abbreviate_list(list(dict.fromkeys(where)))}" for what, where in found.items() if where]


def find_identical_blocks_and_tensors(
    rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Identical blocks, and other identical tensors; only tensors with equal statistics are compared."""
    first_name, copies = dict[object, str](), dict[str, str]()
    for row in rows:
        key = (row.shape, row.dtype, row.mean, row.deviation, row.lowest, row.highest)
        earlier = first_name.setdefault(key, row.name)
        if row.name != earlier and torch.equal(flatten_to_float(tensors[earlier]), flatten_to_float(tensors[row.name])):
            copies[row.name] = earlier
    places = {row.name: match.group(1, 3) for row in rows if (match := BLOCK_NAME.fullmatch(row.name))}
    sizes = Counter(block for block, _ in places.values())
    pairs = Counter(
        (places[one][0], places[other][0])
        for other, one in copies.items()
        if one in places and other in places and places[one][1] == places[other][1]
    )
    blocks = {pair: f"{pair[0]} = {pair[1]}" for pair, count in pairs.items() if count == sizes[pair[1]]}
    single = [
        f"{one} = {other}"
        for other, one in copies.items()
        if one not in places or other not in places or (places[one][0], places[other][0]) not in blocks
    ]
    return list(blocks.values()), single


def find_mostly_constant_position_tables(rows: Sequence[TensorStatistics], tensors: Mapping[str, Tensor]) -> list[str]:
    """Position tables in which most rows equal the last; those of prefix tokens may differ."""
    found = list[str]()
    for row in rows:
        if POSITION_NAME.search(row.name) and len(row.shape) > 1 and row.is_varied:
            table = flatten_to_float(tensors[row.name]).reshape(-1, row.shape[-1])
            count = int((table == table[-1]).all(dim=1).sum())
            if len(table) > 2 and 2 * count > len(table):
                found.append(f"{row.name} ({count} of {len(table)})")
    return found
