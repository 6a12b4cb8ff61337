"""Teaching figures computed by the models' own code: GELU, learning rate schedules, sinusoidal positions."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.base.figures import CaptionedFigure, new_figure, style_axes
from vitrail.base.style import DIVERGING_MAP, GRAY, PALETTE, RED, TITLE_POINTS
from vitrail.inspection.representation.weight_patterns import choose_cosine_scale, position_similarity
from vitrail.layers.block import Mlp
from vitrail.layers.positions import Grid, sinusoid_1d, sinusoid_2d
from vitrail.recipes.recipe import OptimizationSettings
from vitrail.recipes.schedule import lr_factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

SCHEDULE_NAMES = ("cosine", "linear", "inverse_sqrt", "constant")
LESSON_FORMULAS = {  # by the name of the figure
    "gelu": """GELU(x)   = x · Φ(x),  Φ the cumulative normal distribution
tanh GELU = x · ½ (1 + tanh(√(2/π) (x + 0.044715 x³)))
SiLU(x)   = x / (1 + e⁻ˣ);  SwiGLU: SiLU(a) · b
ReLU(x)   = max(0, x)""",
    "schedules": """step t from 0, T steps in total, w of them warm-up, r = (t − w) / (T − w)

warm-up              (t + 1) / w
cosine               ½ (1 + cos πr)
linear               1 − r
inverse square root  √(w / (t + 1))
constant             1""",
    "positions": """PE(p, 2i)     = sin(p / 10000^(2i/D))
PE(p, 2i + 1) = cos(p / 10000^(2i/D))

1-D  p counts the patches row by row
2-D  the first D/2 dimensions encode the column, the others the row""",
}


def draw_lesson_figures() -> list[CaptionedFigure]:
    return [draw_activations(), draw_schedules(), draw_sinusoid_positions()]


def compute_activations(x: "NDArray[Any]") -> "dict[str, NDArray[Any]]":
    """Activations of the MLPs, and ReLU for comparison: each of x's shape."""
    given = torch.from_numpy(x)
    exact, tanh = Mlp(1, 1).act, Mlp(1, 1, tanh=True).act
    found = {"gelu": exact(given), "tanh": tanh(given), "relu": F.relu(given), "silu": F.silu(given)}
    return {name: values.numpy() for name, values in found.items()}


def draw_activations() -> CaptionedFigure:
    x = np.linspace(-5, 5, 1001)
    curves = compute_activations(x)
    difference = curves["gelu"] - curves["tanh"]
    largest = int(np.abs(difference).argmax())

    def draw() -> "Figure":
        figure = new_figure(6.5, 5.6)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
        styles = (
            ("gelu", "GELU", PALETTE[0], "-"),
            ("tanh", "GELU, tanh approximation", PALETTE[1], (0, (3, 4))),  # the gaps show the curve below
            ("silu", "SiLU (in SwiGLU)", PALETTE[2], "-."),
            ("relu", "ReLU", GRAY, ":"),
        )
        for name, label, color, style in styles:
            upper.plot(x, curves[name], color=color, linestyle=style, label=label, linewidth=1.8)
        upper.set(ylabel="activation", ylim=(-0.6, 3.2))
        upper.legend(frameon=False, loc="upper left")
        lower.axhline(0, color=GRAY, linewidth=0.8)
        lower.plot(x, 1e4 * difference, color=RED, linewidth=1.6)
        lower.set(xlabel="input x", ylabel="difference, 10⁻⁴", xlim=(-5, 5))
        for axes, title in ((upper, ""), (lower, "GELU minus its approximation, magnified")):
            style_axes(axes, title)
            axes.grid(alpha=0.25, linewidth=0.6)
        return figure

    return CaptionedFigure(
        name="gelu",
        title="GELU and related activations",
        caption=(
            "Like ReLU, GELU passes large positive inputs, but it is smooth and has a minimum of "
            f"−{-curves['gelu'].min():.2f}. The tanh approximation, with which Google's weights were trained, differs "
            f"by at most {1e4 * abs(difference[largest]):.1f} · 10⁻⁴, at x = ±{abs(x[largest]):.2f} (below): too "
            "little to see, but enough to matter if two implementations should agree."
        ),
        arrays={"x": x, **curves, "difference": difference},
        draw=draw,
    )


