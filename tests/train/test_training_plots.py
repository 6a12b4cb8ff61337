"""Plots of runs of any kind, without warnings and without pyplot."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.figure_checks import check_texts

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.base.figures import sanitize_label
from vitrail.evaluation.metrics import CalibrationBin, MetricAccumulator
from vitrail.evaluation.plots import (
    draw_confusion_matrix,
    draw_reliability_diagram,
    save_confusion_matrix,
    save_reliability_diagram,
)
from vitrail.tasks.metric import CLASSIFICATION_METRICS, LOSS_METRIC, Metric
from vitrail.train.plots import choose_metrics, draw_training_curves, plot_training_curves

pytest.importorskip("matplotlib", reason="needs the extra `plot`")
TOP1 = CLASSIFICATION_METRICS[0]


def make_log(evaluations: int) -> list[dict[str, float]]:
    training = [{"step": n, "epoch": n / 10, "loss": 3 / n} for n in range(1, 31)]
    validation = [
        {"step": n, "epoch": n, "val_top1": 1 - 1 / (n + 1), "val_loss": 1 / n} for n in range(1, evaluations + 1)
    ]
    return [*training, *validation]


def any_axes(figure: Any) -> list[Any]:
    return figure.axes


def legend_texts(axes_or_figure: Any) -> list[str]:
    return [text.get_text() for legend in axes_or_figure.legends for text in legend.get_texts()]


def test_curves_of_one_run() -> None:
    """Training and validation loss in one panel from 0, accuracy on a scale that is not narrow."""
    losses, accuracy = any_axes(draw_training_curves({"one": make_log(3)}))
    assert [text.get_text() for text in losses.get_legend().get_texts()] == ["training", "validation"]
    training, validation = losses.lines
    assert (len(training.get_xdata()), list(validation.get_ydata())) == (30, [1, 1 / 2, 1 / 3])
    assert losses.get_ylim()[0] == 0
    assert list(accuracy.lines[0].get_ydata()) == pytest.approx([50, 200 / 3, 75])
    assert accuracy.get_ylim() == (50, 101)
    assert {axes.get_xlabel() for axes in (losses, accuracy)} == {"epoch"}
    steady = [{"step": 1, "epoch": n, "val_top1": 0.97 + n / 1000, "val_loss": 0.1} for n in range(3)]
    assert draw_training_curves({"one": steady}).axes[1].get_ylim() == (80, 101)


def test_curves_of_several_runs() -> None:
    figure = draw_training_curves({"a": make_log(3), "b": make_log(2)})
    assert [axes.get_title("left") for axes in figure.axes] == [
        "training loss",
        "validation loss",
        "validation accuracy (top-1)",
    ]
    assert legend_texts(figure) == ["a", "b"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2]


def test_curves_of_other_metrics() -> None:
    """A panel for each metric that counts, with its label and direction; none for a loss that is one already."""
    log = [{"epoch": n, "loss": 3 / n, "val_loss": 2 / n, "val_fid": 90 / n, "val_error": 0.4 / n} for n in (1, 2)]
    fid = Metric(name="fid", label="FID of $10k$ images", higher_is_better=False)
    error = Metric(name="error", label="error", higher_is_better=False, is_share=True)
    losses, distance = any_axes(draw_training_curves({"one": log}, [fid]))
    assert [len(losses.lines), list(distance.lines[0].get_ydata())] == [2, [90, 45]]
    assert distance.get_title("left") == "validation FID of $10k$ images"
    assert distance.get_ylabel().replace("\n", " ") == "FID of $10k$ images (lower is better)"
    figure = draw_training_curves({"one": log, "two": make_log(2)}, [fid, TOP1, error])
    assert [axes.get_title("left").replace("\n", " ") for axes in figure.axes] == [
        "training loss",
        "validation loss",
        "validation FID of $10k$ images",
        "validation accuracy (top-1)",
        "validation error",
    ]
    shares = any_axes(figure)[4]
    assert (list(shares.lines[0].get_ydata()), list(shares.lines[1].get_ydata())) == ([40, 20], [])
    assert (shares.get_ylabel(), shares.get_ylim()) == ("error (%, lower is better)", (-1, 40))
    assert legend_texts(figure) == ["one", "two"]
    assert len(draw_training_curves({"one": log}, [LOSS_METRIC]).axes) == 1
    assert len(draw_training_curves({"one": log, "two": log}, [LOSS_METRIC]).axes) == 2
    without_losses = [{"epoch": 1, "loss": 1}, {"epoch": 2, "loss": 1}, {"epoch": 1, "val_fid": 3}]
    (losses,) = any_axes(draw_training_curves({"one": without_losses}, [fid]))
    assert (len(losses.lines), losses.get_legend()) == (1, None)


def test_one_point_is_a_value_and_not_a_panel() -> None:
    """After one evaluation, its values are in the title, or next to the name of each run."""
    figure = draw_training_curves({"one": make_log(1)})
    assert [axes.get_title("left") for axes in figure.axes] == ["loss"]
    assert figure.get_suptitle() == "validation accuracy (top-1) 50.00%"
    several = draw_training_curves({"one": make_log(1), "two": make_log(0)})
    assert [axes.get_title("left") for axes in several.axes] == ["training loss"]
    assert legend_texts(several) == ["one: validation loss 1.0000, validation accuracy (top-1) 50.00%", "two"]
    assert draw_training_curves({"empty": []}).get_suptitle() == "no values in the log"
    assert len(draw_training_curves({"one": make_log(1), "two": make_log(2)}).axes) == 3


def test_runs_of_several_tasks_fit_into_the_figure() -> None:
    """No title or name is cut or covers another."""
    scores = [Metric(name=f"m{n}", label=f"score {n} of a task with a long name (second version)") for n in range(4)]
    log = [*make_log(3), *({"epoch": n, **{f"val_m{k}": n for k in range(4)}} for n in (1, 2))]
    names = [f"a-run-with-a-very-long-and-detailed-name-of-seed-{n}" for n in range(5)]
    figure = draw_training_curves(dict.fromkeys(names, log), [TOP1, *scores[:2]], scores[2:])
    check_texts(figure)
    assert legend_texts(figure) == names
    titles = [axes.get_title("left").replace("\n", " ") for axes in figure.axes]
    assert titles[3:] == [*(f"validation {each.label}" for each in scores[:2]), *(each.label for each in scores[2:])]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_values_of_many_metrics_fit_into_the_figure(runs: int) -> None:
    scores = [Metric(name=f"m{n}", label=f"score {n} of a task with a name") for n in range(5)]
    log = [{"epoch": 1.0, "loss": 1.0, **{f"val_m{n}": n / 10 for n in range(5)}}]
    figure = draw_training_curves({f"run {n}": log for n in range(runs)}, scores[:1], scores[1:])
    check_texts(figure)
    shown = [figure.get_suptitle()] if runs == 1 else legend_texts(figure)
    assert len(shown) == runs
    for text in shown:
        assert text.replace("\n", " ").endswith("score 3 of a task with a name 0.3, score 4 of a task with a name 0.4")


def is_drawn(path: Path) -> bool:
    """Whether it has many colors; Pillow's getcolors may take minutes because of hash collisions."""
    with Image.open(path) as image:
        return len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3) @ [1, 256, 65536])) > 50


