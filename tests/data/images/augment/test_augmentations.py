"""Random changes of training images equal those of timm and torchvision, and depend only on image and key."""

import io
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
from timm.data import mixup as timm_mixup
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import AutoAugment, ColorJitter, InterpolationMode
from torchvision.transforms import functional as tv

from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.augment import augmentations as policies
from vitrail.data.images.augment.augmentations import (
    IMAGENET_POLICY,
    RAND_AUGMENT_OPERATIONS,
    SIGNED_OPERATIONS,
    WarpOptions,
    apply_operation,
    apply_policy_and_jitter,
    augment_image,
    auto_augment_argument,
    can_augment_as_batch,
    mixup_or_cutmix,
    normalize,
    rand_augment_argument,
    random_cutmix_box,
    random_erase,
    shift_and_flip_batch,
    smooth_labels,
)
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.decoding.crops import UNIFORMS_PER_BOX, random_resized_crop_box
from vitrail.data.images.preprocessing import PILLOW_FILTERS, Preprocessing, preprocess_image, resize_and_crop
from vitrail.data.rng import make_view_keys, uniform_randoms

GRAY: dict[str, Any] = {"mean": (0.3,), "std": (0.2,)}
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


def make_image(rows: int = 50, columns: int = 70, seed: int = 0) -> Image.Image:
    colors = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((columns, rows), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "options", [{}, GRAY, {"fit": "squash"}, {"image_size": (40, 24), "interpolation": "bilinear"}]
)
def test_default_equals_evaluation(options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"image_size": 32, **options}
    preprocessing = Preprocessing(**fields)
    pixels = augment_image(make_image(), Augmentation(), preprocessing, 7)
    assert torch.equal(
        normalize(pixels, preprocessing), torch.from_numpy(preprocess_image(make_image(), preprocessing))
    )


@settings(max_examples=100, deadline=None)
@given(
    crop=st.sampled_from(["center", "resized", "shift"]),
    policy=st.sampled_from(["none", "rand", "auto", "three"]),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    jitter=st.sampled_from([0.0, 0.3]),
    gray=st.booleans(),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    given_size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    key=st.integers(0, 2**64 - 1),
)
def test_view_has_the_model_size_and_depends_only_on_the_key(
    crop: Any,
    policy: Any,
    flip: float,
    jitter: float,
    gray: bool,
    size: tuple[int, int],
    given_size: tuple[int, int],
    key: int,
) -> None:
    augmentation = Augmentation(crop=crop, policy=policy, flip=flip, jitter=jitter)
    preprocessing = Preprocessing(image_size=size, crop=1.0, **(GRAY if gray else {}))
    image = make_image(*given_size)
    mine = augment_image(image, augmentation, preprocessing, key)
    assert mine.dtype == torch.uint8
    assert mine.shape == (1 if gray else 3, *size)
    assert mine.is_contiguous()
    assert torch.equal(mine, augment_image(np.asarray(image), augmentation, preprocessing, key))
    mine.zero_()  # the view owns its memory
    assert image.tobytes() == make_image(*given_size).tobytes()


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(crop="resized"),
        Augmentation(crop="shift"),
        Augmentation(flip=0.5),
        Augmentation(policy="rand"),
        Augmentation(policy="auto"),
        Augmentation(policy="three"),
        Augmentation(jitter=0.4),
    ],
)
def test_different_keys_give_different_views(augmentation: Augmentation) -> None:
    views = {
        bytes(augment_image(make_image(), augmentation, Preprocessing(image_size=32), key).numpy()) for key in range(40)
    }
    assert len(views) > (1 if augmentation.crop == "center" and augmentation.flip else 10)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 400), (40, 50), (224, 80)])
