"""Every operation and policy equals timm's and torchvision's on the same image."""

from collections import Counter
from functools import partial
from operator import mul
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops
from timm.data import auto_augment as theirs
from torchvision.transforms import AutoAugment, ColorJitter, InterpolationMode
from torchvision.transforms import functional as tv

from vitrail.data.images.augment import policies
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.augment.policies import (
    IMAGENET_POLICY,
    RAND_AUGMENT_OPERATIONS,
    SIGNED_OPERATIONS,
    WarpOptions,
    apply_operation,
    apply_policy_and_jitter,
    auto_augment_amount,
    rand_augment_amount,
)
from vitrail.data.images.preprocessing import Preprocessing

FILL = (124, 116, 104)
WARP = WarpOptions(FILL, Image.Resampling.BICUBIC)
NEAREST = WarpOptions(FILL, Image.Resampling.NEAREST)
IN_TIMM = {  # ours → timm's
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "PosterizeIncreasing",
    "solarize": "SolarizeIncreasing",
    "solarize_add": "SolarizeAdd",
    "color": "ColorIncreasing",
    "contrast": "ContrastIncreasing",
    "brightness": "BrightnessIncreasing",
    "sharpness": "SharpnessIncreasing",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}


def make_image(rows: int = 60, columns: int = 80, seed: int = 0) -> Image.Image:
    """A smooth image with some noise, neither black nor white, so that contrast changes it."""
    draws = np.random.default_rng(seed)
    smooth = Image.fromarray(draws.integers(20, 220, (5, 6, 3), dtype=np.uint8)).resize((columns, rows), 3)
    return Image.fromarray((np.asarray(smooth) * 0.9 + draws.integers(0, 20, (rows, columns, 3))).astype(np.uint8))


def same(mine: Image.Image, other: Image.Image) -> bool:
    return mine.mode == other.mode and mine.tobytes() == other.tobytes()


def test_operations_are_those_of_timm() -> None:
    names: Any = theirs._RAND_INCREASING_TRANSFORMS  # pyright: ignore[reportPrivateUsage]
    assert {IN_TIMM[name] for name in RAND_AUGMENT_OPERATIONS} == set(names)
    assert len(RAND_AUGMENT_OPERATIONS) == len(names)


