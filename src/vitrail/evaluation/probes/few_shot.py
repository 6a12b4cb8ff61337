"""Few-shot classification by regularised least squares in closed form, as in big_vision's fewshot_lsr.

Features are standardised by the shots of all classes, as in big_vision. Of two images, every feature would become −1 or
1, however little it says: if there are only a few, all images of the bank are used, whose labels take no part.
N images, D width, C classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation.feature_rows import STD_OFFSET, FeatureRows, compute_mean_and_std, iterate_rows, take_rows

REGULARISATION = 2.0**10  # λ
BIAS_COLUMN = 100.0  # large, so that the bias is hardly regularised
QUERIES_AT_ONCE = 4096
MIN_IMAGES_FOR_STD = 10


def measure_few_shot(
    bank: FeatureRows,
    labels: NDArray[np.int64],
    queries: FeatureRows,
    query_labels: NDArray[np.int64],
    *,
    classes: int,
    shots: Sequence[int],
    seeds: Sequence[int],
) -> dict[int, tuple[float, ...]]:
    """Accuracy on the queries for each number of shots, by seed."""
    found: dict[int, list[float]] = {count: [] for count in shots}
    of_bank = compute_mean_and_std(bank) if classes * min(shots, default=1) < MIN_IMAGES_FOR_STD else None
    for seed in seeds:
        by_class = permute_classes(labels, classes, seed)
        for count in shots:
            chosen = np.concatenate([indices[:count] for indices in by_class])
            few, known = take_rows(bank, chosen), of_bank if len(chosen) < MIN_IMAGES_FOR_STD else None
            predicted = classify_by_least_squares(few, labels[chosen], queries, classes, known)
            found[count].append(float((predicted == query_labels).mean()))
    return {count: tuple(accuracies) for count, accuracies in found.items()}


def permute_classes(labels: NDArray[np.int64], classes: int, seed: int) -> list[NDArray[np.int64]]:
    """The indices of each class in random order."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]


def classify_by_least_squares(
    features: Tensor,
    labels: NDArray[np.int64],
    queries: FeatureRows,
    classes: int,
    mean_and_std: tuple[Tensor, Tensor] | None = None,
) -> NDArray[np.int64]:
    """The class of each query, from features (N, D) with labels (N,); by default they standardise both."""
    features = features.double()
    mean, std = mean_and_std or (features.mean(0), features.std(0, correction=0) + STD_OFFSET)
    targets = 2 * F.one_hot(torch.from_numpy(labels), classes).double() - 1
    weights = solve_ridge(append_bias_column((features - mean) / std), targets)
    predicted = list[Tensor]()
    for part in iterate_rows(queries, QUERIES_AT_ONCE):
        predicted.append((append_bias_column((part.double() - mean) / std) @ weights).argmax(-1))
    return torch.cat(predicted).numpy()


def append_bias_column(features: Tensor) -> Tensor:
    return F.pad(features, (0, 1), value=BIAS_COLUMN)


def solve_ridge(x: Tensor, targets: Tensor, strength: float = REGULARISATION) -> Tensor:
    """The w that minimises ‖x·w − targets‖² + λ‖w‖²: (N, D), (N, C) → (D, C); the smaller system is solved."""
    count, width = x.shape
    small = x.T @ x if count >= width else x @ x.T
    small.diagonal().add_(strength)
    factor = torch.linalg.cholesky(small)
    if count >= width:
        return torch.cholesky_solve(x.T @ targets, factor)
    return x.T @ torch.cholesky_solve(targets, factor)
