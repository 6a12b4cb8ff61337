"""vitrail report on the command line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.saved_models import write_convnet_folder, write_model_folder, write_run_folder
from support.toy_datasets import write_class_folders, write_image

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(
        tmp_path_factory.mktemp("models") / "model", patch_size=32
    )  # drawing a single patch is fast


@pytest.fixture(autouse=True)
def skip_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is slow, and covered by the tests of the page."""
    monkeypatch.setattr("vitrail.report.html_page.render_figure", "<figure id={1}>{0.title}</figure>".format)


def read_headings(page: str) -> list[str]:
    return re.findall(r"<h2[^>]*>([^<]+)<", page)


def read_prediction_rows(page: str) -> list[list[str]]:
    """The rows of the table of predictions."""
    table = page.split("Predictions</h2>")[1].split("</table>")[0]
    return [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]


def test_report_of_a_run(vitrail_: Run, tmp_path: Path) -> None:
    data = write_class_folders(tmp_path / "data", ants=4, bees=4, cats=4)
    run, out = write_run_folder(tmp_path / "demo", data, patch_size=32), tmp_path / "new" / "page.htm"
    result = vitrail_("report", run, "--images", 5, "--explained", 2, "-o", out)
    assert result.code == 0
    assert result.err == "vitrail: note: data: 6 of 12 images held out for validation, by seed 3\n"
    assert re.fullmatch(rf"{re.escape(str(out))}: \d\.\d MB, open it in a browser\n", result.out)
    assert [path.name for path in out.parent.iterdir()] == ["page.htm"]
    page = out.read_text("utf-8")
    assert "<title>demo</title>" in page
    assert "Figures use 5 images." in page
    assert read_headings(page)[:5] == [
        *("Results", "Accuracy per class", "Confusion and calibration", "Samples", "Training"),
    ]
    assert page.count("<figure") == 2 + 1 + 2 + 7, "confusion and calibration, samples, maps, model"
    assert sorted(row[1] for row in read_prediction_rows(page)) == ["ants", "cats"], "of different classes"
    accuracy = re.search(r"Top-1 accuracy (\d+\.\d+%) on 6 validation images of data\.", page)
    assert accuracy is not None
    assert f"<td>top-1 accuracy</td><td class=r>{accuracy[1]}</td>" in page
    assert all(
        re.fullmatch(r"(ants|bees|cats) \d+\.\d%", cell) for row in read_prediction_rows(page) for cell in row[2:]
    )


def test_folders_named_by_class_number(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    """Folder 2 has the model's class of index 2, cats, unless the model has a class named 2."""
    data = write_class_folders(tmp_path / "data", **{"1": 1, "2": 1})
    numbered = write_model_folder(tmp_path / "numbered", labels=("2", "1", "0"), patch_size=32)
    for subject, expected in ((model, ["bees", "cats"]), (numbered, ["1", "2"])):
        assert vitrail_("report", subject, "--data", data, "-o", tmp_path / "page.html", "--overwrite").code == 0
        assert [row[1] for row in read_prediction_rows((tmp_path / "page.html").read_text("utf-8"))] == expected


def test_report_without_images(vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = vitrail_("report", write_model_folder(tmp_path / "gray", patch_size=32, channels=1))
    assert result.code == 0
    assert result.err == "vitrail: note: no --data, so no images\n"
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("<figure") == 2
    assert read_headings(page)[-1] == "Not included"


def test_unreadable_images_are_skipped_with_a_note(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    photos = write_image(tmp_path / "photos" / "good.png").parent
    (photos / "broken <b>.png").write_bytes(b"not an image")
    result = vitrail_("report", model, "--data", photos, "-o", tmp_path / "page.html", "--explained", 2)
    assert result.code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert len(read_prediction_rows(page)) == 1
    assert page.count("broken &lt;b&gt;.png&#x27; is not an image") == 1
    assert "Figures use 1 image." in page


BAD = {
    "-o report.txt": "--out report.txt; expected a file name that ends in .html",
    "-o report": "--out report; expected a file name that ends in .html",
    "-o photos/0.png/report.html": "cannot make the folder photos/0.png: ",
    "-o folder.html": "--out folder.html is a folder; expected the name of a file",
    "--images 0": "--images 0; expected at least 1",
    "--explained -1": "--explained -1; expected at least 0",
    "--batch 0": "--batch 0; expected at least 1",
    "--data empty": "empty has no images; expected ",
    "--data nowhere": "'nowhere' does not exist; expected 'fashion'",
    "--labels labels.txt": "1 labels for 3 classes; expected one per class",
    "--labels photos": "--labels photos cannot be read: ",
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("words", BAD)
def test_invalid_options_are_one_line_errors(
    vitrail_: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    write_image(tmp_path / "photos" / "0.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "labels.txt").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    data = () if "--data" in words else ("--data", "photos")
    result = vitrail_("report", model, *data, *words.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"vitrail: {BAD[words]}")
    assert not (tmp_path / "report.html").exists()


def test_invalid_models_are_one_line_errors(vitrail_: Run, tmp_path: Path) -> None:
    for name, message in (
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist; expected a checkpoint"),
        (write_convnet_folder(tmp_path / "convnet"), "ResNet has no attention maps: it has no attention; expected"),
    ):
        result = vitrail_("report", name, "-o", tmp_path / "new" / "page.html")
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert result.err.startswith(f"vitrail: {message}")
    assert not (tmp_path / "new").exists()
