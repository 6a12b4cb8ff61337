"""k-nearest-neighbour classification of features: weighted votes by cosine similarity (Wu 2018; Caron 2021).

The bank is read in parts and only the best k of each query are kept, so that a bank of any size fits.
Q queries, N rows of the bank, D width.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.evaluation.feature_rows import FeatureRows, iterate_rows

KNN_TEMPERATURE = 0.07  # τ
QUERIES_AT_ONCE = 512


def classify_by_neighbours(
    bank: FeatureRows,
    labels: Tensor,
    queries: Tensor,
    *,
    counts: Sequence[int] = (20,),
    temperature: float = KNN_TEMPERATURE,
    rows_at_once: int | None = None,
) -> dict[int, Tensor]:
    """The class of each query (Q, D) for each number k of neighbours in the bank (N, D): {k: (Q,)}.

    Each of the k most similar features votes for its label with exp(similarity / τ). A k above N is N.
    """
    similarities, places = find_neighbours(bank, queries, max(counts), rows_at_once)
    weights, voted = (similarities / temperature).exp(), labels.to(places.device)[places]
    scores = torch.zeros(len(queries), int(labels.max()) + 1, device=weights.device)
    found, done = dict[int, Tensor](), 0
    for count in sorted(counts):
        scores.scatter_add_(1, voted[:, done:count], weights[:, done:count])
        found[count], done = scores.argmax(-1), count
    return {count: found[count] for count in counts}


def find_neighbours(
    bank: FeatureRows, queries: Tensor, count: int, rows_at_once: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine similarities and indices of the `count` most similar rows of the bank, most similar first: (Q, count)."""
    queries, count = F.normalize(queries.float(), dim=-1), min(count, len(bank))
    similarities = queries.new_full((len(queries), count), -torch.inf)
    places = torch.zeros(len(queries), count, dtype=torch.int64, device=queries.device)
    start = 0
    for rows in iterate_rows(bank, rows_at_once):
        part = F.normalize(rows.to(queries.device), dim=-1).T
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            some = slice(first, first + QUERIES_AT_ONCE)
            new, indices = (queries[some] @ part).topk(min(count, part.shape[1]))
            similarities[some], chosen = torch.cat([similarities[some], new], dim=1).topk(count)
            places[some] = torch.cat([places[some], indices + start], dim=1).gather(1, chosen)
        start += len(rows)
    return similarities, places
