"""vitrail explain on the command line."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.saved_models import LABELS, write_convnet_folder, write_model_folder
from support.toy_datasets import random_array, write_image

import vitrail
from vitrail.inspection.explain.explainer import Explainer

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

Run = Callable[..., Any]


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(random_array(40, 60, 3)).save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def test_one_photo(vitrail_: Run, model: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = vitrail_("explain", model, photo.name)
    (top_class,) = Explainer(model).explain(photo).prediction.top[:1]  # pyright: ignore[reportOptionalMemberAccess]
    assert result == (
        0,
        f"photo.jpg: {top_class.label} {top_class.probability:.1%}, explained/photo.grad-rollout.png\n",
        "",
    )
    assert [path.name for path in (tmp_path / "explained").iterdir()] == ["photo.grad-rollout.png"]
    with Image.open(tmp_path / "explained" / "photo.grad-rollout.png") as drawn:
        assert drawn.format == "PNG"
        assert drawn.width > drawn.height, "the aspect ratio of the photo"


def test_all_layers_and_heads_as_figures_arrays_and_json(
    vitrail_: Run, model: Path, photo: Path, tmp_path: Path
) -> None:
    words = ("--method", "attention", "--layer", "all", "--head", "all", "--svg", "--arrays", "--json")
    result = vitrail_("explain", model, photo, "-o", tmp_path / "out", *words)
    assert (result.code, result.err) == (0, "")
    (found,) = json.loads(result.out)
    names = [f"photo.attention{kind}" for kind in (".png", ".svg", ".npz")]
    assert found["written"] == [str(tmp_path / "out" / name) for name in names]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)
    assert (found["image"], found["method"]) == (str(photo), "attention")
    assert [each["label"] for each in found["top"]] == [LABELS[each["index"]] for each in found["top"]]
    assert sum(each["probability"] for each in found["top"]) == pytest.approx(1, abs=1e-5)
    assert found["asked"] == {**found["top"][0], "name": found["top"][0]["label"]}
    with np.load(tmp_path / "out" / "photo.attention.npz") as arrays:
        assert arrays["maps"].shape == (2, 2, 2, 2)
        np.testing.assert_allclose(arrays["maps"].sum((-2, -1)), 1, rtol=1e-5)
        expected = Explainer(model).explain(photo, "attention", layer="all", head="all").maps
        np.testing.assert_allclose(arrays["maps"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--layer", "-1"), {"layer": -1}),
        (("--layer=-2", "--head=1"), {"layer": 0, "head": 1}),
        (("--head", "-1"), {"head": 1}),
        (("--head", "max", "--discard", "0.5"), {"head": "max", "discard": 0.5}),
        (("--class", "ants"), {"of_class": 0}),
        (("--from", "0,1"), {"token": "0,1"}),
        (("--token", "class"), {"token": "class"}),
    ],
)
def test_options_reach_the_explainer(
    vitrail_: Run, model: Path, photo: Path, tmp_path: Path, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    result = vitrail_("explain", model, photo, "-o", tmp_path / "out", "--arrays", *words)
    assert (result.code, result.err) == (0, "")
    method = "rollout" if "head" in options else "grad-rollout"
    with np.load(tmp_path / "out" / f"photo.{method}.npz") as arrays:
        np.testing.assert_allclose(arrays["maps"], Explainer(model).explain(photo, **options).maps, rtol=1e-5)


def test_class_and_check(vitrail_: Run, model: Path, photo: Path, tmp_path: Path) -> None:
    words = ("explain", model, photo, "--method", "grad-rollout", "-o", tmp_path, "--overwrite", "--check", "--class")
    by_name, by_number = vitrail_(*words, "cats"), vitrail_(*words, 2)
    assert by_name == by_number
    assert by_name.out.startswith(f"{photo}: cats ")
    assert "%; without the 30% most attended patches " in by_name.out.replace(".png", "%")
    (found,) = json.loads(vitrail_(*words, "cats", "--json").out)
    assert (found["asked"]["index"], found["asked"]["name"]) == (2, "cats")
    assert found["check"]["as_it_is"] == found["asked"]["probability"]
    assert set(found["check"]) == {"as_it_is", "without_most", "without_least"}
    assert len(set(found["check"].values())) == 3


def test_labels_from_a_file(vitrail_: Run, model: Path, photo: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("one\ntwo\nthree\n")
    result = vitrail_("explain", model, photo, "-o", tmp_path, "--labels", labels, "--json")
    assert {each["label"] for each in json.loads(result.out)[0]["top"]} == {"one", "two", "three"}
    labels.write_text("n01440764 tench, Tinca tinca\nn02206856 bee\nn02219486\n")  # the format of ImageNet's lists
    for given, name in (("bee", "bee"), ("Tinca Tinca", "tench"), ("n02206856 bee", "bee"), ("n02219486", "n02219486")):
        result = vitrail_(
            "explain", model, photo, "-o", tmp_path / given, "--labels", labels, "--json", "--class", given
        )
        assert json.loads(result.out)[0]["asked"]["name"] == name


def test_unusual_file_names(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    """Spaces, quotes, other scripts, names of maximum length, and equal names."""
    stems = ("my photo", "蜂 и ants", "a\"b'c $x$", "100%", "x" * 240, "-o")
    names = [str(write_image(tmp_path / "one" / f"{stem}.png")) for stem in stems]
    names += [str(write_image(tmp_path / folder / "my photo.png", 7)) for folder in ("two", "three")]
    result = vitrail_("explain", model, *names, "-o", tmp_path / "out", "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [each["image"] for each in found] == names
    written = [Path(path).name for each in found for path in each["written"]]
    expected = [f"{stem[:180]}.grad-rollout.png" for stem in stems]
    assert written == [*expected, "my photo.grad-rollout-2.png", "my photo.grad-rollout-3.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(written)


def test_one_line_per_photo_for_any_name(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    name = write_image(tmp_path / "two\nlines \x1b[31m.png")
    result = vitrail_("explain", model, name, "-o", tmp_path / "out")
    assert len(result.out.splitlines()) == 1
    assert r"two\nlines \x1b[31m.grad-rollout.png" in result.out
    assert (tmp_path / "out" / "two\nlines \x1b[31m.grad-rollout.png").exists()


def test_folder_includes_its_subfolders(vitrail_: Run, model: Path, tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "deeper/c.png"):
        write_image(tmp_path / "photos" / name)
    result = vitrail_("explain", model, tmp_path / "photos", "-o", tmp_path / "out")
    assert result.code == 0
    assert [Path(each.split(":")[0]).name for each in result.out.splitlines()] == ["a.png", "b.png", "c.png"]


def test_unreadable_images_are_named_and_the_others_explained(
    vitrail_: Run, model: Path, photo: Path, tmp_path: Path
) -> None:
    broken, nowhere, out = tmp_path / "broken.jpg", tmp_path / "nowhere.jpg", tmp_path / "out"
    broken.write_bytes(photo.read_bytes()[:200])
    result = vitrail_("explain", model, broken, photo, nowhere, "-o", out)
    assert result.code == 2
    assert result.out.startswith(f"{photo}: ")
    assert [path.name for path in out.iterdir()] == ["photo.grad-rollout.png"]
    first, second, last = result.err.splitlines()
    assert first.startswith(f"vitrail: '{broken}' cannot be read: ")
    assert second == f"vitrail: '{nowhere}' does not exist; expected an image"
    assert last == f"vitrail: 2 of 3 images could not be read; the results of the others are in {out}"
    result = vitrail_("explain", model, broken, photo, "-o", out, "--json", "--overwrite")
    assert (result.code, len(json.loads(result.out))) == (2, 1)
    result = vitrail_("explain", model, broken, nowhere, "-o", out)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("vitrail: 2 of 2 images could not be read\n")
    result = vitrail_("explain", model, nowhere, "-o", out)
    assert result == (2, "", f"vitrail: '{nowhere}' does not exist; expected an image\n")


def test_image_of_extreme_aspect_ratio_is_named(vitrail_: Run, model: Path, photo: Path, tmp_path: Path) -> None:
    thin = tmp_path / "thin.png"
    Image.new("RGB", (1, 60_000)).save(thin)
    result = vitrail_("explain", model, thin, photo, "x" * 300, "-o", tmp_path)
    assert result.code == 2
    first, second, last = result.err.splitlines()
    assert first.startswith(f"vitrail: '{thin}': an image of 60000×1 pixels would be resized to ")
    assert second.endswith("x' cannot be read: File name too long; expected a complete and readable image")
    assert last.startswith("vitrail: 2 of 3 images could not be read; the results of the others are in ")


def test_empty_map_is_reported(vitrail_: Run, photo: Path, tmp_path: Path) -> None:
    """An untrained head returns the same logits for every image."""
    model = vitrail.create("ViT-Ti/16", image_size=32, depth=2, width=16, heads=2, classes=3)
    vitrail.save(model, tmp_path / "untrained", preprocessing=vitrail.Preprocessing(image_size=32))
    result = vitrail_("explain", tmp_path / "untrained", photo, "-o", tmp_path, "--method", "grad-rollout", "--check")
    assert result.code == 0
    expected = f"{photo}: no attention contributes to the class, so the map is 0 everywhere; a check means nothing"
    assert result.err == f"vitrail: note: {expected}\n"
    explanation = Explainer(model, preprocessing=vitrail.Preprocessing()).explain(photo, "grad-rollout")
    assert explanation.is_empty
    assert explanation.figure.title.startswith("Nothing that the model looked at supports class 0 (")
    assert not Explainer(model, preprocessing=vitrail.Preprocessing()).explain(photo, "rollout").is_empty


def test_image_from_standard_input(model: Path, photo: Path, tmp_path: Path) -> None:
    words = ("explain", str(model), "-", "-o", str(tmp_path), "--check", "--json")
    command = [sys.executable, "-m", "vitrail", *words]
    with subprocess.Popen(["cat", str(photo)], stdout=subprocess.PIPE) as cat:
        done = subprocess.run(command, stdin=cat.stdout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)[0]["check"]) == {"as_it_is", "without_most", "without_least"}


def test_model_without_a_head(vitrail_: Run, photo: Path, tmp_path: Path) -> None:
    headless = write_model_folder(tmp_path / "headless", labels=None)
    result = vitrail_("explain", headless, photo, "-o", tmp_path / "out")
    written = [tmp_path / "out" / f"photo.{method}.png" for method in ("rollout", "heads", "pca")]
    assert result == (0, "".join(f"{photo}: {path}\n" for path in written), "")
    found = json.loads(vitrail_("explain", headless, photo, "-o", tmp_path / "out", "--json", "--overwrite").out)
    assert [each["method"] for each in found] == ["rollout", "heads", "pca"]
    assert [(each["asked"], each["top"]) for each in found[:2]] == [(None, [])] * 2
    for words, message in (
        (("--check",), "--check needs a model with classes; this one has no head"),
        (("--class", "0"), "class '0' needs a model with classes"),
        (("--method", "grad-rollout"), "method 'grad-rollout' needs a model with classes, "),
    ):
        result = vitrail_("explain", headless, photo, "-o", tmp_path / "out", *words)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert result.err.startswith(f"vitrail: {message}")


BAD = {
    "--layer 2": "layer is 2; expected 0 to 1, or -1 for the last: there are 2",
    "--layer -3": "layer is -3; expected 0 to 1, or -1 for the last: there are 2",
    "--layer last": "layer is 'last'; expected a number, or all",
    "--head 2": "head is 2; expected 0 to 1, or -1 for the last: there are 2",
    "--head 0.5": "head is '0.5'; expected a number, or mean, max, min, all",
    "--from 2,0": "token is '2,0'; expected one of head, class, or a patch as row,column from 0,0 to 1,1",
    "--from distill": "token is 'distill'; expected one of head, class, or a patch as row,column from 0,0 to 1,1",
    "--class 3": "class is 3; expected 0 to 2: there are 3",
    "--class -1": "class is -1; expected 0 to 2: there are 3",
    "--class bee": "unknown class 'bee'; did you mean 'bees'?",
    "--class dogs": "unknown class 'dogs'; ",
    "--discard 1": "discard is 1.0; expected 0 or more, and less than 1",
    "--method pool": "method 'pool' needs a model with attention pooling",
    "--method attention --discard 0.5": "discard 0.5 cannot be combined with method 'attention'",
    "--method norms --check": "--check with --method norms, which is not attention; use another method",
    "--method attention --head all --check": "--check of all layers or heads; choose one --layer and one --head",
    "--method gradcam": "--method 'gradcam' is not one of",
    "--labels nowhere.txt": "--labels nowhere.txt cannot be read: ",
    "--device gpu": "--device gpu is not a device. Use cpu, cuda",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_options_are_one_line_errors(
    vitrail_: Run, model: Path, photo: Path, tmp_path: Path, words: str
) -> None:
    result = vitrail_("explain", model, photo, "-o", tmp_path / "out", *words.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"vitrail: {BAD[words]}")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_work")
def test_invalid_paths_are_one_line_errors(
    vitrail_: Run, model: Path, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convnet = write_convnet_folder(tmp_path / "convnet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "labels.txt").write_text("one\n")
    out = ("-o", tmp_path / "out")
    for words, message in (
        ((tmp_path / "nowhere", photo, *out), f"{tmp_path / 'nowhere'} does not exist; expected a checkpoint"),
        ((convnet, photo, *out), "ResNet has no attention maps: it has no attention; expected"),
        (("timm:vit_tiny", photo, *out), "timm:vit_tiny runs timm's code, whose layers differ; use its"),
        ((model, *out), "no images; expected files, folders or example:cat"),
        (
            (model, tmp_path / "empty", *out),
            f"'{tmp_path / 'empty'}' has no images; expected some in it or its subfolders",
        ),
        ((model, photo, *out, "--labels", tmp_path / "labels.txt"), "1 labels for 3 classes; expected one per class"),
        ((model, photo, "-o", photo), f"-o {photo}; expected a page (.html), one figure (.png, "),
        ((model, photo, "-o", photo / "inside"), f"cannot make the folder {photo / 'inside'}: "),
    ):
        result = vitrail_("explain", *words)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert result.err.startswith(f"vitrail: {message}")
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = vitrail_("explain", model, photo, *out)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.endswith("needs matplotlib, which is not installed; run: pip install matplotlib\n")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root writes to")
def test_unwritable_folder_is_a_one_line_error(vitrail_: Run, model: Path, photo: Path) -> None:
    result = vitrail_("explain", model, photo, "-o", "/proc/self")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("vitrail: cannot write in /proc/self: ")


def test_progress_bar_on_a_terminal(model: Path, tmp_path: Path) -> None:
    """A progress bar is shown, and redirected output stays redirected."""
    photos = [write_image(tmp_path / f"{n}.png") for n in range(2)]
    program = "import sys; from vitrail.cli import main; sys.argv[0] = 'vitrail'; main()"
    command = [sys.executable, "-c", program, "explain", model, *photos, "-o", tmp_path / "out"]
    ours, theirs = pty.openpty()
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=theirs, check=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode("utf-8", "replace")
    os.close(ours)
    assert "0/2" in shown
    assert "rollout.png" not in shown
    assert [each.split(":")[0] for each in done.stdout.decode().splitlines()] == [str(photo) for photo in photos]


def test_check_needs_one_map(vitrail_: Run, tmp_path: Path) -> None:
    linear = write_model_folder(tmp_path / "linear", "linformer_tiny_patch16_224", projected=4)
    result = vitrail_("explain", linear, "photo.jpg", "--check")
    why = "its keys are mixtures of all tokens, so there are no weights per token"
    assert (result.code, result.err) == (
        2,
        f"vitrail: --check needs attention maps, and there are none: {why}\n",
    )


def test_a_name_of_a_page_is_one_page_with_the_check(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    done = vitrail_("explain", model, photos, "-o", "why.html")
    assert (done.code, done.err) == (0, "")
    assert all(", why.html; without the 30% most " in line for line in done.out.splitlines())
    assert Path("why.html").is_file()
    page = Path("why.html").read_text("utf-8")
    assert page.count("<figure ") == len(done.out.splitlines()) == 4
    assert f"<h1>What {model.name} looked at</h1>" in page
    assert (
        page.count("Bright: the patches that it looked at for this class. Outlined: the strongest 5% of them. ") == 1
    ), "not per figure"
    assert "Gradient rollout over 2 layers." in page
    assert (
        len(set(re.findall(r"What the model looked at for \w+ \([\d.]+%\)\.</b> (\d)\.(?:png|jpg): pred", page))) == 3
    )
    assert page.count("Check: without the 30% of the patches that it looked at most, ") == 2 * 4, "text and alternative"
    again = vitrail_("explain", model, photos, "-o", "why.html")
    assert (again.code, again.out) == (2, "")
    assert again.err.startswith("vitrail: why.html already exists; use --overwrite")


@pytest.mark.parametrize("words", ["--method heads", "--method norms", "--layer all", "--method pca"])
def test_a_page_of_maps_without_a_check(vitrail_: Run, model: Path, photo: Path, tmp_path: Path, words: str) -> None:
    done = vitrail_("explain", model, photo, "-o", tmp_path / "why.htm", *words.split())
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("why.htm\n")
    page = (tmp_path / "why.htm").read_text("utf-8")
    assert (page.count("<figure "), page.count("Check: ")) == (1, 0)


def test_a_name_of_an_image_is_one_figure(vitrail_: Run, model: Path, photo: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "why.png"
    done = vitrail_("explain", model, photo, "-o", out, "--svg", "--arrays")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(f", {out}, {out.with_suffix('.svg')}, {out.with_suffix('.npz')}\n")
    assert sorted(path.name for path in out.parent.iterdir()) == ["why.npz", "why.png", "why.svg"]
    with Image.open(out) as drawn:
        assert drawn.info["Title"].startswith("What the model looked at for ")
        assert drawn.info["Description"].startswith("Bright: the patches that it looked at for this class. ")
    headless = write_model_folder(tmp_path / "headless", classes=0, labels=None)
    assert vitrail_("explain", headless, photo, "-o", tmp_path / "one.png").out.endswith(f": {tmp_path / 'one.png'}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("photos -o why.png", "why.png is one figure, but there are 4; use why.html for one page, or a folder"),
        ("photos -o why.jpg", "-o why.jpg; expected a page (.html), one figure (.png, .svg, .pdf), or a folder"),
        ("photos -o why.csv", "-o why.csv; expected a page (.html), one figure (.png, .svg, .pdf), or a folder"),
        (
            "photos -o why.html --arrays",
            "--arrays with the page why.html, which is a single file; expected a folder, such as -o why",
        ),
        (
            "photos -o old.html",
            "-o old.html is a folder; expected the name of a new file, or of a folder without .html",
        ),
    ],
)
def test_names_that_cannot_be_written(
    vitrail_: Run, model: Path, photos: Path, tmp_path: Path, words: str, message: str, no_work: None
) -> None:
    (tmp_path / "old.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = vitrail_("explain", model, *words.split())
    assert (done.code, done.out, done.err) == (2, "", f"vitrail: {message}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_page_has_a_limit(
    vitrail_: Run, model: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, no_work: None
) -> None:
    monkeypatch.setattr("vitrail.report.html_page.MAX_PAGE_FIGURES", 3)
    done = vitrail_("explain", model, photos, "-o", "why.html")
    message = "why.html for 4 figures; expected at most 3 on a page: use a folder"
    assert (done.code, done.out, done.err) == (2, "", f"vitrail: {message}\n")


def test_a_folder_may_have_a_dot_in_its_name(vitrail_: Run, model: Path, photo: Path, tmp_path: Path) -> None:
    assert vitrail_("explain", model, photo, "-o", tmp_path / "maps.v2").code == 0
    assert [path.name for path in (tmp_path / "maps.v2").iterdir()] == ["photo.grad-rollout.png"]