@pytest.mark.parametrize("gray", [False, True])
def test_resize_equals_pillow_within_two_levels(interpolation: Any, size: tuple[int, int], gray: bool) -> None:
    # no overshooting: both clip values between the two passes, but the order of the passes may differ
    noise = np.random.default_rng(1).integers(70, 190, (*size, 3), dtype=np.uint8)
    augmentation = Augmentation(crop="resized", flip=0.5)
    preprocessing = Preprocessing(image_size=(96, 112), interpolation=interpolation, **(GRAY if gray else {}))
    for key in range(20):
        flip, *draws = uniform_randoms(np.array([key], np.uint64), 1 + UNIFORMS_PER_BOX)[0].tolist()
        top, left, rows, columns = random_resized_crop_box(*size, augmentation.area, augmentation.aspect, draws)
        part = Image.fromarray(noise).convert("L" if gray else "RGB").crop((left, top, left + columns, top + rows))
        expected = np.asarray(part.resize((112, 96), PILLOW_FILTERS[interpolation])).reshape(96, 112, -1)
        expected = expected[:, ::-1] if flip < 0.5 else expected
        mine = augment_image(noise, augmentation, preprocessing, key).permute(1, 2, 0).numpy()
        assert np.abs(mine.astype(int) - expected).max() <= 2


def test_crop_is_the_same_for_every_kind_of_source() -> None:
    image = make_image(300, 400)
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, "PNG")
    image.save(jpeg, "JPEG", quality=98, subsampling=0)
    augmentation, preprocessing = Augmentation(crop="resized", flip=0.5), Preprocessing(image_size=48)
    for key in range(10):
        exact = augment_image(image, augmentation, preprocessing, key)
        assert torch.equal(augment_image(png.getvalue(), augmentation, preprocessing, key), exact)
        near = augment_image(jpeg.getvalue(), augmentation, preprocessing, key)  # sometimes decoded at half the size
        assert (near.int() - exact.int()).abs().float().mean() < 4


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(),
        Augmentation(flip=0.5),
        Augmentation(crop="shift"),
        Augmentation(crop="shift", shift=0, flip=1.0),
        Augmentation(crop="shift", shift=3, flip=0.5),
        Augmentation(crop="shift", shift=40),
    ],
)
def test_batch_path_equals_image_path(augmentation: Augmentation, channels: int) -> None:
    assert can_augment_as_batch(augmentation)
    preprocessing = Preprocessing(image_size=(28, 20), crop=1.0, **(GRAY if channels == 1 else {}))
    images = np.random.default_rng(0).integers(0, 256, (30, 28, 20, channels), dtype=np.uint8)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    kept, given_keys = pixels.clone(), make_view_keys(0, 1, np.arange(30), 0)
    mine = shift_and_flip_batch(pixels, augmentation, given_keys)
    for image, key, each in zip(images, given_keys.tolist(), mine, strict=True):
        assert torch.equal(each, augment_image(image, augmentation, preprocessing, key))
    assert torch.equal(pixels, kept)


def test_shifts_cover_the_full_range() -> None:
    pixels = torch.arange(20, dtype=torch.uint8).expand(500, 1, 20, 20).contiguous()
    mine = shift_and_flip_batch(pixels, Augmentation(crop="shift", shift=2), make_view_keys(0, 0, np.arange(500), 0))
    middle = mine[:, 0, 10, 10].int() - 10
    assert sorted(set(middle.tolist())) == [-2, -1, 0, 1, 2]
    assert torch.bincount(middle + 2).min() > 60
    assert mine[middle == -2][0, 0, 0].tolist()[:4] == [2, 1, 0, 1]  # mirrored at the border


def test_flips_occur_at_the_given_rate() -> None:
    pixels = torch.arange(4, dtype=torch.uint8).expand(4000, 1, 4, 4).contiguous()
    mine = shift_and_flip_batch(pixels, Augmentation(flip=0.3), make_view_keys(0, 0, np.arange(4000), 0))
    assert abs(int((mine[:, 0, 0, 0] == 3).sum()) - 1200) < 5 * 840**0.5


@pytest.mark.parametrize("changed", [{"crop": "resized"}, {"policy": "rand"}, {"jitter": 0.1}])
def test_which_augmentations_need_single_images(changed: dict[str, Any]) -> None:
    assert not can_augment_as_batch(Augmentation(**changed))


def test_unreadable_images_are_one_line_errors() -> None:
    for crop in ("center", "resized"):
        with pytest.raises(DataError, match="is not an image"):
            augment_image(b"text", Augmentation(crop=crop), Preprocessing(), 0)
        with pytest.raises(ConfigError, match="2 means; expected 3, or 1"):
            augment_image(make_image(), Augmentation(crop=crop), Preprocessing(mean=(0.5, 0.5), std=(1, 1)), 0)


