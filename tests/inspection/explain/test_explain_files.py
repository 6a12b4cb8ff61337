"""Explaining images into files from Python, with the occlusion check."""

from pathlib import Path

import pytest
from support.saved_models import write_model_folder
from support.toy_datasets import write_image

from vitrail.base.errors import ConfigError, DataError
from vitrail.base.figures import FigureFolder
from vitrail.data.images.image_items import ImageItem
from vitrail.inspection.explain.explain_files import OcclusionCheck, check_by_occlusion, explain_files
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer

pytest.importorskip("matplotlib", reason="needs the extra `plot`")


@pytest.fixture(scope="module")
def explainer(tmp_path_factory: pytest.TempPathFactory) -> Explainer:
    return Explainer(write_model_folder(tmp_path_factory.mktemp("models") / "model"))


def test_figures_are_written_and_unreadable_images_skipped(explainer: Explainer, tmp_path: Path) -> None:
    photo, errors, done = write_image(tmp_path / "a.png"), list[DataError](), list[int]()
    images = [ImageItem(str(path), str(path)) for path in (tmp_path / "missing.png", photo, photo)]
    options = [explainer.resolve_options(ExplainOptions(method="rollout"))]
    found = list(
        explain_files(
            explainer,
            images,
            options,
            FigureFolder(path=tmp_path / "out"),
            check=True,
            on_error=errors.append,
            progress=done.append,
        )
    )
    assert [each.written for each in found] == [[tmp_path / "out" / f"a.rollout{n}.png"] for n in ("", "-2")]
    assert "does not exist" in str(errors[0])
    assert done == [1, 1, 1]
    assert found[0].check == check_by_occlusion(explainer, photo, found[0].explanation)
    assert found[0].check is not None
    assert OcclusionCheck(0.9, 0.1, 0.8).sentence.endswith("looked at least, 80.0%.")
    assert OcclusionCheck(0.9, 0.8, 0.1).sentence.endswith(
        "So this map says little: what it marks matters less than the rest."
    )
    assert found[0].to_json()["check"]["without_most"] == found[0].check.without_most
    assert f"without the 30% least {found[0].check.without_least:.1%}" in str(found[0])


def test_existing_figures_are_replaced_only_on_request(explainer: Explainer, tmp_path: Path) -> None:
    photo = write_image(tmp_path / "a.png")
    (tmp_path / "a.norms.npz").write_text("mine")
    options = [explainer.resolve_options(ExplainOptions(method="norms"))]
    images = [ImageItem(str(photo), str(photo))]
    list(explain_files(explainer, images, options, FigureFolder(path=tmp_path)))
    (tmp_path / "a.norms.png").unlink()
    with pytest.raises(ConfigError, match=r"a.norms.npz already exists; use `overwrite`"):
        list(explain_files(explainer, images, options, FigureFolder(path=tmp_path, arrays=True)))
    assert not (tmp_path / "a.norms.png").exists()
    list(explain_files(explainer, images, options, FigureFolder(path=tmp_path, arrays=True, overwrite=True)))
    assert (tmp_path / "a.norms.npz").read_bytes()[:2] == b"PK"
