"""A linear classifier on frozen features: multinomial logistic regression, fitted by L-BFGS.

The weight decay is chosen on a fifth of the training images, then all of them are used. The images that the result is
measured on take no part in the choice. N images, D width, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.evaluation.feature_rows import FeatureRows, compute_mean_and_std, count_rows_at_once, iterate_rows
from vitrail.evaluation.probes.few_shot import permute_classes

WEIGHT_DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # λ of mean cross-entropy + λ/2·‖W‖², for standardised features
HELD_OUT_SHARE = 0.2
MAX_ITERATIONS = 50  # of L-BFGS, per weight decay; each starts from the solution of the stronger one
MAX_BYTES_IN_MEMORY = 2**30  # of standardised features; more are read from disk in every iteration


@dataclass(frozen=True)
class LinearProbe:
    """A fitted classifier, and how its weight decay was chosen."""

    weight: Tensor  # (C, D), for standardised features
    bias: Tensor  # (C,)
    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weight_decay: float
    held_out_accuracy: float

    def predict(self, queries: FeatureRows) -> NDArray[np.int64]:
        parts = ((part - self.mean) / self.std for part in iterate_rows(queries))
        scores = (F.linear(part, self.weight, self.bias) for part in parts)
        return torch.cat([each.argmax(-1) for each in scores]).numpy()


class StandardisedRows:
    """Features with mean 0 and std 1 per column, and their labels, in parts: from memory if they fit."""

    def __init__(self, rows: FeatureRows, labels: NDArray[np.int64]) -> None:
        self.rows, self.labels = rows, torch.from_numpy(labels)
        self.mean, self.std = compute_mean_and_std(rows)
        in_memory = 4 * len(rows) * rows.shape[1] <= MAX_BYTES_IN_MEMORY
        self.stored = torch.cat([*self.standardise_parts()]) if in_memory else None

    def standardise_parts(self) -> Iterator[Tensor]:
        return ((part - self.mean) / self.std for part in iterate_rows(self.rows))

    def iterate(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and labels of the images that are `chosen`, (N,) of bool."""
        many = count_rows_at_once(self.rows.shape[1])
        parts = self.standardise_parts() if self.stored is None else self.stored.split(many)
        for part, labels, some in zip(parts, self.labels.split(many), chosen.split(many), strict=True):
            yield (part, labels) if bool(some.all()) else (part[some], labels[some])


def fit_linear_probe(
    rows: FeatureRows,
    labels: NDArray[np.int64],
    *,
    classes: int,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    seed: int = 0,
) -> LinearProbe:
    """Choose the weight decay on held-out training images, then fit all."""
    data = StandardisedRows(rows, labels)
    held_out = hold_out(labels, classes, seed)
    start = torch.zeros(classes, rows.shape[1] + 1)
    fits = list[tuple[float, float, Tensor]]()  # accuracy, weight decay, solution
    for decay in sorted(weight_decays, reverse=True):  # from the strongest on: each is near the one before
        start = minimise_cross_entropy(data, ~held_out, decay, start)
        fits.append((measure_accuracy(data, held_out, start), decay, start))
        if fits[-1][0] < max(
            accuracy for accuracy, _, _ in fits
        ):  # weaker ones fit the training images more closely still, and take longer
            break
    accuracy, decay, near = max(fits, key=lambda each: each[0])  # of equal ones the strongest
    solution = minimise_cross_entropy(data, torch.ones_like(held_out), decay, near)
    return LinearProbe(solution[:, :-1], solution[:, -1], data.mean, data.std, decay, accuracy)


def hold_out(labels: NDArray[np.int64], classes: int, seed: int) -> Tensor:
    """A mask of a fifth of each class, but none of a class of one image: (N,) of bool."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for indices in permute_classes(labels, classes, seed):
        count = min(max(round(HELD_OUT_SHARE * len(indices)), 1), len(indices) - 1) if len(indices) else 0
        mask[torch.from_numpy(indices[:count])] = True
    return mask


def minimise_cross_entropy(data: StandardisedRows, chosen: Tensor, decay: float, start: Tensor) -> Tensor:
    """Weights and bias (C, D + 1) of the smallest mean cross-entropy + λ/2·‖W‖² over the chosen images."""
    solution, count = start.clone().requires_grad_(), int(chosen.sum())
    optimizer = torch.optim.LBFGS(
        [solution], max_iter=MAX_ITERATIONS, tolerance_grad=1e-5, tolerance_change=1e-5, line_search_fn="strong_wolfe"
    )

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = decay / 2 * solution[:, :-1].square().sum()
        loss.backward()
        total = loss.detach()
        for part, labels in data.iterate(chosen):
            loss = F.cross_entropy(F.linear(part, solution[:, :-1], solution[:, -1]), labels, reduction="sum") / count
            loss.backward()
            total = total + loss.detach()
        return total

    with torch.enable_grad():
        optimizer.step(compute_loss)
    return solution.detach()


def measure_accuracy(data: StandardisedRows, chosen: Tensor, solution: Tensor) -> float:
    right = sum(
        int((F.linear(part, solution[:, :-1], solution[:, -1]).argmax(-1) == labels).sum())
        for part, labels in data.iterate(chosen)
    )
    return right / max(int(chosen.sum()), 1)
