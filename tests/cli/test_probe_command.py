"""vitrail probe on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.saved_models import write_model_folder
from support.toy_datasets import write_class_folders

from vitrail.study.transfer_suite import select_published_columns

Run = Callable[..., Any]
FAST = ("--knn", "1,5", "--shots", "1,2", "--seeds", "2", "--no-linear")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and images in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    write_model_folder(tmp_path / "model")
    write_class_folders(tmp_path / "photos", ants=12, bees=12)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_table_json_and_files(vitrail_: Run) -> None:
    done = vitrail_("probe", "model", "--data", "photos", *FAST)
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert done.err.startswith("vitrail: note: photos: 4 of 24 images held out for validation")
    for word in (
        "photos: 4 images of 2 classes",
        "k-NN 1",
        "2-shot",
        "\nraw pixels ",
        "\nuntrained ",
        "\nover the better",
    ):
        assert word in done.out
    assert "linear" not in done.out
    printed = json.loads(vitrail_("probe", "model", "--data", "photos", *FAST, "--json").out)
    assert printed["models"] == ["model"]
    assert printed["tables"][0]["rows"][0]["few_shot"]["2"]["seeds"]
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    done = vitrail_("probe", "model", "--data", "photos", *FAST, "-o", "results")
    assert done.out.endswith("\nwritten: results/probe.json, results/probe.png\n")
    written = json.loads(Path("results/probe.json").read_text("utf-8"))
    assert {**written, "seconds": 0} == {**printed, "seconds": 0}
    done = vitrail_("probe", "model", "--data", "photos", *FAST, "-o", "results")
    assert (done.code, done.err.startswith("vitrail: results/probe.json already exists")) == (2, True)


@pytest.mark.usefixtures("folder")
def test_names_of_classes_cannot_control_the_terminal(vitrail_: Run) -> None:
    write_class_folders(Path("others"), **{"\x1b[31mred": 12, "bees": 12})
    done = vitrail_("probe", "model", "--data", "others", "--knn", "1", "--no-linear", "--no-untrained")
    assert "\x1b" not in done.out + done.err
    assert "x1b[31mred" in done.err


@pytest.mark.usefixtures("folder")
def test_several_data_sets_without_baselines(vitrail_: Run) -> None:
    words = ("--data", "photos", "--data", "photos", "--no-pixels", "--no-untrained", "--layer", "middle")
    done = vitrail_("probe", "model", *words, *FAST)
    assert done.code == 0
    assert "mean of 2 data sets" in done.out
    assert "raw pixels" not in done.out
    assert "baseline" not in done.out


@pytest.mark.usefixtures("folder")
def test_errors_name_the_option(vitrail_: Run) -> None:
    for words, message in (
        (("--knn", "30"), "--knn 30 for photos, which has 20 training images; use 20 or less"),
        (("--knn", "ten"), "--knn 'ten'; expected whole numbers"),
        (("--shots", "11"), "--shots 11 for photos, but ants has 10"),
        (("--seeds", "0"), "--seeds 0; expected at least 1"),
        (("--bank", "0"), "--examples 0; expected at least 1"),
        (("--layer", "9"), "--layer is 9; expected middle, last"),
        (("--layer", "first"), "--layer 'first'; expected last, middle"),
        (("--val-share", "2"), "from 0 to 1"),
        (("--data", "nowhere"), "'nowhere' does not exist"),
    ):
        done = vitrail_("probe", "model", "--data", "photos", *words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), words
        assert message in done.err
    assert "probe needs MODELS" in vitrail_("probe").err
    assert "no --data; expected" in vitrail_("probe", "model").err


@pytest.mark.usefixtures("folder")
def test_the_suite_is_every_downloaded_data_set(vitrail_: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    done = vitrail_("probe", "model", "--suite")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no data set of the suite is downloaded; expected some of them: vitrail data cifar10 cifar100" in done.err
    for part in ("train", "val"):
        write_class_folders(tmp_path / "data/imagenette/imagenette2-320" / part, n01440764=12, n02102040=12)
    (tmp_path / "data/multi30k").mkdir()  # sentences have no classes
    done = vitrail_("probe", "model", "--suite", *FAST)
    assert (done.code, done.out.count("images of 2 classes")) == (0, 1), done.err
    assert "vitrail: --suite with --data photos" in vitrail_("probe", "model", "--suite", "--data", "photos").err


def test_published_columns_are_those_of_the_data_sets() -> None:
    found = select_published_columns(["cifar10", "pets", "svhn"])
    assert found is not None
    assert [column.name for column in found.columns] == ["model", "Pets", "SVHN"]
    assert list(found.rows[0]) == ["ViT-H/14 (JFT)", 97.2, 88.9]
    assert select_published_columns(["cifar10"]) is None
