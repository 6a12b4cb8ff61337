"""Public ViT-Ti and DeiT-Ti on real photos: maps are meaningful, and attention distance grows with depth."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vitrail.data.images.datasets import open_data
from vitrail.data.images.image_items import evenly_spaced_indices
from vitrail.inspection.attention.attention_distance import correlate_ranks_with_depth
from vitrail.inspection.model_figures import OCCLUSION_SHARES, look

WEIGHTS = ("vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", "deit_tiny_patch16_224.pth")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.*does not specify")
@pytest.mark.parametrize("name", WEIGHTS)
def test_attended_patches_matter(name: str, shared: Callable[[str], Path]) -> None:
    photos = open_data(shared("imagenet-val-1000"), val_share=1.0).val
    assert photos is not None
    result = look(shared(f"weights/{name}"), map(photos.source, evenly_spaced_indices(len(photos), 200)))
    assert result.images == 200
    curves, at = result["occlusion"].arrays, OCCLUSION_SHARES.index(0.3)
    assert (curves["least"] - curves["most"])[:, at].mean() >= 0.15
    assert curves["most"][:, at].mean() < curves["chance"][:, at].mean() < curves["least"][:, at].mean()
    assert correlate_ranks_with_depth(result["attention_distance"].arrays["distances"].mean(-1)) > 0.9
