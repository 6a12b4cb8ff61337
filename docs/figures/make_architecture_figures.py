"""Draw one figure per architecture of docs/architectures.md: what one token reads.

    python docs/figures/make_architecture_figures.py [FAMILY...]

The first panel has the pixels that a token is made of, the others the tokens that it reads in a block. Nothing is drawn
by hand: the panels are gradients of the models with random weights. Blocks that read the same tokens are drawn once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import run
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor, nn

import vitrail
from vitrail.base.figures import new_figure
from vitrail.base.style import BLUE, RED
from vitrail.models import FAMILIES
from vitrail.models.base.contract import ImageModel, Level
from vitrail.models.catalog.preset_costs import list_presets

FOLDER = Path(__file__).parent
MAX_PANELS = 9
BLOCKS_PER_LEVEL = 2  # windows and shifted windows, or windows and global attention
ROUNDING = 1e-4  # of the largest gradient; smaller ones are errors of rounding
FEW = {"vit": "vit_tiny_patch16_224", "parallel_vit": "vit_small_patch16_18x2_224"}  # not the cheapest presets
SHADES = LinearSegmentedColormap.from_list("shades", ["#f2f4f7", BLUE])
Shares = NDArray[np.float32]  # (rows, columns), from 0 to 1


@dataclass(frozen=True)
class Panel:
    title: str
    read: Shares
    token: tuple[float, float, float, float]  # left, top, width, height of the token that reads


def choose_preset(family: str) -> str:
    """The cheapest preset of a family."""
    costs = {name: each["macs"] for name, each in list_presets().items() if each["family"] == family and each["macs"]}
    return FEW.get(family) or min(costs, key=lambda name: costs[name] or 0)


def create_noisy_model(preset: str) -> ImageModel:
    """Random weights, also where a model starts with zeros, which would hide what it reads."""
    torch.manual_seed(0)
    model: Any = vitrail.create(preset).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return model


def find_tokens(values: Tensor, level: Level, prefix: int) -> Tensor | None:
    """The patches of a level in what a block reads or returns: (h, w, D); None if they are not there."""
    h, w = level.grid
    if values.ndim == 4:
        if values.shape[1:3] == (h, w):
            return values[0]
        return values[0].permute(1, 2, 0) if values.shape[2:] == (h, w) else None
    if values.ndim == 3 and values.shape[1] in (h * w, prefix + h * w):
        return values[0, -h * w :].unflatten(0, (h, w))
    return None


def normalize_gradient(gradient: Tensor) -> Shares:
    """(h, w, D) → from 0 to 1; the root shows weak dependencies as well."""
    size = gradient.abs().sum(-1)
    size = torch.where(size > ROUNDING * size.max(), size, 0).sqrt()
    ordinary = torch.quantile(size[size > 0], 0.9) if (size > 0).any() else torch.tensor(1.0)
    return (size / ordinary).clamp(max=1).numpy()


def record_blocks(model: ImageModel, images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The input and the output of each block."""
    found = dict[str, tuple[Tensor, Tensor]]()

    def make_hook(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
            output = returned[0] if isinstance(returned, tuple) else returned
            if isinstance(given[0], Tensor) and isinstance(output, Tensor):
                found[name] = (given[0], output)

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(make_hook(name))
        for level in model.levels
        for name in level.blocks
    ]
    model.feature_maps(images)
    for hook in hooks:
        hook.remove()
    return found


def draw_panels(model: ImageModel) -> Iterator[Panel]:
    rows, columns = np.atleast_1d(model.config.image_size).repeat(2)[:2].tolist()
    images = torch.randn(1, model.config.channels, rows, columns, requires_grad=True)
    recorded = record_blocks(model, images)
    if (first := next(iter(recorded.values()), None)) is None:
        return
    level = model.levels[0]
    tokens = find_tokens(first[0], level, model.prefix)
    if tokens is not None:
        row, column = (size * 5 // 12 for size in level.grid)
        (gradient,) = torch.autograd.grad(tokens[row, column].sum(), images, retain_graph=True, allow_unused=True)
        if gradient is not None:  # of colors of a palette, there is none
            place = (column * level.stride[1] - 0.5, row * level.stride[0] - 0.5, level.stride[1], level.stride[0])
            size = gradient[0].abs().sum(0)
            yield Panel("pixels of one token", (size > ROUNDING * size.max()).float().numpy(), place)
    for number, level in enumerate(model.levels, start=1):
        patterns = list[Shares]()
        for name in level.blocks:
            if name not in recorded or len(patterns) == BLOCKS_PER_LEVEL:
                continue
            given, returned = recorded[name]
            source, target = (find_tokens(each, level, model.prefix) for each in (given, returned))
            if source is None or target is None:
                continue
            row, column = (size * 5 // 12 for size in level.grid)
            (gradient,) = torch.autograd.grad(target[row, column].sum(), given, retain_graph=True)
            found = find_tokens(gradient, level, model.prefix)
            assert found is not None
            read = normalize_gradient(found)
            if any(((read > 0) == (other > 0)).all() for other in patterns):
                continue
            patterns.append(read)
            where = f"level {number}, block" if len(model.levels) > 1 else "tokens, block"
            title = f"{where} {level.blocks.index(name) + 1}: {level.grid[0]}×{level.grid[1]}"
            yield Panel(title, read, (column - 0.5, row - 0.5, 1, 1))


def draw_family(family: str) -> bool:
    """Write the figure of a family; False if its blocks have no grid of tokens."""
    panels = [*draw_panels(create_noisy_model(choose_preset(family)))][:MAX_PANELS]
    if not panels:
        return False
    figure = new_figure(1.2 * len(panels), 1.4)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.axis("off")
        axes.imshow(panel.read, cmap=SHADES, vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(panel.title, fontsize=6)
        left, top, width, height = panel.token
        axes.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=RED, linewidth=1))
    figure.savefig(FOLDER / f"architecture-{family}.png")
    return True


def main(*families: str) -> None:
    """Draw the figures of all families, or of those that are named."""
    images = {each["family"] for each in list_presets().values() if each["macs"]}
    for family in track(families or [name for name in FAMILIES if name in images]):
        if not draw_family(family):
            print(f"{family}: its blocks have no grid of tokens")


if __name__ == "__main__":
    run(main)
