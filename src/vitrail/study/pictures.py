"""A comparison as a picture: who disagrees with whom, and how alike the two tokens are. Needs matplotlib."""

from pathlib import Path

from vitrail.study.comparison import LONGEST, Comparison
from vitrail.train.pictures import COLOURS, drawable, new_figure, plain_axes, save

WITH_NUMBERS, WITH_LABELS = 16, 60  # voters up to which the matrix has them


def comparison_picture(result: Comparison, path: Path) -> None:
    """The matrix of disagreement with its numbers, and the cosine of the tokens by layer where a model is distilled."""
    voters, lines = len(result.voters), bool(result.similarities)
    side = min(max(4.2, 2.2 + 0.6 * voters), 13.0)
    figure = new_figure(side + (6.2 if lines else 1.2), side)
    left, *others = figure.subplots(1, 2 if lines else 1, squeeze=False, width_ratios=(side, 5) if lines else None)[0]

    percents = [[100 * share for share in row] for row in result.disagreement]
    most = max(map(max, percents)) or 1.0
    left.imshow(percents, cmap="Blues", vmin=0, vmax=most)
    plain_axes(left, f"classified differently, % of {result.images:,} images")
    if voters <= WITH_LABELS:
        names = [drawable(each.short(LONGEST), LONGEST) for each in result.voters]
        left.set_xticks(
            range(voters), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8, parse_math=False
        )
        left.set_yticks(range(voters), names, fontsize=8, parse_math=False)
    if voters <= WITH_NUMBERS:
        for row, values in enumerate(percents):
            for column, value in enumerate(values):
                colour = "white" if value > 0.6 * most else "black"
                left.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)

    for axes in others:
        for number, each in enumerate(result.similarities):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(each.layers, color=colour, marker="o", markersize=4, linewidth=1.6)
            axes.plot(len(each.layers) - 0.5, each.end, color=colour, marker="D", markersize=6, linestyle="")
        plain_axes(axes, "cosine of class and distillation token; ◆ after the final norm")
        axes.set(xlabel="after the embedding (0) and each block", ylim=(min(0, *axes.get_ylim()), 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        rows = [axes.lines[2 * number] for number in range(len(result.similarities))]
        legend = axes.legend(rows, ["" for _ in rows], frameon=False, fontsize=8)
        for text, each in zip(legend.get_texts(), result.similarities, strict=True):
            text.set(text=drawable(each.model), parse_math=False)
    save(figure, path)
