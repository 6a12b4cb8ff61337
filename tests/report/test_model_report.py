"""The report on a model: every figure is drawn, nothing is fetched, malicious names are escaped."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from PIL import Image
from support.browser_pages import RenderedPage, find_page_faults, open_in_browser
from support.noisy_weights import add_weight_noise
from support.toy_datasets import random_array

import vitrail
from vitrail.data.images.image_items import ImageItem
from vitrail.inspection.explain.explainer import Explainer
from vitrail.report.html_page import render_page, write_page
from vitrail.report.model_report import build_model_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

EVIL = "<script>alert(1)</script>"
EVIL_NAME = '"><img src=x onerror=alert(1)>.png'
LABELS = (EVIL, "$\\frac{1}{$ bees & <b>wasps", "a_very_long_class_name_without_a_break_" * 4, "蜂\u202e\x00")
ALL = (
    "How far each head attends",
    "How the prediction changes as patches are removed",
    "Patches colored by their features",
    "Which positions are similar to the model",
    "Patterns in the filters of the first layer",
    "How long the tokens are, by layer",
    "How similar the class and distillation tokens are",
    "How similar the layers are",
)


def explainer(preset: str = "deit_tiny_distilled_patch16_224", **fields: Any) -> Explainer:
    given: dict[str, Any] = {"image_size": 32, "depth": 2, "width": 16, "heads": 2, "classes": len(LABELS), **fields}
    model = add_weight_noise(vitrail.create(preset, **given), std=0.3)
    labels = LABELS if model.config.classes else None
    return Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32), labels=labels)


def photos(folder: Path, count: int) -> list[ImageItem]:
    folder.mkdir()
    found = list[ImageItem]()
    for number in range(count):
        path = folder / f"{number}{EVIL_NAME}"
        Image.fromarray(random_array(40, 60, 3, seed=number)).save(path)
        found.append(ImageItem(path, str(path), LABELS[number % len(LABELS)]))
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    items = photos(folder / "photos", 5)
    Path(items[4].source).write_bytes(b"not an image")
    write_page(
        render_page(*build_model_report(explainer(), f"runs/{EVIL}", items, explained=2)), folder / "report #1?.html"
    )
    return folder / "report #1?.html"


def titles(rendered: RenderedPage) -> list[str]:
    found = [re.match(r"Figure \d+\. (.*?)\. ?(?=[^.])", each.caption) for each in rendered.figures]
    return [each.group(1) for each in found if each]


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light"), (360, "light")])
def test_complete_report(browser: "Browser", page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    rendered = open_in_browser(browser, page, width=width, scheme=scheme)
    assert find_page_faults(rendered, figures=2 + len(ALL)) == []
    first, second, *others = titles(rendered)
    assert all(each.startswith("What the model looked at for ") for each in (first, second))
    assert [each.caption.split("%). ")[1].split(": predicted ")[0] for each in rendered.figures[:2]] == [
        f"{n}{EVIL_NAME}" for n in (0, 3)
    ]
    assert others == [*ALL]
    assert rendered.text.count("Bright: the patches that it looked at for this class.") == 1, "said once"
    assert len({round(each.width) for each in rendered.figures}) == 1, "one width for all figures"
    assert (sum(rendered.background) < 150) == (scheme == "dark")


def test_malicious_names_are_escaped(browser: "Browser", page: Path) -> None:
    rendered = open_in_browser(browser, page, width=1200, scheme="light")
    lines = rendered.text.splitlines()
    assert lines[0] == "script>", "the last part of the path runs/<script>alert(1)</script>"
    (row,) = [line.split("\t") for line in lines if line.startswith(f"0{EVIL_NAME}\t")]
    assert row[1] == EVIL
    names = {cell.rpartition(" ")[0] for cell in row[2:]}
    assert names <= {EVIL, LABELS[1], LABELS[2], "蜂\\u202e\\x00"}
    assert len(names) == 3
    assert sum(float(cell.rpartition(" ")[2][:-1]) for cell in row[2:]) <= 100
    last = rendered.text.split("Not included")[-1]
    assert last.count(f"4{EVIL_NAME}' is not an image") == 1, "reported once, though it was read twice"
    assert "Figures use 4 images." in rendered.text


def test_contents_of_the_report(tmp_path: Path) -> None:
    subject, steps = explainer(), list[int]()
    title, lead, sections = build_model_report(
        subject, "runs/demo/", photos(tmp_path / "a", 7), explained=3, progress=steps.append
    )
    assert title == "demo"
    assert lead.startswith("DeiT, 0.0 million parameters, images of 32×32 pixels, 4 classes. Figures use 7 images.")
    assert steps == [1] * (3 + 7)
    assert [each.title for each in sections] == [
        "Model",
        "Predictions",
        "What the model looked at",
        "Attention distance",
        "Occlusion check",
        "Patch features",
        "Position embeddings",
        "First-layer filters",
        "Tokens by layer",
        "Layers",
    ]
    _, predictions, maps, *_, summary = sections
    assert predictions.table is not None
    heading, rows, alignments = predictions.table
    assert len(heading) == len(alignments) == 5
    assert [row[0] for row in rows] == [f"{n}{EVIL_NAME}" for n in (0, 2, 3)], "of different classes"
    assert [row[1] for row in rows] == [LABELS[0], LABELS[2], LABELS[3]]
    predictor = vitrail.Predictor(subject.model, preprocessing=subject.loaded.preprocessing, labels=LABELS)
    for row in rows:
        likeliest, *_ = predictor.predict(tmp_path / "a" / row[0]).top
        assert row[2].endswith(f" {likeliest.probability:.1%}")
    assert [figure.name.rpartition(".")[2] for figure in maps.figures] == ["grad-rollout"] * 3
    assert "blocks" in summary.preformatted


def test_without_a_head(tmp_path: Path) -> None:
    subject = explainer("vit_tiny_patch16_224", classes=0, positions="rotary")
    _, lead, sections = build_model_report(subject, "model", photos(tmp_path / "a", 2))
    assert "without a head" in lead
    names = [figure.name.rpartition(".")[2] for section in sections for figure in section.figures]
    assert names == [
        *("rollout", "rollout", "heads", "heads", "neighbors", "attention_distance", "patch_pca", "filters"),
        "token_norms",
    ]
    assert "Predictions" not in [each.title for each in sections]
    missing = sections[-1]
    assert missing.title == "Not included"
    assert [each.split(":")[0] for each in missing.text.split("\n\n")] == [
        "position similarity",
        "similarity of layers",
        "occlusion check",
    ]


@pytest.mark.parametrize("explained", [0, 6])
def test_without_images(explained: int) -> None:
    _, lead, sections = build_model_report(explainer(), "model", explained=explained)
    assert "Figures over" not in lead
    assert [figure.name for section in sections for figure in section.figures] == ["position_similarity", "filters"]
    assert sections[-1].text.startswith("no images were given: ")


def test_fewer_classes_than_columns(tmp_path: Path) -> None:
    model = add_weight_noise(
        vitrail.create("vit_tiny_patch16_224", image_size=32, depth=1, width=16, heads=2, classes=2), std=0.3
    )
    subject = Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32))
    (photo,) = photos(tmp_path / "a", 1)
    _, _, sections = build_model_report(subject, "model", [ImageItem(photo.source, photo.name)])
    table = sections[1].table
    assert table is not None
    ((name, label, first, second, third),) = table[1]
    assert (name, label, third) == (f"0{EVIL_NAME}", "", "")
    assert {first.rpartition(" ")[0], second.rpartition(" ")[0]} == {"class 0", "class 1"}
