"""The page of wrong predictions in a browser: legible in light and dark, on a phone too, with any names."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from support.browser_pages import find_page_faults, open_in_browser
from support.saved_models import write_model_folder
from support.toy_datasets import write_class_folders

from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.evaluation_data import open_labeled_images
from vitrail.opening import open_torch_model
from vitrail.report.evaluation_report import render_wrong_page
from vitrail.report.html_page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LABELS = ("<script>alert(1)<|script>", "a_very_long_class_name_without_a_break_" * 3, "bees & <b>wasps")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    loaded = open_torch_model(write_model_folder(folder / "model", labels=LABELS, patch_size=16))
    found = open_labeled_images(loaded, str(write_class_folders(folder / "photos", **dict.fromkeys(LABELS, 4))))
    result = evaluate(loaded, found.images, mapping=found.mapping)
    assert 3 < len(result.wrong) < 12
    write_page(render_wrong_page(result, loaded, found.name, found.images), folder / "wrong.html")
    return folder / "wrong.html"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light"), (360, "light")])
def test_page_in_a_browser(browser: "Browser", page: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    rendered = open_in_browser(browser, page, width=width, scheme=scheme)
    assert find_page_faults(rendered, figures=0) == []
    assert (sum(rendered.background) < 150) == (scheme == "dark")
    assert rendered.text.count("✗ Wrong. It said") == rendered.text.count("It is") > 3
    assert LABELS[0] in rendered.text
