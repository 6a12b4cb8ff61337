"""vitrail look on the command line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saved_models import write_convnet_folder, write_model_folder, write_run_folder
from support.toy_datasets import write_class_folders, write_image

from vitrail.base.figures import CaptionedFigure
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.model_figures import look
from vitrail.opening import Opened

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

Run = Callable[..., Any]
WEIGHT_FIGURES = ("position_similarity", "filters")
NAMES = (
    *WEIGHT_FIGURES,
    "attention_distance",
    "token_norms",
    "token_similarity",
    "alignment",
    "occlusion",
    "patch_pca",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(
        tmp_path_factory.mktemp("models") / "model", patch_size=32
    )  # drawing a single patch is fast


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder without classes."""
    for number in range(9):
        write_image(tmp_path / "photos" / f"{number}.png", number)
    return tmp_path / "photos"


@pytest.fixture
def skip_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing is slow, and covered by one of the tests."""
    monkeypatch.setattr(CaptionedFigure, "save", lambda self, folder, *_, **__: [folder / self.name])  # pyright: ignore[reportUnknownLambdaType]


def list_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_all_figures_and_formats(vitrail_: Run, photos: Path, tmp_path: Path) -> None:
    distilled, out = (
        write_model_folder(tmp_path / "distilled", "deit_tiny_distilled_patch16_224"),
        tmp_path / "new" / "out",
    )
    result = vitrail_("look", distilled, "--data", photos, "--images", 4, "-o", out, "--svg", "--arrays")
    assert (result.code, result.err) == (0, "")
    assert list_names(out) == {f"{name}{kind}" for name in NAMES for kind in (".png", ".svg", ".npz")}
    lines = result.out.splitlines()
    assert len(lines) == len(NAMES)
    for name, line in zip(NAMES, lines, strict=True):
        start = ", ".join(str(out / f"{name}{kind}") for kind in (".png", ".svg", ".npz"))
        assert line.startswith(f"{start}: ")
        assert line.endswith(".")
    four = look(Explainer(distilled), [photos / f"{number}.png" for number in (0, 3, 5, 8)])
    with np.load(out / "attention_distance.npz") as found:
        expected = four["attention_distance"].arrays["distances"]
        np.testing.assert_allclose(found["distances"], expected, rtol=1e-5)


def test_figures_of_weights_without_images(vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example photos are the default for models of RGB only."""
    monkeypatch.chdir(tmp_path)
    result = vitrail_("look", write_model_folder(tmp_path / "gray", patch_size=32, channels=1))
    assert result.code == 0
    assert list_names(tmp_path / "look") == {f"{name}.png" for name in WEIGHT_FIGURES}
    first, second = result.err.splitlines()
    assert first == "vitrail: note: no --data, so no images"
    assert second.startswith("vitrail: note: no images were given: attention distance, ")


@pytest.mark.usefixtures("skip_drawing")
def test_run_uses_its_held_out_images(vitrail_: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_class_folders(tmp_path / "data", ants=4, bees=4, cats=4)
    run, seen = write_run_folder(tmp_path / "run", data, patch_size=32), list[str]()
    plain = Explainer.__init__

    class SpiedModel(Opened):
        def make_batch(self, photos: Any) -> Any:
            seen.extend(map(str, photos))
            return super().make_batch(photos)

    def spy(self: Explainer, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        self.loaded = SpiedModel(**vars(self.loaded))

    monkeypatch.setattr(Explainer, "__init__", spy)
    result = vitrail_("look", run, "-o", tmp_path / "out", "--images", 99)
    assert result.code == 0
    assert result.err == "vitrail: note: data: 6 of 12 images held out for validation, by seed 3\n"
    assert len(seen) == 6
    assert {Path(each).parent.name for each in seen} == {"ants", "bees", "cats"}


@pytest.mark.usefixtures("skip_drawing")
def test_unreadable_images_are_skipped_with_a_note(vitrail_: Run, model: Path, photos: Path, tmp_path: Path) -> None:
    (photos / "5.png").write_bytes(b"not an image")
    result = vitrail_("look", model, "--data", photos, "-o", tmp_path / "out")
    assert result.code == 0
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"vitrail: note: '{photos / '5.png'}' is not an image; expected JPEG")
    assert "over 8 images" in result.out


BAD = {
    "--images 0": "--images 0; expected at least 1",
    "--images -5": "--images -5; expected at least 1",
    "--batch 0": "--batch 0; expected at least 1",
    "--data nowhere": "'nowhere' does not exist; expected 'fashion'",
    "--data empty": "empty has no images; expected ",
    "--device gpu": "--device gpu is not a device. Use cpu, cuda",
    "-o photos/0.png": "cannot make the folder photos/0.png: ",
    "-o photos/0.png/inside": "cannot make the folder photos/0.png/inside: ",
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("words", BAD)
def test_invalid_options_are_one_line_errors(
    vitrail_: Run, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    data = () if "--data" in words else ("--data", photos)
    result = vitrail_("look", model, *data, *words.split())
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"vitrail: {BAD[words]}")


def test_invalid_models_are_one_line_errors(
    vitrail_: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, message in (
        (tmp_path / "nowhere", f"{tmp_path / 'nowhere'} does not exist; expected a checkpoint"),
        (write_convnet_folder(tmp_path / "convnet"), "ResNet has no attention maps: it has no attention; expected"),
    ):
        result = vitrail_("look", name)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert result.err.startswith(f"vitrail: {message}")
    assert not (tmp_path / "look").exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = vitrail_("look", model)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.endswith("needs matplotlib, which is not installed; run: pip install matplotlib\n")
