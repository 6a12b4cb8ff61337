"""Training checkpoints: everything that a bit-identical resume needs, in one safetensors file, written atomically.

Weights, their moving average, the state of optimizers and random number generators, and metrics not yet logged.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import check_regular_file, write_atomically
from vitrail.base.json_yaml import parse_json
from vitrail.checkpoint.weight_files import CHECKSUM_KEY, add_checksum_to_header, matches_header_checksum

HEADER_KEY = "vitrail-training"


@dataclass(frozen=True)
class TrainingState:
    """The contents of a training checkpoint: tensors by name, and other values in `metadata`."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    path: Path | None = None  # the file that it was read from
    verified: bool = False  # whether its checksum was verified; files of earlier versions have none

    def tensors_with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix/`; the prefix is removed."""
        return {
            key.removeprefix(f"{prefix}/"): each for key, each in self.tensors.items() if key.startswith(f"{prefix}/")
        }


def write_training_state(state: TrainingState, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors.items()}
    header = add_checksum_to_header(tensors, {HEADER_KEY: json.dumps(dict(state.metadata))})
    write_atomically(path, lambda place: save_file(tensors, place, header))


def read_training_state(path: Path) -> TrainingState:
    """Read a checkpoint into memory and verify its checksum."""
    try:
        return read_verified_state(path)
    except MemoryError:  # the file may be intact
        raise CheckpointError(f"{path} does not fit into memory; use a machine with more memory") from None
    except (OSError, SafetensorError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        if "allocate memory" in str(error):  # torch raises a RuntimeError
            raise CheckpointError(f"{path} does not fit into memory: {describe_error(error)}") from None
        raise DamagedCheckpointError(path, error) from None


def read_verified_state(path: Path) -> TrainingState:
    check_regular_file(path.stat())
    with safe_open(path, "pt") as file:
        header: dict[str, str] = dict(file.metadata() or {})
        if header.keys() - {HEADER_KEY, CHECKSUM_KEY} or HEADER_KEY not in header:  # finds a damaged key, too
            raise ValueError("its header is not that of a training checkpoint")
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    intact = matches_header_checksum(tensors, header)
    if intact is False:
        raise ValueError("checksum mismatch")
    numbers = parse_json(header[HEADER_KEY])
    if not isinstance(numbers, dict):
        raise ValueError("its header is not a JSON object")  # noqa: TRY004  # what is in a file, not an argument
    return TrainingState(tensors, numbers, path, intact is True)


class DamagedCheckpointError(CheckpointError):
    """A training checkpoint that is truncated, altered or not a checkpoint at all."""

    def __init__(self, path: Path, error: Exception) -> None:
        self.reason = describe_error(error)
        super().__init__(f"{path} cannot be read: {self.reason}; expected what `vitrail train` wrote")


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def get_optimizer_tensors(weights: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizer state of each weight, by name."""
    return {
        f"{name}/{key}": value
        for name, weight in weights.items()
        for optimizer in optimizers
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizers(
    weights: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    owners = {weight: each for each in optimizers for group in each.param_groups for weight in group["params"]}
    for name, weight in weights.items():
        remembered = {
            key.rpartition("/")[2]: value.to(weight.device)
            for key, value in tensors.items()
            if key.rpartition("/")[0] == name
        }
        for key, value in remembered.items():
            if value.shape not in (weight.shape, (), (1,)):
                raise ValueError(f"{key} of {name} has shape {tuple(value.shape)}; expected {tuple(weight.shape)}")
        if remembered and weight in owners:
            owners[weight].state[weight] = remembered


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