@pytest.mark.parametrize(
    "runs",
    [
        {"one": make_log(3)},
        {"single": make_log(1)},
        {f"run {n}": make_log(n) for n in range(13)},
        {
            "a $x_1^$": make_log(2),
            "_hidden": make_log(2),
            "日本語 \n\x1b": make_log(2),
            "": make_log(2),
            99 * "long": make_log(2),
        },
        {"started": []},
        {"no epochs": [{"step": 1.0, "loss": 2.0}]},
        {"at once": [{"step": 0, "epoch": 0, "loss": 1, "val_top1": 0}]},
    ],
)
def test_training_curves(runs: dict[str, list[dict[str, float]]], tmp_path: Path) -> None:
    plot_training_curves(runs, tmp_path / "new" / "curves.png")
    assert is_drawn(tmp_path / "new" / "curves.png")


@pytest.mark.parametrize("classes", [1, 2, 20, 61, 1000])
def test_confusion_matrix(classes: int, tmp_path: Path) -> None:
    labels = [f"{n}: $日本_{n}" for n in range(classes)]
    torch.manual_seed(0)
    matrix = torch.randint(9, (classes, classes)) * (torch.rand(classes, classes) < 9 / classes)
    save_confusion_matrix(matrix + torch.eye(classes), labels, tmp_path / "confusion.png")
    assert is_drawn(tmp_path / "confusion.png")


@pytest.mark.parametrize(("classes", "unit"), [(3, "share of the true class"), (30, "square root")])
def test_axes_and_scale_of_a_confusion_matrix(classes: int, unit: str) -> None:
    axes, bar = draw_confusion_matrix(torch.eye(classes), [str(n) for n in range(classes)]).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Predicted class", "True class")
    assert unit in bar.get_ylabel()
    assert ("square root" in bar.get_ylabel()) == (type(axes.images[0].norm).__name__ == "PowerNorm")


