"""Sizes, windows and stages that a model cannot have: one line that says what fits, and exit code 2."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vitrail.models.catalog.families import find_preset

Run = Callable[..., Any]
UNFIT_SIZES = {  # preset: image size, and what is expected
    "swin_tiny_patch4_window7_224": ("230x97", "a multiple of 4×4, .* for example to 232×96"),
    "swinv2_tiny_window8_256": ("230", "a multiple of 4×4, .* for example to 232×232"),
    "twins_svt_small": ("200x328", "a multiple of 32×32, .* for example to 192×320"),
    "maxvit_tiny_tf_224": ("200", "a multiple of 32×32, .* for example to 192×192"),
    "nest_tiny_jx": ("200", "a multiple of 16×16, .* for example to 192×192"),
    "regionvit_tiny_224": ("200", "a multiple of 28×28, a region of 7×7 tokens: .* for example to 196×196"),
    "sepvit_tiny_224": ("200", "one of whole windows in every stage: .* for example to 224×224"),
    "scalablevit_small": ("200", "a multiple of 32×32, .* for example to 192×192"),
    "crossformer_tiny_patch4_group7_224": ("200", "a multiple of 32×32, .* for example to 192×192"),
    "levit_128s": ("200", "a multiple of 16×16, .* for example to 192×192"),
    "pit_ti_224": ("230", "a multiple of 8 of at least 16: .* for example to 232×232"),
    "beit_base_patch16_224": ("200", "a multiple of 16×16, .* for example to 192×192"),
    "eva02_tiny_patch14_224": ("230", "a multiple of 14×14, .* for example to 224×224"),
    "pvt_v2_b0": ("7", "at most 2, or images of at least 32×32 pixels"),
    "cvt_13_224": ("2", "at least 3×3: resize it"),
    "convnext_tiny": ("31", "at least 32×32, a position of the last stage: enlarge it"),
}
ANY_SIZE = ("mobilevit_xxs", "crossvit_tiny_240", "cvt_13_224", "pvt_v2_b0", "convnext_tiny")
WINDOWS = {  # preset: a window that is larger than the map
    "swin_tiny_patch4_window7_224": "windows=57",
    "twins_svt_small": "windows=[7,7,7,57]",
    "scalablevit_small": "windows=[57,7,7,7]",
    "crossformer_tiny_patch4_group7_224": "windows=[57,7,7,7]",
    "sepvit_tiny_224": "odd_windows=[7,112,14,7]",
    "maxvit_tiny_tf_224": "window=14",
    "regionvit_tiny_224": "window=57",
}
STAGES = (
    *("swin_tiny_patch4_window7_224", "twins_svt_small", "maxvit_tiny_tf_224", "nest_tiny_jx", "regionvit_tiny_224"),
    *("sepvit_tiny_224", "scalablevit_small", "crossformer_tiny_patch4_group7_224", "levit_128s", "cvt_13_224"),
    *("pvt_v2_b0", "pit_ti_224", "convnext_tiny"),
)


def get_error(vitrail_: Run, name: str, *options: str) -> str:
    done = vitrail_("summary", name, *options)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
    assert len(done.err) < 250
    return done.err


@pytest.mark.parametrize("name", UNFIT_SIZES)
def test_a_size_that_does_not_fit(vitrail_: Run, name: str) -> None:
    size, expected = UNFIT_SIZES[name]
    error = get_error(vitrail_, name, "--image-size", size)
    assert re.search(f"; expected {expected}", error), error
    near = re.search(r"(?:to|at least) (\d+)×(\d+)", error)
    assert near is not None
    replace(find_preset(name)[1], image_size=(int(near[1]), int(near[2])))  # what is named fits


@pytest.mark.parametrize("name", ANY_SIZE)
def test_models_that_take_any_size(name: str) -> None:
    replace(find_preset(name)[1], image_size=(97, 331))


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_larger_than_the_map(vitrail_: Run, name: str) -> None:
    error = get_error(vitrail_, name, "--set", WINDOWS[name])
    assert re.search(r"a window of \d+|a region of 57×57 tokens", error), error
    near = re.search(r"(\d+)×(\d+)(?: pixels|$)[^×]*$", error)
    assert near is not None, error
    _, preset = find_preset(name)
    field, value = WINDOWS[name].split("=")
    replace(preset, image_size=(int(near[1]), int(near[2])), **{field: json.loads(value)})  # what is named fits


@pytest.mark.parametrize("name", STAGES)
def test_stages_of_unequal_length(vitrail_: Run, name: str) -> None:
    error = get_error(vitrail_, name, "--set", "stages=[2,2]", "--set", "widths=[32]")
    assert error.startswith("vitrail: widths is (32,) for 2 stages; expected 2 numbers, one per stage")


def test_stages_of_unequal_length_in_a_model_with_convolutions(vitrail_: Run) -> None:
    error = get_error(vitrail_, "mobilevit_xxs", "--set", "widths=[16,24]")
    assert "widths is (16, 24) for 5 stages; expected 5 numbers" in error


def test_one_image_has_no_batch_statistics_in_a_summary(vitrail_: Run) -> None:
    """The last map of this size has one place."""
    small = ("--set", "stages=[0,0,0,0,1]", "--set", "token_widths=[0,0,0,0,16]")
    assert vitrail_("summary", "mobilevit_xxs", "--image-size", "7", "--depth", "1", *small).code == 0