def make_policy_image(rows: int = 60, columns: int = 80, seed: int = 0) -> Image.Image:
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
    image = make_policy_image()
    hparams: Any = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
    operation: Any = theirs.AugmentOp(IN_TIMM[name], prob=1.0, magnitude=level * 10, hparams=hparams)  # pyright: ignore
    for sign in (1, -1) if name in SIGNED_OPERATIONS else (1,):
        monkeypatch.setattr(theirs, "_randomly_negate", partial(mul, sign))
        mine = apply_operation(image, name, sign * rand_augment_argument(name, level), WARP)
        if (name, level) == ("posterize", 1.0):  # 0 bits, which recent Pillow refuses
            assert same(mine, Image.new("RGB", image.size))
        else:
            assert same(mine, operation(image))


@pytest.mark.parametrize("name", ["brightness", "contrast", "color", "sharpness"])
@pytest.mark.parametrize("more", [-0.9, -0.3, 0.0, 0.5])
def test_enhancements_equal_torchvision(name: str, more: float) -> None:
    adjust: Any = getattr(tv, f"adjust_{'saturation' if name == 'color' else name}")
    assert same(apply_operation(make_policy_image(), name, more, WARP), adjust(make_policy_image(), 1 + more))
    assert (more == 0) == same(apply_operation(make_policy_image(), name, more, WARP), make_policy_image())


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
    image = make_policy_image()
    mine = image
    for name, _, magnitude in IMAGENET_POLICY[pair]:
        amount = auto_augment_argument(name, magnitude / 9)
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
    image = make_policy_image()
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
    image = make_policy_image()
    gray: Any = tv.to_grayscale(image, 3)
    tv_solarize: Any = tv.solarize
    solarized = tv_solarize(image, 128)
    counts: Counter[str] = Counter()
    for seed in range(300):
        mine = policies.three_augment(image, Random(seed))
        kind = "gray" if same(mine, gray) else "solarized" if same(mine, solarized) else "blurred"
        counts[kind] += 1
        if kind == "blurred":
            assert np.asarray(mine).std() <= np.asarray(image).std()
    assert all(70 < counts[kind] < 130 for kind in ("gray", "solarized", "blurred"))


def test_randaugment_draws_uniformly_and_applies_half(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, float]] = []

    def note(image: Image.Image, name: str, amount: float, warp: WarpOptions) -> Image.Image:
        done.append((name, amount))
        return image

    monkeypatch.setattr(policies, "apply_operation", note)
    augmentation = Augmentation(policy="rand")
    for seed in range(3000):
        apply_policy_and_jitter(make_policy_image(4, 4), augmentation, Preprocessing(), Random(seed))
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
    gray=st.booleans(),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_mode_and_size_are_kept_and_result_depends_only_on_the_key(
    policy: Any, strength: float, gray: bool, rows: int, columns: int, seed: int
) -> None:
    image = make_policy_image(rows, columns).convert("L" if gray else "RGB")
    kept = image.copy()
    preprocessing = Preprocessing(mean=(0.5,) * (1 if gray else 3), std=(0.5,) * (1 if gray else 3))
    augmentation = Augmentation(policy=policy, jitter=strength)
    mine = apply_policy_and_jitter(image, augmentation, preprocessing, Random(seed))
    assert (mine.mode, mine.size) == (image.mode, image.size)
    assert same(mine, apply_policy_and_jitter(image, augmentation, preprocessing, Random(seed)))
    assert same(image, kept)


def test_zero_strength_changes_nothing() -> None:
    image = make_policy_image()
    for seed in range(20):
        for augmentation in (Augmentation(), Augmentation(policy="rand", operations=0)):
            assert same(apply_policy_and_jitter(image, augmentation, Preprocessing(), Random(seed)), image)
        assert same(policies.color_jitter(image, 0, Random(seed)), image)
    for name in SIGNED_OPERATIONS:
        assert same(apply_operation(image, name, 0, WARP), image)


