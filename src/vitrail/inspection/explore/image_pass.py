"""One forward pass of one photo, and every figure that follows from it.

L layers, H heads, N = E + n tokens: E prefix tokens and n = h·w patches, D width, C classes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import VitrailError
from vitrail.export.agreement import NOT_FINITE_MESSAGE
from vitrail.inspection.attention.attention_distance import attention_distance
from vitrail.inspection.attention.capture import (
    AttentionCapture,
    capture_attention,
    capture_tokens,
    compute_classifier_token_weights,
    has_token_states,
)
from vitrail.inspection.attention.rollout import (
    fill_missing_queries,
    gradient_relevance,
    patch_map_from_row,
    token_gradient_rollout,
)
from vitrail.inspection.explain.explainer import Explainer
from vitrail.inspection.representation.token_statistics import token_norms

LENS_CLASSES = 3  # most likely classes after each layer


@dataclass(frozen=True, eq=False)
class ImagePass:
    """What a pass over pixels (1, C, H, W) has left: logits, attention, and the tokens after each block."""

    explainer: Explainer
    logits: Tensor  # (1, C)
    captured: AttentionCapture
    states: list[Tensor]  # after the embedding, each block and the final norm, each (1, N, D)
    image_size: tuple[int, int]

    @cached_property
    def maps(self) -> list[NDArray[np.float32]]:
        """All tokens to all tokens, (H, N, N) of each layer; tokens that are not queries attend to themselves."""
        return [fill_missing_queries(each[0].float().cpu().numpy()) for each in self.captured.maps]

    @property
    def grid(self) -> tuple[int, int]:
        return self.captured.patch_grid

    @property
    def readout(self) -> NDArray[np.float32]:
        """Weight of each token in what the classifier reads: (N)."""
        return compute_classifier_token_weights(self.captured).float().cpu().numpy()[0]

    def compute_relevance(self, index: int, first: int = 0) -> NDArray[np.float32]:
        """The patches that support a class, by gradient rollout up to each layer from `first` on: (L', h, w)."""
        gradients = [each.float().cpu().numpy() for each in self.captured.compute_gradients(self.logits[0, index])]
        fused = [
            gradient_relevance(each, fill_gradients(gradient[0], each))[None]
            for each, gradient in zip(self.maps, gradients, strict=True)
        ]
        ones, ends = [np.ones((), np.float32)] * len(fused), range(first + 1, len(fused) + 1)
        rows = [token_gradient_rollout(self.readout, fused[:end], ones[:end]) for end in ends]
        return np.stack([patch_map_from_row(row, self.grid) for row in rows]).astype(np.float32)

    def compute_distances(self) -> NDArray[np.float32]:
        """How far each head looks, in pixels: (L, H), NaN for heads that a layer does not have."""
        patch = self.image_size[0] / self.grid[0], self.image_size[1] / self.grid[1]
        found = [attention_distance(each, self.grid, patch) for each in self.maps]
        most = max(map(len, found))
        padded = [np.pad(each, (0, most - len(each)), constant_values=np.nan) for each in found]
        return np.stack(padded).astype(np.float32)

    def compute_norms(self) -> NDArray[np.float32]:
        """Length of the patches after each layer: (L, h, w)."""
        h, w = self.captured.grids[max(self.captured.grids)]
        norms = [token_norms(each.float().cpu().numpy())[0, -h * w :] for each in self.states_by_layer]
        return np.stack(norms).reshape(-1, h, w).astype(np.float32)

    def compute_lens(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The most likely classes after each layer and their probabilities, (L, K); -1 before all tokens are there."""
        model, last = self.explainer.model, self.states_by_layer[-1]
        count = min(LENS_CLASSES, self.logits.shape[1])
        index = np.full((len(self.states_by_layer), count), -1, np.int32)
        probability = np.zeros(index.shape, np.float32)
        for layer, state in enumerate(self.states_by_layer):
            if state.shape == last.shape:
                with torch.no_grad():
                    logits = model.logits(model.get_submodule(model.final_norm)(state))
                found = logits[0].float().softmax(-1).topk(count)
                index[layer], probability[layer] = found.indices.cpu().numpy(), found.values.cpu().numpy()
        return index, probability

    @property
    def states_by_layer(self) -> list[Tensor]:
        """The tokens after the block of each attention layer."""
        layers, blocks = len(self.explainer.layers), len(self.states) - 2
        per_block = max(1, layers // blocks)
        return [self.states[layer // per_block + 1] for layer in range(layers or blocks)]


def fill_gradients(gradient: NDArray[Any], attended: NDArray[Any]) -> NDArray[Any]:
    """Zeros for rows of tokens that are not queries: (H, Nq, N) → (H, N, N)."""
    return np.pad(gradient, [(0, 0), (0, attended.shape[1] - gradient.shape[1]), (0, 0)])


def run_image_pass(explainer: Explainer, pixels: Tensor, *, gradients: bool) -> ImagePass:
    """Run the model once, with all tokens in the last block: pixels are (1, C, H, W)."""
    model = explainer.model
    layers = None if explainer.layers else []
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        pixels = pixels.clone() if pixels.is_inference() else pixels
        with capture_attention(model, layers, gradients=gradients) as captured:
            if has_token_states(model):
                with capture_tokens(model) as states:
                    logits = model.logits(model.tokens(pixels))
            else:
                states, logits = list[Tensor](), model(pixels)
    if not bool(logits.isfinite().all()):
        raise VitrailError(NOT_FINITE_MESSAGE)
    return ImagePass(explainer, logits, captured, states, (pixels.shape[2], pixels.shape[3]))