def compute_schedules(steps: int, warmup: int) -> "dict[str, NDArray[Any]]":
    """Learning rate of each step relative to its peak, by the function that training uses: each (steps,)."""
    return {
        name: np.array([lr_factor(step, steps, warmup, OptimizationSettings(schedule=name)) for step in range(steps)])
        for name in SCHEDULE_NAMES
    }


def draw_schedules(steps: int = 1000, warmup: int = 100) -> CaptionedFigure:
    curves = compute_schedules(steps, warmup)

    def draw() -> "Figure":
        figure = new_figure(6.5, 4)
        axes = figure.subplots()
        axes.axvspan(0, warmup, color=GRAY, alpha=0.15, linewidth=0, label="warm-up")
        for number, (name, values) in enumerate(curves.items()):
            style = ("-", "--", "-.", ":")[number]
            label = name.replace("inverse_sqrt", "inverse square root")
            axes.plot(np.arange(1, steps + 1), values, style, color=PALETTE[number], label=label, linewidth=1.8)
        axes.set(xlabel="step", ylabel="learning rate relative to its peak", xlim=(0, steps), ylim=(0, 1.05))
        axes.grid(alpha=0.25, linewidth=0.6)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        style_axes(axes, "")
        return figure

    return CaptionedFigure(
        name="schedules",
        title="Learning rate schedules",
        caption=(
            f"Learning rate over {steps:,} steps. During warm-up (the first {warmup:,} steps) it rises linearly, while "
            "gradients are still large and noisy. Then cosine and linear decay to zero at the end; inverse square root "
            "decays fast at first but never reaches zero, which suits training of open length; constant stays the same."
        ),
        arrays={"step": np.arange(1, steps + 1), **curves},
        draw=draw,
    )


def sinusoid_tables(grid: Grid, width: int) -> "dict[str, NDArray[Any]]":
    """Fixed position embeddings of a ViT, as added by `sincos` and `sincos_2d`: each (h·w, D)."""
    return {"1-D": sinusoid_1d(grid, width).numpy(), "2-D": sinusoid_2d(grid, width).numpy()}


def draw_sinusoid_positions(grid: Grid = (14, 14), width: int = 64) -> CaptionedFigure:
    rows, columns = grid
    row, column = rows // 3, columns * 2 // 3
    tables = sinusoid_tables(grid, width)
    similarities = {name: position_similarity(table, grid)[row, column] for name, table in tables.items()}

    def draw() -> "Figure":
        figure = new_figure(8.5, 7.6)
        panels: Any = figure.subplots(2, 2)
        scale = choose_cosine_scale(np.array([*similarities.values()]))
        for number, (name, title) in enumerate((("1-D", "1-D: row by row"), ("2-D", "2-D: column and row"))):
            table: Axes = panels[0, number]
            values = table.imshow(
                tables[name], cmap=DIVERGING_MAP, vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
            )
            table.set(xlabel="dimension", ylabel="patch" if number == 0 else "")
            table.set_title(title, fontsize=TITLE_POINTS, loc="left")
            similarity: Axes = panels[1, number]
            cosines = similarity.imshow(similarities[name], **scale)
            similarity.plot(
                column, row, "o", markersize=7, markerfacecolor="none", markeredgecolor=RED, markeredgewidth=2
            )
            similarity.set(xlabel="patch column", ylabel="patch row" if number == 0 else "")
            similarity.set_title("similarity to the circled patch", fontsize=TITLE_POINTS, loc="left")
            if number == 1:
                figure.colorbar(values, ax=panels[0], label="value")
                figure.colorbar(cosines, ax=panels[1], label="cosine similarity")
        return figure

    return CaptionedFigure(
        name="positions",
        title="Sinusoidal position embeddings",
        caption=(
            f"Top: the tables for {rows}×{columns} patches and width {width}; each row encodes one patch's position "
            "in waves of increasing length. Bottom: cosine similarity between one patch and all others. With 1-D "
            "positions a patch is similar to its left and right neighbors, even across the edge of the image, but not "
            "to those above and below; with 2-D positions, patches close in the image are similar."
        ),
        arrays={
            **{f"table_{name[0]}d": table for name, table in tables.items()},
            **{f"cosine_{name[0]}d": each for name, each in similarities.items()},
            "patch": np.array([row, column]),
        },
        draw=draw,
    )