def test_confusion_matrix_omits_unused_classes(tmp_path: Path) -> None:
    matrix = torch.zeros(1000, 1000, dtype=torch.int64)
    matrix[3, 3] = matrix[3, 700] = 5
    save_confusion_matrix(matrix, [str(n) for n in range(1000)], tmp_path / "few.png")
    save_confusion_matrix(matrix[[3, 700]][:, [3, 700]], ["3", "700"], tmp_path / "two.png")
    assert (tmp_path / "few.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_reliability_diagram(tmp_path: Path) -> None:
    tally = MetricAccumulator(3)
    tally.add_batch(torch.randn(50, 3), torch.randint(3, (50,)))
    save_reliability_diagram(tally.compute_evaluation("abc").bins, tmp_path / "reliability.png")
    assert is_drawn(tmp_path / "reliability.png")
    left, right = any_axes(draw_reliability_diagram(tally.compute_evaluation("abc").bins))
    assert legend_texts(left.figure) == [
        "accuracy (lighter: under 5% of images)",
        "its 95% interval",
        "gap to the mean confidence",
        "perfect calibration",
    ]
    check_texts(left.figure)
    assert right.get_title("left") == "50 images by confidence"


def test_bins_of_few_images_are_light_and_uncertain() -> None:
    few = CalibrationBin(low=0.1, high=0.2, images=1, confidence=0.15, accuracy=0.0)
    many = CalibrationBin(low=0.9, high=1.0, images=99, confidence=0.95, accuracy=90 / 99)
    left, _ = any_axes(draw_reliability_diagram([few, many]))
    first, second = left.patches[0], left.patches[2]
    assert first.get_alpha() < 0.25 * second.get_alpha()
    for line, each, share in zip(left.lines, (few, many), (0.0, 90 / 99), strict=False):
        for end in line.get_ydata():  # the shares from which the accuracy is 1.96 standard deviations away
            assert abs(share - end) == pytest.approx(1.96 * (end * (1 - end) / each.images) ** 0.5, abs=1e-6)
    assert few.accuracy_interval[1] > 0.7
    assert CalibrationBin(low=0, high=1, images=0, confidence=None, accuracy=None).accuracy_interval == (0, 1)


def test_file_formats(tmp_path: Path) -> None:
    plot_training_curves({"one": make_log(2)}, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text("utf-8")
    plot_training_curves({"one": make_log(2)}, tmp_path / "curves.PDF")
    assert (tmp_path / "curves.PDF").read_bytes().startswith(b"%PDF")
    for name in ("curves", "curves.jpg"):
        with pytest.raises(ConfigError, match=r"; expected a name that ends in \.png, \.svg, \.pdf$"):
            plot_training_curves({"one": make_log(2)}, tmp_path / name)


def test_unwritable_path_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        plot_training_curves({"one": make_log(2)}, tmp_path / "file" / "curves.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        plot_training_curves({"one": make_log(2)}, tmp_path / "taken.png")


def test_missing_glyphs_are_replaced() -> None:
    assert sanitize_label("Käfer") == "Käfer"
    assert sanitize_label("日a\n") == "□a□"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, .* pip install matplotlib$"):
        plot_training_curves({"one": make_log(2)}, tmp_path / "curves.png")


def test_pyplot_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    plot_training_curves({"one": make_log(2)}, tmp_path / "curves.png")


def test_metrics_of_training_have_panels_below() -> None:
    """The loss and k-NN in the first row; below it the metrics of training, with the same metrics of evaluations."""
    knn = Metric(name="knn", label="k-NN", is_share=True)
    spread, rank = Metric(name="spread", label="spread"), Metric(name="rank", label="rank")
    log: list[dict[str, float]] = [
        {"epoch": n, "step": n, "loss": 1 / n, "entropy": 0.5, "spread": 0.4, "lr": 1.0, "images_per_second": 9.0}
        for n in (1, 2, 3)
    ]
    evaluated = {"val_loss": 0.3, "val_knn": 0.6, "val_spread": 0.4, "val_rank": 7.0}
    log += [{"epoch": n, "step": n, **evaluated} for n in (2, 3)]
    counted, others = choose_metrics((LOSS_METRIC, knn, spread, rank), log)
    assert (counted, others) == ([LOSS_METRIC, knn], [spread, rank])
    figure = draw_training_curves({"one": log}, counted, others)
    titles = ["loss", "validation k-NN", "entropy", "spread", "rank"]
    assert [axes.get_title("left") for axes in figure.axes] == titles
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 1, 2, 1]
    assert len(draw_training_curves({"one": log, "two": log}, counted, others).axes) == 6
    assert choose_metrics((LOSS_METRIC, knn), log[:3]) == ([LOSS_METRIC], [])
    assert choose_metrics(CLASSIFICATION_METRICS, log) == ([TOP1], [])
