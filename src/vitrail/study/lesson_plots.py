"""Teaching plots, drawn from the code that the models themselves run: GELU, learning rates, sinusoids for positions."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.figures import COLOUR_MAP, COLOURS, GREY, RED, CaptionedFigure, new_figure, style_axes
from vitrail.inspection.position_similarity import position_similarity
from vitrail.layers.mlp import Mlp
from vitrail.layers.positions import Grid, sinusoid_1d, sinusoid_2d
from vitrail.train.recipe import OptimizationSettings
from vitrail.train.schedule import lr_factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

SCHEDULE_NAMES = ("cosine", "linear", "inverse_sqrt", "constant")
LESSON_FORMULAS = {  # by the name of the plate
    "gelu": """GELU(x)   = x · Φ(x),  Φ the cumulative normal distribution
tanh GELU = x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))
SiLU(x)   = x / (1 + e⁻ˣ);  SwiGLU: SiLU(a) · b
ReLU(x)   = max(0, x)""",
    "schedules": """t counts steps from 0, T steps in all, w of them warm-up, r = (t − w) / (T − w)

warm-up              (t + 1) / w
cosine               ½ (1 + cos πr)
linear               1 − r
inverse square root  √(w / (t + 1))
constant             1""",
    "positions": """PE(p, 2i)     = sin(p / 10000^(2i/D))
PE(p, 2i + 1) = cos(p / 10000^(2i/D))

1-D  p counts the patches row by row
2-D  the first D/2 numbers say the column, the others the row""",
}


def plot_all_lessons() -> list[CaptionedFigure]:
    return [plot_activations(), plot_schedules(), plot_sinusoid_positions()]


def compute_activations(x: "NDArray[Any]") -> "dict[str, NDArray[Any]]":
    """What the MLPs compute between their two layers, and ReLU beside it: each of x's shape."""
    given = torch.from_numpy(x)
    exact, tanh = Mlp(1, 1).act, Mlp(1, 1, tanh=True).act
    found = {"gelu": exact(given), "tanh": tanh(given), "relu": F.relu(given), "silu": F.silu(given)}
    return {name: values.numpy() for name, values in found.items()}


