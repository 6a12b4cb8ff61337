"""The occlusion check: which patches are removed, predictions without them, and the figure."""

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.attention_models import ATTENTION_CASES, count_hooks, make_attention_model, random_image_batch

from vitrail.base.errors import ConfigError
from vitrail.inspection.explain.patch_removal import (
    can_drop_tokens,
    draw_removal_curves,
    gray_out_patches,
    predict_without_patches,
    probabilities_without_patches,
    select_patches_to_remove,
    sort_patches_by_attention,
)

ATTENDED = np.array([[0.1, 0.5, 0.2], [0.0, 0.05, 0.15]])  # 2×3 patches
GONE = np.array([[[True, False, False], [False, False, True]], [[False, True, False], [True, False, False]]])
NEEDS_GRID = ("layers", "shared", "relative", "rotary", "neighbors")


def test_patches_are_ranked_from_least_to_most() -> None:
    assert sort_patches_by_attention(ATTENDED).tolist() == [3, 4, 0, 5, 2, 1]
    assert sort_patches_by_attention(np.zeros((2, 2))).tolist() == [0, 1, 2, 3]


def test_patches_that_are_not_square() -> None:
    """Patches of 2×1 pixels in an image of 4×3: pixel by pixel."""
    pixels = np.arange(1.0, 25.0, dtype=np.float32).reshape(2, 4, 3)
    half = gray_out_patches(pixels, select_patches_to_remove(ATTENDED, 0.5, most=True))  # patches 1, 2 and 5
    assert half[0].tolist() == [[1, 0, 0], [4, 0, 0], [7, 8, 0], [10, 11, 0]]
    assert half[1].tolist() == [[13, 0, 0], [16, 0, 0], [19, 20, 0], [22, 23, 0]]
    third = gray_out_patches(pixels, select_patches_to_remove(ATTENDED, 1 / 3, most=False))  # patches 3 and 4
    assert third[0].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 9], [0, 0, 12]]
    assert half.dtype == np.float32
    assert pixels.min() == 1  # the image is not changed


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.08, 0), (0.09, 1), (0.5, 3), (0.58, 3), (0.59, 4), (1, 5)])
@pytest.mark.parametrize("most", [True, False])
def test_share_is_rounded_to_patches(share: float, count: int, most: bool) -> None:
    assert select_patches_to_remove(ATTENDED, share, most=most).sum() == count


@given(arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.floats(-1, 1)), st.floats(0, 1))
def test_kept_patches_are_attended_less_than_removed_ones(attended: "np.ndarray", share: float) -> None:
    for most in (True, False):
        gone = select_patches_to_remove(attended, share, most=most)
        assert gone.sum() == attended.size - 1 or abs(gone.sum() - share * attended.size) <= 0.5 + 1e-9
        sign = 1 if most else -1
        if gone.any() and not gone.all():
            assert (sign * attended[gone]).min() >= (sign * attended[~gone]).max()
        larger = np.kron(attended, np.ones((3, 2)))[None]
        left = gray_out_patches(np.ones_like(larger), gone)
        assert left.sum() == 6 * (~gone).sum()


def test_most_and_least_attended_are_disjoint() -> None:
    for attended in (ATTENDED, np.ones((2, 3))):
        most, least = (select_patches_to_remove(attended, 0.5, most=each) for each in (True, False))
        assert (most ^ least).all()


