"""A model's report as a reader meets it: every figure drawn, nothing asked of anyone, evil names only shown."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from PIL import Image
from support.browser_pages import RenderedPage, find_page_faults, open_in_browser
from support.noisy_weights import add_weight_noise
from support.toy_datasets import random_array

import vitrail
from vitrail.data.image_items import ImageItem
from vitrail.inspection.explain import Explainer
from vitrail.report.html_page import render_page, write_page
from vitrail.report.model_report import build_model_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

EVIL = "<script>alert(1)</script>"
EVIL_NAME = '"><img src=x onerror=alert(1)>.png'
LABELS = (EVIL, "$\\frac{1}{$ bees & <b>wasps", "a_very_long_class_name_without_a_break_" * 4, "蜂\u202e\x00")
ALL = (
    "Mean attention distance",
    "Occlusion check",
    "Similarity of position embeddings",
    "Principal components of the first filters",
    "Norms of the tokens",
    "Similarity of class and distillation token",
    "Alignment of the layers",
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
    shown = photos(folder / "photos", 5)
    Path(shown[4].source).write_bytes(b"no picture")
    write_page(
        render_page(*build_model_report(explainer(), f"runs/{EVIL}", shown, explained=2)), folder / "report #1?.html"
    )
    return folder / "report #1?.html"


def titles(seen: RenderedPage) -> list[str]:
    found = [re.match(r"Figure \d+\. (.*?)\. ", each.caption) for each in seen.figures]
    return [each.group(1) for each in found if each]


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light"), (360, "light")])
def test_the_whole_report(browser: "Browser", page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    seen = open_in_browser(browser, page, width=width, scheme=scheme)
    assert find_page_faults(seen, figures=2 + len(ALL)) == []
    assert titles(seen) == [f"0{EVIL_NAME}: rollout", f"0{EVIL_NAME}: grad-rollout", *ALL]
    assert (sum(seen.background) < 150) == (scheme == "dark")


def test_evil_names_are_only_shown(browser: "Browser", page: Path) -> None:
    seen = open_in_browser(browser, page, width=1200, scheme="light")
    lines = seen.text.splitlines()
    assert lines[0] == "script>", "of runs/<script>alert(1)</script> the part behind the last stroke"
    (row,) = [line.split("\t") for line in lines if line.startswith(f"0{EVIL_NAME}\t")]
    assert row[1] == EVIL
    names = {cell.rpartition(" ")[0] for cell in row[2:]}
    assert names <= {EVIL, LABELS[1], LABELS[2], "蜂\\u202e\\x00"}
    assert len(names) == 3
    assert sum(float(cell.rpartition(" ")[2][:-1]) for cell in row[2:]) <= 100
    last = seen.text.split("What is not here")[-1]
    assert last.count(f"4{EVIL_NAME}' is not an image") == 1, "said once, though it was to be shown and looked at"
    assert "Seen with 4 pictures." in seen.text


def test_what_the_page_says(tmp_path: Path) -> None:
    subject, steps = explainer(), list[int]()
    title, lead, sections = build_model_report(
        subject, "runs/demo/", photos(tmp_path / "a", 7), explained=3, progress=steps.append
    )
    assert title == "demo"
    assert lead.startswith("DeiT, 0.0 million parameters, pictures of 32×32 pixels, 4 classes. Seen with 7 pictures.")
    assert steps == [1] * (3 + 7)
    assert [each.title for each in sections] == [
        "The model",
        "What it answers",
        "What it looks at",
        "How far it looks",
        "Does its attention mean anything?",
        "What it knows of places",
        "What its first filters see",
        "From layer to layer",
        "Layer by layer",
    ]
    _, answers, maps, *_, summary = sections
    assert answers.table is not None
    heading, rows, sides = answers.table
    assert len(heading) == len(sides) == 5
    assert [row[0] for row in rows] == [f"{n}{EVIL_NAME}" for n in (0, 3, 6)], "evenly from all"
    assert [row[1] for row in rows] == [LABELS[0], LABELS[3], LABELS[2]]
    predictor = vitrail.Predictor(subject.model, preprocessing=subject.loaded.preprocessing, labels=LABELS)
    for row in rows:
        likeliest, *_ = predictor.predict(tmp_path / "a" / row[0]).top
        assert row[2].endswith(f" {likeliest.probability:.1%}")
    assert [plate.name.rpartition(".")[2] for plate in maps.figures] == ["rollout", "grad-rollout"] * 3
    assert "blocks" in summary.preformatted


def test_without_a_head(tmp_path: Path) -> None:
    subject = explainer("vit_tiny_patch16_224", classes=0, positions="rotary")
    _, lead, sections = build_model_report(subject, "model", photos(tmp_path / "a", 2))
    assert "without a head" in lead
    names = [plate.name.rpartition(".")[2] for section in sections for plate in section.figures]
    assert names == ["rollout", "rollout", "attention_distance", "filters", "token_norms"]
    assert "What it answers" not in [each.title for each in sections]
    missing = sections[-1]
    assert missing.title == "What is not here"
    assert [each.split(":")[0] for each in missing.text.split("\n\n")] == [
        "position similarity",
        "alignment of the layers",
        "occlusion check",
    ]


@pytest.mark.parametrize("explained", [0, 6])
def test_without_pictures(explained: int) -> None:
    _, lead, sections = build_model_report(explainer(), "model", explained=explained)
    assert "Seen" not in lead
    assert [plate.name for section in sections for plate in section.figures] == ["position_similarity", "filters"]
    assert sections[-1].text.startswith("no pictures were shown: ")


def test_fewer_classes_than_the_table_has_room_for(tmp_path: Path) -> None:
    model = add_weight_noise(
        vitrail.create("vit_tiny_patch16_224", image_size=32, depth=1, width=16, heads=2, classes=2), std=0.3
    )
    subject = Explainer(model, preprocessing=vitrail.Preprocessing(image_size=32))
    (picture,) = photos(tmp_path / "a", 1)
    _, _, sections = build_model_report(subject, "model", [ImageItem(picture.source, picture.name)])
    table = sections[1].table
    assert table is not None
    ((name, label, first, second, third),) = table[1]
    assert (name, label, third) == (f"0{EVIL_NAME}", "", "")
    assert {first.rpartition(" ")[0], second.rpartition(" ")[0]} == {"class 0", "class 1"}
