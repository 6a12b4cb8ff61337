"""The stages of a convnet, each at half the resolution of the one before."""

from collections.abc import Iterable

from torch import Tensor, nn


def run_stages(x: Tensor, model: nn.Module, names: Iterable[str], *, keep_all: bool = False) -> list[Tensor]:
    """The maps after all named stages, or by default only the last, so that the memory of the others is freed."""
    maps = list[Tensor]()
    for name in names:
        x = model.get_submodule(name)(x)
        maps = [*maps, x] if keep_all else [x]
    return maps
