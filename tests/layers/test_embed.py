"""Convolution and unfold give the same tokens for any patch and image size."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.noisy_weights import add_weight_noise

from vitrail.layers.embed import PatchEmbed, patchify

sizes = st.integers(1, 5)


@settings(max_examples=40, deadline=None)
@given(grid=st.tuples(sizes, sizes), patch=st.tuples(sizes, sizes), channels=sizes, width=sizes)
def test_convolution_and_unfold_agree(grid: tuple[int, int], patch: tuple[int, int], channels: int, width: int) -> None:
    convolution = add_weight_noise(PatchEmbed(width, patch, channels))
    unfold = PatchEmbed(width, patch, channels, unfold=True)
    unfold.load_state_dict(convolution.state_dict())
    images = torch.randn(2, channels, grid[0] * patch[0], grid[1] * patch[1])
    assert convolution(images).shape == (2, grid[0] * grid[1], width)
    torch.testing.assert_close(convolution(images), unfold(images), rtol=1e-5, atol=1e-5)


def test_patch_is_flattened_channel_by_channel() -> None:
    images = torch.randn(2, 3, 4, 6)
    patches = patchify(images, (2, 3))
    assert patches.shape == (2, 4, 18)
    assert torch.equal(patches[1, 3], images[1, :, 2:4, 3:6].flatten())


def test_the_papers_example_is_196_patches_of_768_numbers() -> None:
    assert patchify(torch.zeros(1, 3, 224, 224), (16, 16)).shape == (1, 196, 768)