def test_grids_that_do_not_divide_the_image() -> None:
    """As the keys of a model that reduces its grid: patches differ by a pixel."""
    gone = np.array([[True, False, True]])
    assert gray_out_patches(np.ones((1, 1, 7)), gone)[0, 0].tolist() == [0, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("shape", "attended", "share", "message"),
    [
        ((1, 4, 2), ATTENDED, 0.5, r"image of 1×4×2 does not divide into 2×3 patches; expected C×H×W pixels$"),
        ((4, 3), ATTENDED, 0.5, "image of 4×3 does not"),
        ((1, 4, 3), ATTENDED, 1.5, r"removed patches is 1\.5; expected 0 to 1$"),
        ((1, 4, 3), ATTENDED, float("nan"), "removed patches is nan"),
        ((1, 4, 3), np.full((2, 3), np.nan), 0.5, "contains NaN; expected a finite number for each"),
        ((1, 4, 3), np.zeros(6), 0.5, r"map has shape \(6,\)"),
    ],
)
def test_errors(shape: tuple[int, ...], attended: "np.ndarray", share: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gray_out_patches(np.ones(shape), select_patches_to_remove(attended, share, most=True))


@pytest.mark.parametrize(("images", "shares"), [(1, 1), (1, 5), (30, 5)])
def test_figure(images: int, shares: int) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    x = np.linspace(0, 0.8, shares)
    noise = np.random.default_rng(0).normal(0, 0.02, (images, 1))
    most, least, chance = (0.9 * np.exp(-rate * x) + noise for rate in (3, 0.5, 1.5))
    figure = draw_removal_curves(x, most, least, chance, removal_method="left out")
    assert figure.to_png().startswith(b"\x89PNG")
    assert ElementTree.fromstring(figure.to_svg()).tag.endswith("svg")
    (axes,) = figure.draw().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("patches removed (%)", "mean class probability")
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["least attended first", "random order", "most attended first"]
    np.testing.assert_allclose(
        np.asarray(axes.lines[-1].get_xydata(), dtype=float), np.stack((100 * x, most.mean(0)), 1)
    )
    at = (least - most).mean(0).argmax()
    values = f"{most.mean(0)[at]:.1%} without the most attended, {least.mean(0)[at]:.1%} without the least"
    assert f"at {x[at]:.0%} of the patches: {values}" in figure.caption
    assert ("standard error" in figure.caption) == (images > 1)
    assert set(figure.arrays) == {"shares", "most", "least", "chance"}


def test_caption_of_a_misleading_map() -> None:
    shares, most, least = np.array([0.5]), np.array([[0.75]]), np.array([[0.25]])
    expected = (
        "at 50% of the patches: 75.0% without the most attended, 25.0% without the least attended. Mean over 1 image."
    )
    assert expected in draw_removal_curves(shares, most, least, most, removal_method="left out").caption


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_models_that_can_drop_tokens(case: str) -> None:
    model = make_attention_model(case)
    assert can_drop_tokens(model) == (not any(word in case for word in NEEDS_GRID))
    with torch.no_grad():
        plain = model(random_image_batch())
    torch.testing.assert_close(
        predict_without_patches(model, random_image_batch(), np.zeros_like(GONE)), plain, atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(predict_without_patches(model, random_image_batch(), GONE), plain, atol=1e-3)
    assert count_hooks(model) == 0


@pytest.mark.parametrize("case", ["learned stem", "learned with registers", "deit", "distilled"])
def test_dropped_tokens_match_a_mask(case: str) -> None:
    """Dropping tokens equals masking them in every layer; the head reads none of them."""
    model = make_attention_model(case)
    gone = torch.from_numpy(GONE).flatten(1)
    prefix = torch.zeros(2, model.prefix, dtype=torch.bool)
    mask = ~torch.cat([prefix, gone], dim=1)[:, None, None]  # (B, 1, 1, N)

    def hide(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return args, {**named, "mask": mask}

    hooks = [block.attn.register_forward_pre_hook(hide, with_kwargs=True) for block in model.blocks]
    with torch.no_grad():
        hidden = model(random_image_batch())
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(predict_without_patches(model, random_image_batch(), GONE), hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["learned stem", "mean", "map", "deit3"])
def test_pixels_of_dropped_patches_do_not_matter(case: str) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    other = torch.where(torch.from_numpy(np.kron(GONE, np.ones((1, 16, 16)))[:, None] > 0), pixels + 9, pixels)
    assert not torch.equal(other, pixels)
    torch.testing.assert_close(
        predict_without_patches(model, other, GONE), predict_without_patches(model, pixels, GONE)
    )


@pytest.mark.parametrize("case", ["relative", "rotary", "learned layers", "cct with neighbors"])
def test_other_models_get_gray_patches(case: str) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    gray = torch.from_numpy(np.stack([gray_out_patches(*each) for each in zip(pixels.numpy(), GONE, strict=True)]))
    with torch.no_grad():
        torch.testing.assert_close(predict_without_patches(model, pixels, GONE), model(gray))


def test_unequal_numbers_of_patches_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 0\] patches are to be removed; expected the same number"):
        predict_without_patches(
            make_attention_model(), random_image_batch(), GONE * np.array([True, False])[:, None, None]
        )


def test_hooks_are_removed() -> None:
    model = make_attention_model()
    with pytest.raises(ConfigError, match="expected"):
        predict_without_patches(model, random_image_batch(size=(16, 16)), GONE)
    assert count_hooks(model) == 0


def test_probabilities_per_share() -> None:
    model, attended = make_attention_model(), np.arange(12.0).reshape(2, 2, 3)
    with torch.no_grad():
        plain = model(random_image_batch()).softmax(-1)
    classes = plain.argmax(-1)
    found = probabilities_without_patches(model, random_image_batch(), attended, classes, (0.0, 1 / 3, 1.0), most=True)
    np.testing.assert_allclose(found[:, 0], plain.max(-1).values, rtol=1e-5)
    last_two, all_but_one = (np.broadcast_to(np.arange(6) >= n, (2, 6)).reshape(2, 2, 3) for n in (4, 1))
    for column, gone in ((1, last_two), (2, all_but_one)):
        expected = (
            predict_without_patches(model, random_image_batch(), gone).softmax(-1).gather(1, classes[:, None])[:, 0]
        )
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-5)
