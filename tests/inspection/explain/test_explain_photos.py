"""Public weights on real photos give maps that are finite, not flat, and different for each photo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vitrail
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer

REAL: dict[str, tuple[str, str, Preprocessing]] = {
    "ViT-Ti": (
        "vit_tiny_patch16_224",
        "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors",
        Preprocessing(crop=0.875),
    ),
    "DeiT-Ti": (
        "deit_tiny_patch16_224",
        "weights/deit_tiny_patch16_224.pth",
        Preprocessing(crop=0.875, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    ),
}


@pytest.mark.parametrize("key", REAL)
def test_rollout_of_real_photos(key: str, shared: Callable[[str], Path]) -> None:
    name, weights, preprocessing = REAL[key]
    path, photos = shared(weights), sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::50]
    model = vitrail.create(name)
    model.load_state_dict(
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)["model"]
    )
    subject = Explainer(model, preprocessing=preprocessing)
    assert len(photos) == 20
    result = list[Any]()
    for part in (photos[start : start + 5] for start in range(0, 20, 5)):
        _, maps = subject.compute_maps(subject.loaded.make_batch(part), subject.resolve_options(ExplainOptions()))
        assert maps.shape == (5, 1, 1, 14, 14)
        assert np.isfinite(maps).all()
        assert maps.min() >= 0
        np.testing.assert_allclose(maps.sum((-1, -2)), 1, atol=1e-5)
        assert (maps.std((-1, -2)) > 0.1 / 196).all()  # not flat
        result.extend(maps.reshape(5, 196))
    alike = np.corrcoef(result)[~np.eye(20, dtype=bool)]
    assert alike.mean() < 0.9  # not the same for every photo