def test_uncovered_pixels_have_the_mean_color(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocessing = Preprocessing(mean=(0.485, 0.456, 0.406), std=(1, 1, 1))
    options: list[WarpOptions] = []

    def note(image: Image.Image, warp: WarpOptions, random: Random) -> Image.Image:
        options.append(warp)
        return image

    monkeypatch.setattr(policies, "auto_augment", note)
    apply_policy_and_jitter(make_policy_image(), Augmentation(policy="auto"), preprocessing, Random(0))
    assert options == [WARP]
    shifted = apply_operation(make_policy_image(), "translate_x", 0.5, WARP)
    assert ImageChops.difference(shifted.crop((40, 0, 80, 60)), Image.new("RGB", (40, 60), FILL)).getbbox() is None


@pytest.mark.parametrize("channels", [1, 3])
def test_normalize_is_bit_identical_to_preprocess_image(channels: int) -> None:
    preprocessing = Preprocessing(
        image_size=(20, 30), mean=(0.485, 0.456, 0.406)[:channels], std=(0.229, 0.224, 0.225)[:channels]
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    pixels = torch.from_numpy(np.array(resize_and_crop(image, preprocessing)).reshape(20, 30, channels)).permute(
        2, 0, 1
    )
    expected = torch.from_numpy(preprocess_image(image, preprocessing))
    assert torch.equal(normalize(pixels, preprocessing), expected)
    assert torch.equal(normalize(pixels.expand(2, -1, -1, -1), preprocessing), expected.expand(2, -1, -1, -1))


def test_erasing_changes_one_rectangle_at_the_given_rate() -> None:
    images = torch.zeros(2000, 3, 24, 32)
    erased = random_erase(images, make_view_keys(0, 0, np.arange(2000), 0), 0.25)
    assert not images.any()
    hit = (erased != 0).any(1)
    assert abs(int(hit.any(-1).any(-1).sum()) - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5
    for mask in hit[hit.any(-1).any(-1)]:
        assert torch.equal(mask, mask.any(1)[:, None] & mask.any(0))  # a full rectangle
        height, width = int(mask.any(1).sum()), int(mask.any(0).sum())
        assert 0.01 < height * width / (24 * 32) < 0.36  # the sides are rounded
        assert 0.2 < height / width < 5
    noise = erased[erased != 0]
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


def test_erased_rectangles_are_distributed_as_in_timm() -> None:
    count = 3000
    mine = (random_erase(torch.zeros(count, 1, 32, 32), make_view_keys(0, 0, np.arange(count), 0), 1.0) != 0).float()
    create: Any = RandomErasing
    other = (create(1.0, mode="pixel", device="cpu")(torch.zeros(count, 1, 32, 32)) != 0).float()
    assert (mine.mean(0) - other.mean(0)).abs().max() < 5 * (2 * 0.25 / count) ** 0.5  # how often a pixel is erased
    areas, theirs_ = mine.mean((1, 2, 3)), other.mean((1, 2, 3))
    for share in (0.1, 0.5, 0.9):
        assert abs(float(areas.quantile(share)) - float(theirs_.quantile(share))) < 0.02


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**64 - 1))
def test_erasing_depends_only_on_the_key(rows: int, columns: int, channels: int, key: int) -> None:
    images = torch.zeros(3, channels, rows, columns)
    given_keys = np.array([key, 1, 2], np.uint64)
    together = random_erase(images, given_keys, 1.0)
    assert together.shape == images.shape
    assert torch.equal(together[:1], random_erase(images[:1], given_keys[:1], 1.0))
    assert torch.equal(random_erase(images, given_keys, 0.0), images)
    assert random_erase(images.half(), given_keys, 1.0).dtype == torch.float16


def batch(count: int = 8, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(count, 3, size, size), torch.arange(count) % 5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing_equals_timm(smoothing: float) -> None:
    _, labels = batch()
    mixup_target: Any = timm_mixup.mixup_target
    expected = mixup_target(labels, 5, lam=1.0, smoothing=smoothing)
    assert torch.allclose(smooth_labels(labels, 5, smoothing), expected, atol=1e-7)
    images, labels = batch()
    mixed, targets = mixup_or_cutmix(images, labels, 5, Augmentation(smoothing=smoothing), 0)
    assert mixed is images
    assert torch.allclose(targets, expected, atol=1e-7)


def test_mixup_equals_timm_with_neighbors_mixed() -> None:
    images, labels = batch()
    partner = torch.arange(8) ^ 1
    mixup_target: Any = timm_mixup.mixup_target
    for key in range(20):
        mixed, targets = mixup_or_cutmix(images, labels, 5, Augmentation(mixup=0.8, smoothing=0.1), key)
        kept = Random(key).betavariate(0.8, 0.8)
        assert torch.allclose(mixed, images * kept + images[partner] * (1 - kept), atol=1e-6)
        for i in range(8):  # timm mixes the first with the last
            expected = mixup_target(labels[[i, i ^ 1]], 5, lam=kept, smoothing=0.1)[0]
            assert torch.allclose(targets[i], expected, atol=1e-6)


def test_cutmix_targets_match_the_pasted_area() -> None:
    images = torch.arange(8.0)[:, None, None, None].expand(8, 3, 16, 24)
    labels = torch.arange(8)
    for key in range(50):
        mixed, targets = mixup_or_cutmix(images, labels, 8, Augmentation(cutmix=1.0), key)
        own = (mixed == images).all(1)
        assert ((mixed == images) | (mixed == images[torch.arange(8) ^ 1])).all()
        pasted = ~own[0]
        assert torch.equal(pasted, pasted.any(1)[:, None] & pasted.any(0))
        kept = own.float().mean((1, 2))
        assert torch.allclose(targets.diagonal(), kept, atol=1e-6)
        assert torch.allclose(targets[torch.arange(8), torch.arange(8) ^ 1], 1 - kept, atol=1e-6)
    assert torch.equal(images[:, 0, 0, 0], torch.arange(8.0))


def test_cutmix_box_equals_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    rand_bbox: Any = timm_mixup.rand_bbox
    for seed in range(200):
        random = Random(seed)

        def randint(low: int, high: int, size: None, random: Random = random) -> int:
            return random.randrange(low, high)

        monkeypatch.setattr(np.random, "randint", randint)
        kept = seed / 200
        top, bottom, left, right = rand_bbox((3, 17, 30), kept)
        assert random_cutmix_box(17, 30, kept, Random(seed)) == (top, left, bottom - top, right - left)


def test_mixup_and_cutmix_alternate() -> None:
    images, labels = torch.stack([torch.zeros(1, 9, 9), torch.ones(1, 9, 9)]), torch.arange(2)
    cut = 0
    for key in range(400):
        mixed, _ = mixup_or_cutmix(images, labels, 2, Augmentation(mixup=50, cutmix=50), key)
        cut += bool(((mixed == 0) | (mixed == 1)).all())
    assert abs(cut - 200) < 50


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 9),
    mixup=st.sampled_from([0.0, 0.01, 0.8, 5.0]),
    cutmix=st.sampled_from([0.0, 0.01, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    key=st.integers(0, 2**64 - 1),
)
def test_targets_sum_to_one_and_even_splits_mix_the_same_way(
    count: int, mixup: float, cutmix: float, smoothing: float, key: int
) -> None:
    images, labels = batch(count, 7)
    augmentation = Augmentation(mixup=mixup, cutmix=cutmix, smoothing=smoothing)
    mixed, targets = mixup_or_cutmix(images, labels, 5, augmentation, key)
    assert mixed.shape == images.shape
    assert mixed.dtype == images.dtype
    assert torch.allclose(targets.sum(1), torch.ones(count), atol=1e-5)
    assert (targets >= 0).all()
    halves = [
        mixup_or_cutmix(images[at : at + 2], labels[at : at + 2], 5, augmentation, key) for at in range(0, count, 2)
    ]
    assert torch.equal(torch.cat([half[0] for half in halves]), mixed)
    assert torch.equal(torch.cat([half[1] for half in halves]), targets)
    if count % 2:
        assert torch.equal(mixed[-1], images[-1])
        assert torch.equal(targets[-1:], smooth_labels(labels[-1:], 5, smoothing))
