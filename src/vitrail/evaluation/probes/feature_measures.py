"""Measure features (N, D): k-NN, few-shot and linear classification, spread and effective rank.

Features are a tensor in memory, or an array on disk that is read in parts, so that banks of any size fit.
N images, Q queries, D width, C classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.distributed import Ranks

MAX_ROWS_AT_ONCE, MAX_BYTES_AT_ONCE = 65536, 2**27  # read from disk
STD_OFFSET = 1e-5
KNN_TEMPERATURE = 0.07  # τ
KNN_QUERIES_AT_ONCE = 512
REGULARIZATION = 2.0**10  # λ
BIAS_COLUMN = 100.0  # large, so that the bias is hardly regularized
LEAST_SQUARES_QUERIES_AT_ONCE = 4096
MIN_IMAGES_FOR_STD = 10
WEIGHT_DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)  # λ of mean cross-entropy + λ/2·‖W‖², for standardized features
HELD_OUT_SHARE = 0.2
MAX_ITERATIONS = 50  # of L-BFGS, per weight decay; each starts from the solution of the stronger one
MAX_BYTES_IN_MEMORY = 2**30  # of standardized features; more are read from disk in every iteration
MAX_RANK_FEATURES = 2048  # rows of the singular value decomposition


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Some rows of an array on disk, read when they are used."""

    rows: NDArray[np.float32]
    indices: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indices), self.rows.shape[1]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, chosen: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        return self.rows[self.indices[chosen]]


FeatureRows = Tensor | NDArray[np.float32] | SelectedRows


