"""The reference is compared with timm, which reads the same file with its own loader."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.google_vit_reference import forward, random_weights, tokens
from timm.models.vision_transformer import VisionTransformer
from torch import nn

TOLERANCE = 1e-5


def test_plain_model_equals_timm(tmp_path: Path) -> None:
    weights = random_weights(layout="original", image=(32, 48))
    saved: Any = weights  # keys with slashes are not keywords
    np.savez(tmp_path / "weights.npz", **saved)
    images = np.random.default_rng(1).standard_normal((2, 32, 48, 3))

    theirs = VisionTransformer(
        img_size=(32, 48),
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2,
        num_classes=5,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        act_layer=partial(nn.GELU, approximate="tanh"),
    ).eval()
    theirs.load_pretrained(str(tmp_path / "weights.npz"))
    with torch.inference_mode():
        inputs = torch.from_numpy(images.transpose(0, 3, 1, 2)).float()
        their_tokens, logits = theirs.forward_features(inputs).numpy(), theirs(inputs).numpy()

    assert logits.std() > 0.1
    assert np.abs(tokens(weights, images) - their_tokens).max() <= TOLERANCE
    assert np.abs(forward(weights, images) - logits).max() <= TOLERANCE
