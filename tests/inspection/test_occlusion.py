"""Which patches are taken away, and how the check is drawn."""

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vitrail.errors import ConfigError
from vitrail.inspection.occlusion import grey_out_patches, plot_occlusion, rank_patches, select_patches_to_remove

ATTENDED = np.array([[0.1, 0.5, 0.2], [0.0, 0.05, 0.15]])  # 2×3 patches


def test_ranks_run_from_the_least_to_the_most() -> None:
    assert rank_patches(ATTENDED).tolist() == [3, 4, 0, 5, 2, 1]
    assert rank_patches(np.zeros((2, 2))).tolist() == [0, 1, 2, 3]


def test_patches_that_are_no_squares() -> None:
    """Patches of 2×1 pixels in an image of 4×3: pixel by pixel."""
    pixels = np.arange(1.0, 25.0, dtype=np.float32).reshape(2, 4, 3)
    half = grey_out_patches(pixels, select_patches_to_remove(ATTENDED, 0.5, most=True))  # patches 1, 2 and 5
    assert half[0].tolist() == [[1, 0, 0], [4, 0, 0], [7, 8, 0], [10, 11, 0]]
    assert half[1].tolist() == [[13, 0, 0], [16, 0, 0], [19, 20, 0], [22, 23, 0]]
    third = grey_out_patches(pixels, select_patches_to_remove(ATTENDED, 1 / 3, most=False))  # patches 3 and 4
    assert third[0].tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 9], [0, 0, 12]]
    assert half.dtype == np.float32
    assert pixels.min() == 1  # the image itself is left alone


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.08, 0), (0.09, 1), (0.5, 3), (0.58, 3), (0.59, 4), (1, 5)])
@pytest.mark.parametrize("most", [True, False])
def test_the_share_is_of_whole_patches(share: float, count: int, most: bool) -> None:
    assert select_patches_to_remove(ATTENDED, share, most=most).sum() == count


@given(
    arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 5)), elements=st.floats(-1, 1)),
    st.floats(0, 1),
)
def test_what_is_left_was_attended_no_more_than_what_is_gone(attended: "np.ndarray", share: float) -> None:
    for most in (True, False):
        gone = select_patches_to_remove(attended, share, most=most)
        assert gone.sum() == attended.size - 1 or abs(gone.sum() - share * attended.size) <= 0.5 + 1e-9
        sign = 1 if most else -1
        if gone.any() and not gone.all():
            assert (sign * attended[gone]).min() >= (sign * attended[~gone]).max()
        larger = np.kron(attended, np.ones((3, 2)))[None]
        left = grey_out_patches(np.ones_like(larger), gone)
        assert left.sum() == 6 * (~gone).sum()


def test_the_most_and_the_least_do_not_meet() -> None:
    for attended in (ATTENDED, np.ones((2, 3))):
        most, least = (select_patches_to_remove(attended, 0.5, most=each) for each in (True, False))
        assert (most ^ least).all()


@pytest.mark.parametrize(
    ("shape", "attended", "share", "message"),
    [
        ((1, 4, 4), ATTENDED, 0.5, r"image of 1×4×4 and a map of 2×3 patches; expected C×\(rows·P\)×\(columns·Q\)$"),
        ((4, 3), ATTENDED, 0.5, "image of 4×3 and"),
        ((1, 4, 3), ATTENDED, 1.5, r"a share of 1\.5 of the patches; expected 0 to 1$"),
        ((1, 4, 3), ATTENDED, float("nan"), "a share of nan"),
        ((1, 4, 3), np.full((2, 3), np.nan), 0.5, "with NaN in it; expected a number for each"),
        ((1, 4, 3), np.zeros(6), 0.5, r"a map of shape \(6,\)"),
    ],
)
def test_what_does_not_fit(shape: tuple[int, ...], attended: "np.ndarray", share: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grey_out_patches(np.ones(shape), select_patches_to_remove(attended, share, most=True))


@pytest.mark.parametrize(("images", "shares"), [(1, 1), (1, 5), (30, 5)])
def test_the_plate(images: int, shares: int) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    x = np.linspace(0, 0.8, shares)
    noise = np.random.default_rng(0).normal(0, 0.02, (images, 1))
    most, least, chance = (0.9 * np.exp(-rate * x) + noise for rate in (3, 0.5, 1.5))
    plate = plot_occlusion(x, most, least, chance, removal_method="left out")
    assert plate.to_png().startswith(b"\x89PNG")
    assert ElementTree.fromstring(plate.to_svg()).tag.endswith("svg")
    (axes,) = plate.draw().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("patches removed (%)", "mean probability of the class")
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["the least attended first", "in random order", "the most attended first"]
    np.testing.assert_allclose(
        np.asarray(axes.lines[-1].get_xydata(), dtype=float), np.stack((100 * x, most.mean(0)), 1)
    )
    at = (least - most).mean(0).argmax()
    apart = f"{most.mean(0)[at]:.3f} without the most and {least.mean(0)[at]:.3f} without the least"
    assert f"at {x[at]:.0%} of the patches, {apart}" in plate.caption
    assert ("standard error" in plate.caption) == (images > 1)
    assert set(plate.arrays) == {"shares", "most", "least", "chance"}


def test_a_map_that_misleads_is_said_to() -> None:
    shares, most, least = np.array([0.5]), np.array([[0.75]]), np.array([[0.25]])
    said = "at 50% of the patches, 0.750 without the most and 0.250 without the least attended. Mean over 1 image."
    assert said in plot_occlusion(shares, most, least, most, removal_method="left out").caption


def test_curves_that_do_not_fit() -> None:
    good, shares = np.zeros((4, 3)), np.arange(3) / 3
    for most, least, chance in ((good, good[:3], good), (good, good, good[:, :2]), (good[0], good, good)):
        with pytest.raises(ConfigError, match=r"expected \(images, shares\)$"):
            plot_occlusion(shares, most, least, chance, removal_method="left out")