def count_rows_at_once(width: int) -> int:
    """How many rows of `width` numbers are read at once: 65,536, or fewer of wide rows."""
    return max(min(MAX_ROWS_AT_ONCE, MAX_BYTES_AT_ONCE // (4 * width)), 1)


def read_rows(rows: FeatureRows, start: int, stop: int) -> Tensor:
    """The rows from `start` to `stop` as a tensor of float32, copied if they are in a file."""
    part = rows[start:stop]
    return part.float() if isinstance(part, Tensor) else torch.from_numpy(np.array(part, np.float32))


def select_rows(rows: FeatureRows, indices: NDArray[np.int64]) -> Tensor:
    """The rows at these indices as a tensor of float32."""
    if isinstance(rows, Tensor):
        return rows[torch.from_numpy(indices)].float()
    return torch.from_numpy(np.array(rows[indices], np.float32))


def iterate_rows(rows: FeatureRows, rows_at_once: int | None = None) -> Iterator[Tensor]:
    """All rows, in parts of a bounded size."""
    many = rows_at_once or count_rows_at_once(rows.shape[1])
    return (read_rows(rows, start, start + many) for start in range(0, len(rows), many))


def compute_mean_and_std(rows: FeatureRows) -> tuple[Tensor, Tensor]:
    """Mean and biased std of each column, plus a small number, in one pass each: (D,), (D,)."""
    total = sum(part.sum(0, dtype=torch.float64) for part in iterate_rows(rows))
    mean = (torch.as_tensor(total) / len(rows)).float()
    squares = sum((part - mean).square().sum(0, dtype=torch.float64) for part in iterate_rows(rows))
    return mean, (torch.as_tensor(squares) / len(rows)).sqrt().float() + STD_OFFSET


def classify_by_neighbors(
    bank: FeatureRows,
    labels: Tensor,
    queries: Tensor,
    *,
    counts: Sequence[int] = (20,),
    temperature: float = KNN_TEMPERATURE,
    rows_at_once: int | None = None,
) -> dict[int, Tensor]:
    """The class of each query (Q, D) for each number k of neighbors in the bank (N, D): {k: (Q,)}.

    Each of the k most similar features votes for its label with exp(cosine similarity / τ) (Wu 2018; Caron 2021). A k
    above N is N. Only the best k of each query are kept while the bank is read.
    """
    similarities, places = find_most_similar_rows(bank, queries, max(counts), rows_at_once)
    weights, voted = (similarities / temperature).exp(), labels.to(places.device)[places]
    scores = torch.zeros(len(queries), int(labels.max()) + 1, device=weights.device)
    found, done = dict[int, Tensor](), 0
    for count in sorted(counts):
        scores.scatter_add_(1, voted[:, done:count], weights[:, done:count])
        found[count], done = scores.argmax(-1), count
    return {count: found[count] for count in counts}


def find_most_similar_rows(
    bank: FeatureRows, queries: Tensor, count: int, rows_at_once: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine similarities and indices of the `count` most similar rows of the bank, most similar first: (Q, count)."""
    queries, count = F.normalize(queries.float(), dim=-1), min(count, len(bank))
    similarities = queries.new_full((len(queries), count), -torch.inf)
    places = torch.zeros(len(queries), count, dtype=torch.int64, device=queries.device)
    start = 0
    for rows in iterate_rows(bank, rows_at_once):
        part = F.normalize(rows.to(queries.device), dim=-1).T
        for first in range(0, len(queries), KNN_QUERIES_AT_ONCE):
            some = slice(first, first + KNN_QUERIES_AT_ONCE)
            new, indices = (queries[some] @ part).topk(min(count, part.shape[1]))
            similarities[some], chosen = torch.cat([similarities[some], new], dim=1).topk(count)
            places[some] = torch.cat([places[some], indices + start], dim=1).gather(1, chosen)
        start += len(rows)
    return similarities, places


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
    """Accuracy of regularized least squares for each number of shots, by seed, as in big_vision's fewshot_lsr.

    Features are standardized by the shots of all classes, as in big_vision. Of two images, every feature would become
    −1 or 1, however little it says: if there are only a few, all images of the bank are used, without their labels.
    """
    found: dict[int, list[float]] = {count: [] for count in shots}
    of_bank = compute_mean_and_std(bank) if classes * min(shots, default=1) < MIN_IMAGES_FOR_STD else None
    for seed in seeds:
        by_class = permute_classes(labels, classes, seed)
        for count in shots:
            chosen = np.concatenate([indices[:count] for indices in by_class])
            few, known = select_rows(bank, chosen), of_bank if len(chosen) < MIN_IMAGES_FOR_STD else None
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
    """The class of each query, from features (N, D) with labels (N,); by default they standardize both."""
    features = features.double()
    mean, std = mean_and_std or (features.mean(0), features.std(0, correction=0) + STD_OFFSET)
    targets = 2 * F.one_hot(torch.from_numpy(labels), classes).double() - 1
    weights = solve_ridge(append_bias_column((features - mean) / std), targets)
    predicted = list[Tensor]()
    for part in iterate_rows(queries, LEAST_SQUARES_QUERIES_AT_ONCE):
        predicted.append((append_bias_column((part.double() - mean) / std) @ weights).argmax(-1))
    return torch.cat(predicted).numpy()


def append_bias_column(features: Tensor) -> Tensor:
    return F.pad(features, (0, 1), value=BIAS_COLUMN)


def solve_ridge(x: Tensor, targets: Tensor, strength: float = REGULARIZATION) -> Tensor:
    """The w that minimizes ‖x·w − targets‖² + λ‖w‖²: (N, D), (N, C) → (D, C); the smaller system is solved."""
    count, width = x.shape
    small = x.T @ x if count >= width else x @ x.T
    small.diagonal().add_(strength)
    factor = torch.linalg.cholesky(small)
    if count >= width:
        return torch.cholesky_solve(x.T @ targets, factor)
    return x.T @ torch.cholesky_solve(targets, factor)


@dataclass(frozen=True)
class LinearProbe:
    """Multinomial logistic regression on frozen features, and how its weight decay was chosen."""

    weight: Tensor  # (C, D), for standardized features
    bias: Tensor  # (C,)
    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    weight_decay: float
    held_out_accuracy: float

    def predict(self, queries: FeatureRows) -> NDArray[np.int64]:
        parts = ((part - self.mean) / self.std for part in iterate_rows(queries))
        scores = (F.linear(part, self.weight, self.bias) for part in parts)
        return torch.cat([each.argmax(-1) for each in scores]).numpy()


class StandardizedRows:
    """Features with mean 0 and std 1 per column, and their labels, in parts: from memory if they fit."""

    def __init__(self, rows: FeatureRows, labels: NDArray[np.int64]) -> None:
        self.rows, self.labels = rows, torch.from_numpy(labels)
        self.mean, self.std = compute_mean_and_std(rows)
        in_memory = 4 * len(rows) * rows.shape[1] <= MAX_BYTES_IN_MEMORY
        self.stored = torch.cat([*self.standardize_parts()]) if in_memory else None

    def standardize_parts(self) -> Iterator[Tensor]:
        return ((part - self.mean) / self.std for part in iterate_rows(self.rows))

    def iterate(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and labels of the images that are `chosen`, (N,) of bool."""
        many = count_rows_at_once(self.rows.shape[1])
        parts = self.standardize_parts() if self.stored is None else self.stored.split(many)
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
    """Choose the weight decay on a fifth of the training images, then fit all, by L-BFGS."""
    data = StandardizedRows(rows, labels)
    held_out = hold_out(labels, classes, seed)
    start = torch.zeros(classes, rows.shape[1] + 1)
    fits = list[tuple[float, float, Tensor]]()  # accuracy, weight decay, solution
    for decay in sorted(weight_decays, reverse=True):  # from the strongest on: each is near the one before
        start = minimize_cross_entropy(data, ~held_out, decay, start)
        fits.append((measure_accuracy(data, held_out, start), decay, start))
        if fits[-1][0] < max(
            accuracy for accuracy, _, _ in fits
        ):  # weaker ones fit the training images more closely still, and take longer
            break
    accuracy, decay, near = max(fits, key=lambda each: each[0])  # of equal ones the strongest
    solution = minimize_cross_entropy(data, torch.ones_like(held_out), decay, near)
    return LinearProbe(solution[:, :-1], solution[:, -1], data.mean, data.std, decay, accuracy)


def hold_out(labels: NDArray[np.int64], classes: int, seed: int) -> Tensor:
    """A mask of a fifth of each class, but none of a class of one image: (N,) of bool."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for indices in permute_classes(labels, classes, seed):
        count = min(max(round(HELD_OUT_SHARE * len(indices)), 1), len(indices) - 1) if len(indices) else 0
        mask[torch.from_numpy(indices[:count])] = True
    return mask


def minimize_cross_entropy(data: StandardizedRows, chosen: Tensor, decay: float, start: Tensor) -> Tensor:
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


def measure_accuracy(data: StandardizedRows, chosen: Tensor, solution: Tensor) -> float:
    right = sum(
        int((F.linear(part, solution[:, :-1], solution[:, -1]).argmax(-1) == labels).sum())
        for part, labels in data.iterate(chosen)
    )
    return right / max(int(chosen.sum()), 1)


def feature_spread(features: Tensor, ranks: Ranks | None = None) -> Tensor:
    """√D times the mean standard deviation of L2-normalized features (B, D): 1 if isotropic, 0 if collapsed.

    It is that of the features of all processes, which have equally many.
    """
    ranks = ranks or Ranks()
    unit = F.normalize(features.detach().float(), dim=-1)
    count = len(unit) * ranks.world_size
    mean = ranks.all_reduce_sum(unit.mean(0)) / ranks.world_size
    squares = ranks.all_reduce_sum((unit - mean).square().sum(0))
    return (squares / max(count - 1, 1)).sqrt().mean() * unit.shape[-1] ** 0.5


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the singular values' shares (RankMe, Garrido 2022): from 1 to D, for features (B, D).

    A low rank alone is not a collapse: it falls while accuracy rises. Compare runs of one method only.
    """
    x = features[:MAX_RANK_FEATURES].double()
    products = x @ x.T if len(x) < x.shape[1] else x.T @ x  # its eigenvalues: ten times as fast as singular values
    values = torch.linalg.eigvalsh(products).clamp(min=0).sqrt()
    shares = values / values.sum().clamp(min=1e-12) + 1e-7
    return float(torch.exp(-(shares * shares.log()).sum()))
