"""Figures of explanations: the photo's aspect ratio, and names of any kind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attention_models import make_attention_model
from support.figure_checks import check_figure

from vitrail.data.images.preprocessing import Preprocessing, compute_visible_box
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.explanation import Explanation

PREPROCESSING = Preprocessing(crop=0.8)
PLOT = "needs the extra `plot`"


def make_image(rows: int = 50, columns: int = 70) -> Any:
    return np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)


def explainer() -> Explainer:
    return Explainer(
        make_attention_model(), preprocessing=PREPROCESSING, labels=("tench", "goldfish", "crane", "ant", "bee")
    )


@pytest.mark.parametrize("method", ["grad-rollout", "norms"])
def test_figure(method: Any) -> None:
    pytest.importorskip("matplotlib", reason=PLOT)
    size = (90, 30)
    found = explainer().explain(make_image(*size), method)
    unit = "token norm" if method == "norms" else "attention (1 = average)"
    check_figure(found.figure, unit)
    figure = found.figure.draw()
    photo_axes, over = figure.axes[:2]
    for axes in (photo_axes, over):
        assert axes.get_aspect() == 1
        assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, size[1] - 0.5), (size[0] - 0.5, -0.5))
    bar = next(axes for axes in figure.axes if axes.get_ylabel().startswith(unit))
    low, high = bar.get_ylim()
    scaled = found.map * (1 if method == "norms" else 6)
    assert low == (scaled.min() if method == "norms" else 0)
    assert high == pytest.approx(np.quantile(scaled, 0.95))
    assert found.prediction is not None
    predicted = next(axes for axes in figure.axes if axes.get_title() == "prediction")
    assert [each.get_text() for each in predicted.texts][::2] == [each.name for each in found.prediction.top]
    assert found.explained_class is not None
    name = f"{found.explained_class.name} ({found.explained_class.probability:.1%})"
    titles = {
        "grad-rollout": f"What the model looked at for {name}",
        "norms": "How strong the features of each patch are",
    }
    assert figure.get_suptitle() == found.figure.title == titles[method]
    assert set(found.figure.arrays) == {"maps", "photo", "box"}


def test_figures_of_a_patch_and_of_many_maps() -> None:
    pytest.importorskip("matplotlib", reason=PLOT)
    marked = explainer().explain(make_image(), "attention", token="1, 2").figure.draw().axes[1]
    box = compute_visible_box((50, 70), explainer().loaded.preprocessing)
    assert np.max(np.asarray(marked.lines[0].get_xdata())) == pytest.approx(box[2] - 0.5)
    assert np.max(np.asarray(marked.lines[0].get_ydata())) == pytest.approx(box[3] - 0.5)
    many = explainer().explain(make_image(), "attention", layer="all", head="all")
    assert len([axes for axes in many.figure.draw().axes if axes.images]) == 6
    assert many._repr_png_().startswith(b"\x89PNG")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("label", "name", "file"),
    [
        ("a$b$ 100 %_{x}", "a/b/$c_$.tar.png", "$c_$.tar.rollout.png"),
        ("\u732b\x00\n", "\u732b.jpg", "\u732b.rollout.png"),
        (" , b", "..", "...rollout.png"),
        ("", "", "image.rollout.png"),
    ],
)
def test_names_of_any_kind(label: str, name: str, file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason=PLOT)
    subject = Explainer(make_attention_model(), preprocessing=PREPROCESSING, labels=[label] * 5)
    captioned = subject.explain_resolved(make_image(), subject.resolve_options(ExplainOptions()), name).figure
    assert captioned.save(tmp_path) == [tmp_path / file]
    assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")
    assert captioned.caption.startswith(f"{Path(name).name or 'image'}: predicted ")


def test_explanations_are_hashable() -> None:
    one, other = (explainer().explain(make_image()) for _ in range(2))
    assert len({one, other, one}) == 2
    assert one != other
    assert isinstance(one, Explanation)
