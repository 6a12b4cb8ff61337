"""What a model answers without patches: as if no token could see them, and whatever their pixels are."""

from typing import Any

import numpy as np
import pytest
import torch
from support.attention_models import ATTENTION_CASES, count_hooks, make_attention_model, random_image_batch

from vitrail.errors import ConfigError
from vitrail.inspection.occlusion import grey_out_patches
from vitrail.inspection.patch_removal import can_drop_tokens, predict_without_patches, probabilities_without_patches

GONE = np.array([[[True, False, False], [False, False, True]], [[False, True, False], [True, False, False]]])
NEEDS_GRID = ("layers", "shared", "relative", "rotary", "neighbours")


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_who_can_leave_tokens_out(case: str) -> None:
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
def test_left_out_is_never_seen(case: str) -> None:
    """The same as a mask in every layer that hides them; the head reads none of them."""
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
def test_their_pixels_mean_nothing(case: str) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    other = torch.where(torch.from_numpy(np.kron(GONE, np.ones((1, 16, 16)))[:, None] > 0), pixels + 9, pixels)
    assert not torch.equal(other, pixels)
    torch.testing.assert_close(
        predict_without_patches(model, other, GONE), predict_without_patches(model, pixels, GONE)
    )


@pytest.mark.parametrize("case", ["relative", "rotary", "learned layers", "cct with neighbours"])
def test_else_they_are_grey(case: str) -> None:
    model, pixels = make_attention_model(case), random_image_batch()
    grey = torch.from_numpy(np.stack([grey_out_patches(*each) for each in zip(pixels.numpy(), GONE, strict=True)]))
    with torch.no_grad():
        torch.testing.assert_close(predict_without_patches(model, pixels, GONE), model(grey))


def test_of_each_image_as_many() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 0\] patches of the images to leave out; expected as many of each"):
        predict_without_patches(
            make_attention_model(), random_image_batch(), GONE * np.array([True, False])[:, None, None]
        )


def test_no_hook_is_left_behind() -> None:
    model = make_attention_model()
    with pytest.raises(ConfigError, match="expected"):
        predict_without_patches(model, random_image_batch(size=(16, 16)), GONE)
    assert count_hooks(model) == 0


def test_probabilities_by_share() -> None:
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
