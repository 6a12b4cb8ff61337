"""Each policy is compared with the code of its owner, the patch kernel with timm."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
import torchvision.models.vision_transformer as torchvision_vit
import transformers
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.checkpoint.resample import ResamplingPolicy, resample_patch_kernel, resample_positions
from vitrail.layers.positions import Grid, resample

GRIDS: list[tuple[Grid, Grid]] = [((14, 14), (24, 24)), ((14, 14), (7, 7)), ((16, 12), (24, 18))]


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_timm_policy_equals_timm(old: Grid, new: Grid) -> None:
    table = torch.randn(1, 2 + old[0] * old[1], 8)
    expected = resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=2)
    assert torch.equal(resample_positions(table, old, new, "timm"), expected)
    assert torch.equal(resample(table, old, new), expected), "a dynamic model at run time"


@pytest.mark.parametrize(("old", "new"), [grids for grids in GRIDS if grids[0][0] == grids[0][1]])
def test_deit_policy_equals_transformers(old: Grid, new: Grid) -> None:
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model: Any = transformers.ViTModel(transformers.ViTConfig(image_size=old[0] * 4, patch_size=4, **sizes))
    embeddings = model.embeddings
    torch.nn.init.normal_(embeddings.position_embeddings)
    expected = embeddings.interpolate_pos_encoding(torch.zeros(1, new[0] * new[1] + 1, 8), new[0] * 4, new[1] * 4)
    torch.testing.assert_close(resample_positions(embeddings.position_embeddings, old, new, "deit"), expected)


@pytest.mark.parametrize(("old", "new"), [grids for grids in GRIDS if grids[0][0] == grids[0][1]])
def test_torchvision_policy_equals_torchvision(old: Grid, new: Grid) -> None:
    table = torch.randn(1, 1 + old[0] * old[1], 8)
    state: Any = {"encoder.pos_embedding": table}
    expected = torchvision_vit.interpolate_embeddings(new[0] * 4, 4, state)["encoder.pos_embedding"]
    assert torch.equal(resample_positions(table, old, new, "torchvision"), expected)


def zoom(image: Tensor, new: Grid) -> Tensor:
    """scipy.ndimage.zoom of order 1 written out: corners stay, and samples are interpolated linearly."""
    for axis, size in enumerate(new):
        old = image.shape[axis]
        places = torch.arange(size) * ((old - 1) / (size - 1))
        low = places.floor().long().clamp(max=old - 2)
        share = (places - low).view([-1 if axis == 0 else 1, -1 if axis == 1 else 1, 1])
        image = image.index_select(axis, low) * (1 - share) + image.index_select(axis, low + 1) * share
    return image


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_google_policy_equals_scipy_zoom(old: Grid, new: Grid) -> None:
    table = torch.randn(1, 1 + old[0] * old[1], 8)
    expected = zoom(table[0, 1:].unflatten(0, old), new).flatten(0, 1)
    resampled = resample_positions(table, old, new, "google")
    torch.testing.assert_close(resampled[0, 1:], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(resampled[:, :1], table[:, :1])


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_dino_policy_equals_dino(old: Grid, new: Grid) -> None:
    """DINO's model file uses a scale factor of (size + 0.1) / old size."""
    table = torch.randn(1, 1 + old[0] * old[1], 8)
    image = table[:, 1:].reshape(1, *old, 8).permute(0, 3, 1, 2)
    scale = ((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1])
    expected = F.interpolate(image, scale_factor=scale, mode="bicubic").permute(0, 2, 3, 1).reshape(1, -1, 8)
    resampled = resample_positions(table, old, new, "dino")
    assert resampled.shape == (1, 1 + new[0] * new[1], 8)
    assert torch.equal(resampled[:, 1:], expected)


def test_the_policies_differ() -> None:
    table = torch.randn(1, 196, 8)
    resampled = [resample_positions(table, (14, 14), (24, 24), policy) for policy in get_args(ResamplingPolicy)]
    for number, one in enumerate(resampled):
        for other in resampled[:number]:
            assert (one - other).norm() / one.norm() > 0.05


def test_an_unknown_policy_is_refused() -> None:
    policy: Any = "tim"
    with pytest.raises(ConfigError, match=r"unknown position policy 'tim'; did you mean 'timm'\?"):
        resample_positions(torch.randn(1, 4, 8), (2, 2), (3, 3), policy)


@pytest.mark.parametrize("new", [(8, 8), (32, 32), (12, 20)])
def test_patch_kernels_equal_timm(new: Grid) -> None:
    kernel = torch.randn(6, 3, 16, 16)
    expected = resample_patch_embed(kernel, list(new))
    torch.testing.assert_close(resample_patch_kernel(kernel, new), expected, rtol=1e-4, atol=1e-4)


def test_a_resized_kernel_gives_the_same_output_for_resized_patches() -> None:
    kernel, patches = torch.randn(6, 3, 8, 8), torch.randn(2, 3, 8, 8)
    larger = F.interpolate(patches, size=(16, 16), mode="bicubic", antialias=True)
    before, after = F.conv2d(patches, kernel), F.conv2d(larger, resample_patch_kernel(kernel, (16, 16)))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
