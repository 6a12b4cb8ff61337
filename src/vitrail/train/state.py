"""All that a training needs to go on as if it had never stopped, in one safetensors file that appears whole.

Weights, their average, what the optimizers remember, the state of the random numbers, and what is not yet logged.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.errors import CheckpointError, one_line
from vitrail.files import write_whole

HEADER = "vitrail-training"


@dataclass(frozen=True)
class State:
    """Where a training stands: tensors by name, and the numbers beside them."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `name/`, without it."""
        return {key.removeprefix(f"{name}/"): each for key, each in self.tensors.items() if key.startswith(f"{name}/")}


def write_state(state: State, path: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.tensors.items()}
    text = json.dumps(dict(state.numbers))
    write_whole(path, lambda place: save_file(tensors, place, {HEADER: text}))


def read_state(path: Path) -> State:
    with opened(path) as file:
        return State({name: file.get_tensor(name).clone() for name in file.keys()}, numbers_in(file))  # noqa: SIM118


def read_numbers(path: Path) -> dict[str, Any]:
    """What stands beside the tensors, without reading them."""
    with opened(path) as file:
        return numbers_in(file)


@contextmanager
def opened(path: Path) -> Generator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {one_line(error)}; expected what `vitrail train` wrote"
        ) from None


def numbers_in(file: Any) -> dict[str, Any]:
    return json.loads((file.metadata() or {})[HEADER])


def named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def optimizer_tensors(model: nn.Module, made: Sequence[Optimizer]) -> dict[str, Tensor]:
    """What optimizers remember of each weight, by its name."""
    return {
        f"{name}/{key}": value
        for name, weight in model.named_parameters()
        for optimizer in made
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizers(model: nn.Module, made: Sequence[Optimizer], tensors: Mapping[str, Tensor]) -> None:
    owners = {weight: each for each in made for group in each.param_groups for weight in group["params"]}
    for name, weight in model.named_parameters():
        remembered = {
            key.rpartition("/")[2]: value.to(weight.device)
            for key, value in tensors.items()
            if key.rpartition("/")[0] == name
        }
        if remembered and weight in owners:
            owners[weight].state[weight] = remembered


def random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random_state(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
