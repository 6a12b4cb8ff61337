"""What can be measured on features without labels: their spread, and the number of directions that they use."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.distributed import Ranks

MAX_RANK_FEATURES = 2048  # rows of the singular value decomposition


def feature_spread(features: Tensor, ranks: Ranks | None = None) -> Tensor:
    """√D times the mean standard deviation of L2-normalised features (B, D): 1 if isotropic, 0 if collapsed.

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