@pytest.mark.parametrize("level", [0.0, 0.17, 0.5, 0.9, 0.973, 1.0])
@pytest.mark.parametrize("name", RAND_AUGMENT_OPERATIONS)
def test_operations_equal_timm(name: str, level: float, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image()
    hparams: Any = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    operation: Any = theirs.AugmentOp(IN_TIMM[name], prob=1.0, magnitude=level * 10, hparams=hparams)  # pyright: ignore
    for sign in (1, -1) if name in SIGNED_OPERATIONS else (1,):
        monkeypatch.setattr(theirs, "_randomly_negate", partial(mul, sign))
        mine = apply_operation(image, name, sign * rand_augment_amount(name, level), WARP)
        if (name, level) == ("posterize", 1.0):  # 0 bits, which recent Pillow refuses
            assert same(mine, Image.new("RGB", image.size))
        else:
            assert same(mine, operation(image))


@pytest.mark.parametrize("name", ["brightness", "contrast", "color", "sharpness"])
@pytest.mark.parametrize("more", [-0.9, -0.3, 0.0, 0.5])
def test_enhancements_equal_torchvision(name: str, more: float) -> None:
    adjust: Any = getattr(tv, f"adjust_{'saturation' if name == 'color' else name}")
    assert same(apply_operation(make_image(), name, more, WARP), adjust(make_image(), 1 + more))
    assert (more == 0) == same(apply_operation(make_image(), name, more, WARP), make_image())


def test_autoaugment_pairs_are_those_of_torchvision() -> None:
    policy: Any = AutoAugment()
    named = [[(n.lower().replace("shearx", "shear_x"), p, m or 0) for n, p, m in pair] for pair in policy.policies]
    assert [list(pair) for pair in IMAGENET_POLICY] == named


@pytest.mark.parametrize("pair", range(len(IMAGENET_POLICY)))
@pytest.mark.parametrize("sign", [0, 1])
def test_autoaugment_equals_torchvision(pair: int, sign: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = AutoAugment(interpolation=InterpolationMode.NEAREST, fill=list(FILL))
    always = torch.zeros(2), torch.full((2,), sign)
    monkeypatch.setattr(AutoAugment, "get_params", Mock(return_value=(pair, *always)))
    image = make_image()
    mine = image
    for name, _, magnitude in IMAGENET_POLICY[pair]:
        amount = auto_augment_amount(name, magnitude / 9)
        mine = apply_operation(mine, name, -amount if name in SIGNED_OPERATIONS and sign == 0 else amount, NEAREST)
    difference = np.abs(np.asarray(mine).astype(int) - np.asarray(policy(image)))
    if "shear_x" in (
        IMAGENET_POLICY[pair][0][0],
        IMAGENET_POLICY[pair][1][0],
    ):  # by the tangent of the arctangent of the slope
        assert (difference > 0).mean() < 0.01
    else:
        assert difference.max() <= 1  # its factors are rounded to 32 bits


def test_color_jitter_equals_torchvision() -> None:
    """The same factors in the same order give the same image; factors are drawn within the same limits."""
    image = make_image()
    functions = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation]
    random, again = Random(5), Random(5)
    mine = policies.color_jitter(image, 0.4, random)
    other: Any = image
    for adjust in again.sample(functions, 3):
        other = adjust(other, again.uniform(0.6, 1.4))
    assert same(mine, other)
    limits: Any = ColorJitter(0.4, 0.4, 0.4)
    assert limits.brightness == limits.contrast == limits.saturation == (0.6, 1.4)


def test_three_augment_applies_one_of_three_operations() -> None:
    image = make_image()
    grey: Any = tv.to_grayscale(image, 3)
    tv_solarize: Any = tv.solarize
    solarized = tv_solarize(image, 128)
    counts: Counter[str] = Counter()
    for seed in range(300):
        mine = policies.three_augment(image, Random(seed))
        kind = "grey" if same(mine, grey) else "solarized" if same(mine, solarized) else "blurred"
        counts[kind] += 1
        if kind == "blurred":
            assert np.asarray(mine).std() <= np.asarray(image).std()
    assert all(70 < counts[kind] < 130 for kind in ("grey", "solarized", "blurred"))


def test_randaugment_draws_uniformly_and_applies_half(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, float]] = []

    def note(image: Image.Image, name: str, amount: float, warp: WarpOptions) -> Image.Image:
        done.append((name, amount))
        return image

    monkeypatch.setattr(policies, "apply_operation", note)
    augmentation = Augmentation(policy="rand")
    for seed in range(3000):
        apply_policy_and_jitter(make_image(4, 4), augmentation, Preprocessing(), Random(seed))
    assert abs(len(done) - 3000) < 5 * 1500**0.5
    counts = Counter(name for name, _ in done)
    assert all(abs(counts[name] - 200) < 5 * 200**0.5 for name in RAND_AUGMENT_OPERATIONS)
    turns = np.array([amount for name, amount in done if name == "rotate"])
    assert abs((turns > 0).mean() - 0.5) < 0.2
    levels = np.abs(turns) / 3
    assert levels.max() <= 10
    assert abs(levels.mean() - 9) < 0.2
    assert 0.3 < levels.std() < 0.6


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["rand", "auto", "three"]),
    strength=st.sampled_from([0.0, 0.4, 2.0]),
    grey=st.booleans(),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_mode_and_size_are_kept_and_result_depends_only_on_the_key(
    policy: Any, strength: float, grey: bool, rows: int, columns: int, seed: int
) -> None:
    image = make_image(rows, columns).convert("L" if grey else "RGB")
    kept = image.copy()
    preprocessing = Preprocessing(mean=(0.5,) * (1 if grey else 3), std=(0.5,) * (1 if grey else 3))
    augmentation = Augmentation(policy=policy, jitter=strength)
    mine = apply_policy_and_jitter(image, augmentation, preprocessing, Random(seed))
    assert (mine.mode, mine.size) == (image.mode, image.size)
    assert same(mine, apply_policy_and_jitter(image, augmentation, preprocessing, Random(seed)))
    assert same(image, kept)


def test_zero_strength_changes_nothing() -> None:
    image = make_image()
    for seed in range(20):
        for augmentation in (Augmentation(), Augmentation(policy="rand", operations=0)):
            assert same(apply_policy_and_jitter(image, augmentation, Preprocessing(), Random(seed)), image)
        assert same(policies.color_jitter(image, 0, Random(seed)), image)
    for name in SIGNED_OPERATIONS:
        assert same(apply_operation(image, name, 0, WARP), image)


def test_uncovered_pixels_have_the_mean_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessing = Preprocessing(mean=(0.485, 0.456, 0.406), std=(1, 1, 1))
    options: list[WarpOptions] = []

    def note(image: Image.Image, warp: WarpOptions, random: Random) -> Image.Image:
        options.append(warp)
        return image

    monkeypatch.setattr(policies, "auto_augment", note)
    apply_policy_and_jitter(make_image(), Augmentation(policy="auto"), preprocessing, Random(0))
    assert options == [WARP]
    shifted = apply_operation(make_image(), "translate_x", 0.5, WARP)
    assert ImageChops.difference(shifted.crop((40, 0, 80, 60)), Image.new("RGB", (40, 60), FILL)).getbbox() is None