def plot_activations() -> CaptionedFigure:
    x = np.linspace(-5, 5, 1001)
    curves = compute_activations(x)
    difference = curves["gelu"] - curves["tanh"]
    largest = int(np.abs(difference).argmax())

    def draw() -> "Figure":
        figure = new_figure(6.5, 5.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        looks = (
            ("gelu", "GELU", COLOURS[0], "-"),
            ("tanh", "GELU, tanh approximation", COLOURS[1], (0, (3, 4))),  # the gaps show the curve that it lies on
            ("silu", "SiLU, in SwiGLU", COLOURS[2], "-."),
            ("relu", "ReLU", GREY, ":"),
        )
        for name, label, colour, style in looks:
            upper.plot(x, curves[name], color=colour, linestyle=style, label=label, linewidth=1.8)
        upper.set(ylabel="activation", ylim=(-0.6, 3.2))
        upper.legend(frameon=False, loc="upper left")
        lower.axhline(0, color=GREY, linewidth=0.8)
        lower.plot(x, 1e4 * difference, color=RED, linewidth=1.6)
        lower.set(xlabel="input x", ylabel="difference, 10⁻⁴", xlim=(-5, 5))
        for axes, title in ((upper, ""), (lower, "GELU − its approximation, enlarged")):
            style_axes(axes, title)
            axes.grid(alpha=0.25, linewidth=0.6)
        return figure

    return CaptionedFigure(
        name="gelu",
        title="GELU and its neighbours",
        caption=(
            "GELU lets through what is clearly positive, like ReLU, but bends smoothly and dips below zero, to "
            f"−{-curves['gelu'].min():.2f}. Its tanh approximation, which Google's weights were trained with, "
            f"covers it: they differ by at most {1e4 * abs(difference[largest]):.1f} · 10⁻⁴, at x = "
            f"±{abs(x[largest]):.2f}. Too little to see, enough to matter where two programs should agree."
        ),
        arrays={"x": x, **curves, "difference": difference},
        draw=draw,
    )


def compute_schedules(steps: int, warmup: int) -> "dict[str, NDArray[Any]]":
    """The learning rate of each step as a share of its peak, by the function that training asks: each (steps,)."""
    return {
        name: np.array([lr_factor(step, steps, warmup, OptimizationSettings(schedule=name)) for step in range(steps)])
        for name in SCHEDULE_NAMES
    }


def plot_schedules(steps: int = 1000, warmup: int = 100) -> CaptionedFigure:
    curves = compute_schedules(steps, warmup)

    def draw() -> "Figure":
        figure = new_figure(6.5, 4)
        axes = figure.subplots()
        axes.axvspan(0, warmup, color=GREY, alpha=0.15, linewidth=0, label="warm-up")
        for number, (name, values) in enumerate(curves.items()):
            style = ("-", "--", "-.", ":")[number]
            label = name.replace("inverse_sqrt", "inverse square root")
            axes.plot(np.arange(1, steps + 1), values, style, color=COLOURS[number], label=label, linewidth=1.8)
        axes.set(xlabel="step", ylabel="learning rate, share of its peak", xlim=(0, steps), ylim=(0, 1.05))
        axes.grid(alpha=0.25, linewidth=0.6)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        style_axes(axes, "")
        return figure

    return CaptionedFigure(
        name="schedules",
        title="Learning rates over a training",
        caption=(
            f"{steps:,} steps, {warmup:,} of them warm-up, in which the rate rises in a straight line while the first "
            "gradients are still rough. Then cosine and linear fall to zero by the end; the inverse square root falls "
            "fast at first and never ends, which suits a training whose length is open; constant stays."
        ),
        arrays={"step": np.arange(1, steps + 1), **curves},
        draw=draw,
    )


def sinusoid_tables(grid: Grid, width: int) -> "dict[str, NDArray[Any]]":
    """The fixed position embeddings of a ViT, as `sincos` and `sincos_2d` add them: each (h·w, D)."""
    return {"1-D": sinusoid_1d(grid, width).numpy(), "2-D": sinusoid_2d(grid, width).numpy()}


def plot_sinusoid_positions(grid: Grid = (14, 14), width: int = 64) -> CaptionedFigure:
    rows, columns = grid
    row, column = rows // 3, columns * 2 // 3
    tables = sinusoid_tables(grid, width)
    alike = {name: position_similarity(table, grid)[row, column] for name, table in tables.items()}

    def draw() -> "Figure":
        figure = new_figure(8.5, 7.6)
        places: Any = figure.subplots(2, 2)
        lowest = min(each.min() for each in alike.values())
        for number, (name, title) in enumerate((("1-D", "1-D: row by row"), ("2-D", "2-D: column, then row"))):
            table: Axes = places[0, number]
            drawn = table.imshow(tables[name], cmap=COLOUR_MAP, vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
            table.set(xlabel="dimension", ylabel="patch" if number == 0 else "")
            table.set_title(title, fontsize=11, loc="left")
            near: Axes = places[1, number]
            shown = near.imshow(alike[name], cmap=COLOUR_MAP, vmin=lowest, vmax=1)
            near.plot(column, row, "o", markersize=7, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=2)
            near.set(xlabel="column of the patch", ylabel="row of the patch" if number == 0 else "")
            near.set_title("alike to the patch in the ring", fontsize=11, loc="left")
            if number == 1:
                figure.colorbar(drawn, ax=places[0], label="value")
                figure.colorbar(shown, ax=places[1], label="cosine")
        return figure

    return CaptionedFigure(
        name="positions",
        title="Sinusoids for positions",
        caption=(
            f"Above, the tables for {rows}×{columns} patches and width {width}: each row says where one patch is, in "
            "waves from short to long. Below, the cosine between one patch's row and every other. Counted row by row, "
            "a patch is near its left and right neighbours, also across the edge of the image, and knows little of "
            "above and below; with an axis each, near in the image is near in the table."
        ),
        arrays={
            **{f"table_{name[0]}d": table for name, table in tables.items()},
            **{f"cosine_{name[0]}d": each for name, each in alike.items()},
            "patch": np.array([row, column]),
        },
        draw=draw,
    )
