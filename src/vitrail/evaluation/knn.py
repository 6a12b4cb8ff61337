"""k-nearest-neighbour classification of features: weighted votes by cosine similarity (Wu 2018; Caron 2021)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KNN_TEMPERATURE = 0.07  # τ
QUERIES_AT_ONCE = 1024


def classify_by_neighbours(
    bank: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    counts: Sequence[int] = (20,),
    temperature: float = KNN_TEMPERATURE,
) -> dict[int, Tensor]:
    """The class of each query (Q, D) for each number k of neighbours in the bank (N, D): {k: (Q,)}.

    Each of the k most similar features votes for its label with exp(similarity / τ).
    """
    bank, classes = F.normalize(bank, dim=-1), int(labels.max()) + 1
    found: dict[int, list[Tensor]] = {count: [] for count in counts}
    for part in queries.split(QUERIES_AT_ONCE):
        similarities, places = (F.normalize(part, dim=-1) @ bank.T).topk(min(max(counts), len(bank)), dim=-1)
        weights, votes = (similarities / temperature).exp(), F.one_hot(labels[places], classes).to(part.dtype)
        for count in counts:
            scores = torch.einsum("qk,qkc->qc", weights[:, :count], votes[:, :count])
            found[count].append(scores.argmax(-1))
    return {count: torch.cat(parts) for count, parts in found.items()}
