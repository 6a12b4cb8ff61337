"""Attention of each head: equal to what is captured, with the prefix a sum of 1, and masks that keep a share of it."""

from typing import Any

import numpy as np
import pytest
import torch
from support.attention_models import make_attention_model

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.inspection.attention.capture import capture_attention
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.explain.overlay import mask_by_mass

pytest.importorskip("matplotlib", reason="needs the extra `plot`")


def make_image() -> Any:
    return np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def make_explainer(**fields: Any) -> Explainer:
    return Explainer(make_attention_model("learned stem", **fields), preprocessing=vitrail.Preprocessing())


@pytest.mark.parametrize("classes", [0, 5])
def test_heads_equal_the_captured_attention(classes: int) -> None:
    subject = make_explainer(classes=classes)
    with torch.no_grad(), capture_attention(subject.model, [-1]) as captured:
        subject.model(subject.loaded.make_batch([make_image()]))
    expected = captured.maps[0][0, :, 0].numpy()  # of the class token: (H, N)
    found = subject.explain(make_image(), "heads")
    assert found.attention is not None
    np.testing.assert_allclose(found.attention, expected, rtol=1e-5)
    np.testing.assert_allclose(found.attention.sum(-1), 1, rtol=1e-5)
    patches = expected[:, captured.prefix :]
    np.testing.assert_allclose(
        found.maps[0].reshape(patches.shape), patches / patches.sum(-1, keepdims=True), rtol=1e-4
    )
    np.testing.assert_allclose(found.mean, subject.explain(make_image(), "attention").map, rtol=1e-5)
    assert set(found.figure.arrays) == {"maps", "mean", "attention", "photo", "box"}
    assert found.figure.title == "What the class token looked at in layer 2, head by head"
    titles = [axes.get_title() for axes in found.figure.draw().axes]
    assert titles[: 2 + len(expected)] == [
        "dashed: what it sees",
        "mean over heads",
        *(f"head {n}" for n in range(len(expected))),
    ]


def test_masks_keep_the_fewest_patches_that_hold_the_mass() -> None:
    maps = np.array([[[0.1, 0.4], [0.3, 0.2]], [[0.25, 0.25], [0.25, 0.25]]])
    assert mask_by_mass(maps, 0.6).tolist() == [[[False, True], [True, False]], [[True, True], [True, False]]]
    random = np.random.default_rng(0).random((3, 14, 14))
    random /= random.sum((-2, -1), keepdims=True)
    flat = np.sort(random.reshape(3, -1), -1)
    dino = (flat.cumsum(-1) > 1 - 0.6).sum(-1)  # as in visualize_attention.py
    assert mask_by_mass(random, 0.6).sum((-2, -1)).tolist() == dino.tolist()
    found = make_explainer().explain(make_image(), mass=0.6)
    assert found.options.method == "heads"
    np.testing.assert_array_equal(found.figure.arrays["masks"], mask_by_mass(found.maps, 0.6))
    assert "hold 60% of a head's attention" in found.figure.legend


def test_pooled_patches_are_the_query_without_a_class_token() -> None:
    subject = Explainer("cct_cifar10")
    found = subject.explain("example:cat", "heads")
    assert found.figure.title == "What the model looked at in layer 3, head by head"
    assert found.attention is not None
    np.testing.assert_allclose(found.attention.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 1}, "all heads of one layer"),
        ({"layer": "all"}, "`layer` all"),
        ({"layer": 99}, "layer is 99"),
        ({"mass": 1.5}, "`mass` is 1.5"),
        ({"method": "rollout", "mass": 0.6}, "`mass` 0.6 cannot be combined with method 'rollout'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    explain: Any = make_explainer().explain
    with pytest.raises(ConfigError, match=message):
        explain(make_image(), **{"method": "heads", **options})
