"""Results in a report: they agree with the evaluation, and samples of every class are shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.figure_checks import check_figure
from support.saved_models import LABELS, write_model_folder
from support.toy_datasets import write_class_folders

from vitrail.base.style import WRONG
from vitrail.evaluation.evaluation_data import open_labeled_images, select_images
from vitrail.inspection.explain.explainer import Explainer
from vitrail.opening import Opened, open_torch_model
from vitrail.report.evaluation_report import (
    EvaluatedImages,
    build_result_sections,
    build_training_section,
    evaluate_images,
    list_typical_images,
    select_samples,
)
from vitrail.report.html_page import PageSection, render_page
from vitrail.report.model_report import build_model_report, choose_explained_images
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.train.run_list import RecordedTask, RunSummary

SIZES = {"ants": 8, "bees": 1, "cats": 5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class_folders(tmp_path_factory.mktemp("images") / "photos", **SIZES)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_torch_model(write_model_folder(tmp_path_factory.mktemp("models") / "model", patch_size=16))


@pytest.fixture(scope="module")
def evaluated(loaded: Opened, data: Path) -> EvaluatedImages:
    return evaluate_images(loaded, open_labeled_images(loaded, str(data)), batch=4)


def rows(section: PageSection) -> Any:
    assert section.table is not None
    return section.table[1]


def test_predictions_agree_with_the_evaluation(evaluated: EvaluatedImages) -> None:
    right = evaluated.predictions == evaluated.labels
    assert right.mean() == pytest.approx(evaluated.result.top1)
    assert np.bincount(evaluated.labels).tolist() == [*SIZES.values()]
    assert ((evaluated.confidences >= 1 / 3) & (evaluated.confidences <= 1)).all()


def test_samples_of_every_class_are_correct_and_wrong(evaluated: EvaluatedImages) -> None:
    for index in range(len(LABELS)):
        right, wrong = select_samples(evaluated, index)
        assert (evaluated.labels[[*right, *wrong]] == index).all()
        assert (evaluated.predictions[right] == index).all()
        assert (evaluated.predictions[wrong] != index).all()
        assert len(right) + len(wrong) == min(4, len(right)) + min(4, len(wrong)) > 0
        confidences = evaluated.confidences[wrong]
        assert (np.diff(confidences) <= 0).all(), "the most confident first"


def test_result_sections(evaluated: EvaluatedImages) -> None:
    overview, per_class, plots, samples = build_result_sections(evaluated)
    assert "14 validation images of 3 classes" in overview.text
    assert ("top-1 accuracy", f"{evaluated.result.top1:.2%}") in rows(overview)
    assert not any(name.startswith("top-5") for name, _ in rows(overview)), "always 100% for three classes"
    assert [row[:2] for row in rows(per_class)] == [(name, str(count)) for name, count in SIZES.items()]
    assert [figure.name for figure in plots.figures] == ["confusion", "reliability"]
    assert [figure.name for figure in samples.figures] == ["samples-1"]
    check_figure(plots.figures[0], "True class", "Predicted class")
    check_figure(plots.figures[1], "confidence", "accuracy")
    drawn = samples.figures[0].draw()
    (axes,) = drawn.axes
    assert len(axes.images) == sum(len(each) for each in samples.figures[0].arrays.values())
    assert set(LABELS) <= {text.get_text() for text in axes.texts}
    assert samples.figures[0].to_png().startswith(b"\x89PNG")


def test_classes_of_the_data_that_the_model_does_not_have(loaded: Opened, tmp_path: Path) -> None:
    found = open_labeled_images(loaded, str(write_class_folders(tmp_path / "others", dogs=1, birds=1)))
    assert found.mapping is None
    assert "2 of the data's 2 classes" in found.no_mapping_reason
    assert found.labels == ("birds", "dogs")


def test_few_images_are_of_different_classes(loaded: Opened, data: Path) -> None:
    chosen = select_images(loaded, str(data), 3, by_class=True)
    assert [(Path(each.name).parent.name, each.label) for each in chosen.items] == [(name, name) for name in LABELS]
    assert [str(each.source) for each in chosen.items] == [each.name for each in chosen.items]
    assert chosen.labeled is not None
    assert [each.label for each in select_images(loaded, str(data), 3).items] != list(LABELS)


def test_training_section() -> None:
    records = ({"step": 1, "epoch": 0.5, "loss": 2.0}, {"step": 2, "epoch": 1.0, "val_top1": 0.5, "val_loss": 1.5})
    run = RunSummary(
        name="one", folder=Path("one"), state="finished", model="ViT-Ti/16", teacher="big", step=2, records=records
    )
    section = build_training_section(run)
    assert dict(rows(section)) == {
        "model": "ViT-Ti/16",
        "distilled from": "big",
        "epochs": "1",
        "steps": "2",
        "training loss": "2.0000",
        "validation loss": "1.5000",
        "validation top-1, last": "50.00%",
        "validation top-1, best": "50.00%",
    }
    assert [figure.name for figure in section.figures] == ["curves"]
    assert build_training_section(RunSummary(name="one", folder=Path("one"), state="stopped")).figures == []
    metric = Metric(name="fid", label="FID", higher_is_better=False)
    scored = ({"step": 1, "epoch": 0.5, "val_fid": 30.0}, {"step": 2, "epoch": 1.0, "val_fid": 40.0})
    other = build_training_section(
        replace(run, task=RecordedTask(name="toy", metrics=(metric, LOSS_METRIC)), records=scored)
    )
    assert dict(rows(other)).items() >= {("validation FID, last", "40"), ("validation FID, best", "30")}
    assert "FID on the validation images" in other.figures[0].caption
    assert other.figures[0].arrays["val_fid"].tolist() == [30, 40]
    losses = build_training_section(replace(run, task=RecordedTask(name="toy", metrics=(LOSS_METRIC,))))
    assert [name for name, _ in rows(losses) if "loss" in name] == [
        "training loss",
        "validation loss",
        "validation loss, best",
    ]


def test_explained_images_are_the_most_confident_mistakes_and_typical_right_ones(evaluated: EvaluatedImages) -> None:
    wrong, right = evaluated.result.wrong, list_typical_images(evaluated)
    assert len(wrong) + len(right) == sum(SIZES.values())
    chosen = choose_explained_images([], evaluated, 4)
    names = [evaluated.found.images.name(each.index) for each in wrong[:2]]
    assert [item.name for item, _ in chosen[:2]] == names, "the most confident mistakes first"
    assert [item.name for item, _ in chosen[2:]] == [evaluated.found.images.name(n) for n in right[:2]]
    for item, truth in chosen:
        assert truth is not None
        assert truth.label == item.label == Path(item.name).parent.name
    of_class = [n for n in right if evaluated.labels[n] == evaluated.labels[right[0]]]
    median = np.median(evaluated.confidences[of_class])
    gaps = np.abs(evaluated.confidences[of_class] - median)
    assert gaps[0] == gaps.min(), "the typical one is of median confidence"
    everything = choose_explained_images([], evaluated, 99)
    assert len(everything) == sum(SIZES.values())


def test_figures_in_a_report_say_what_is_wrong_and_what_is_true(loaded: Opened, evaluated: EvaluatedImages) -> None:
    _, _, sections = build_model_report(Explainer(loaded), "model", evaluated=evaluated, explained=4)
    (shown,) = [each for each in sections if each.title == "What the model looked at"]
    assert [each.verdict for each in shown.figures] == ["wrong", "wrong", "right", "right"]
    assert "most confident mistakes come first" in shown.text
    first, worst = shown.figures[0], evaluated.result.wrong[0]
    said, true = f"{worst.predicted} ({worst.probability:.1%})", f"{worst.label} ({worst.label_probability:.1%})"
    assert first.caption == f"{Path(worst.name).name}: predicted {said}; it is {true}."
    drawn = first.draw()
    heading = drawn.texts[0]
    assert heading.get_text() == f"✗ Wrong, it is {worst.label}. What the model looked at for {said}"
    assert heading.get_color() == WRONG
    (bars,) = [axes for axes in drawn.axes if axes.get_title() == "prediction"]
    assert f"{worst.label} (the truth)" in {text.get_text() for text in bars.texts}
    page = render_page("a", "b", [shown])
    assert page.count('<span class="wrong">✗ Wrong.</span>') == page.count('<span class="right">✓ Right.</span>') == 2
