"""Heads between the features and a loss that compares views: projectors, and the prototypes of DINO.

Probes use the features before them.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.distributed import SyncBatchNorm1d


def make_contrastive_projector(width: int, hidden: int, out: int, depth: int) -> nn.Sequential:
    """SimCLR's: `depth` linear layers without bias, each with a batch norm, and a ReLU after all but the last.

    The last batch norm has no offset. Three layers are those of version 2, two those of version 1 (Chen 2020a, b); the
    papers do not mention the batch norms, which the authors' code has in both.
    """
    widths = (width, *(hidden,) * (depth - 1), out)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=False), SyncBatchNorm1d(after), nn.ReLU()]
    layers[-2].register_parameter("bias", None)
    return nn.Sequential(*layers[:-1])


def make_regression_projector(width: int, hidden: int, out: int) -> nn.Sequential:
    """BYOL's, also its predictor: a linear layer with bias, a batch norm, a ReLU, and a linear layer without bias."""
    return nn.Sequential(
        nn.Linear(width, hidden), SyncBatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out, bias=False)
    )


class PrototypeHead(nn.Module):
    """Three linear layers with GELU, then the last layer: (…, D) → (…, K). The names are the authors'."""

    def __init__(self, width: int, hidden_width: int, bottleneck_width: int, prototypes: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden_width),
            nn.GELU(),
            nn.Linear(hidden_width, hidden_width),
            nn.GELU(),
            nn.Linear(hidden_width, bottleneck_width),
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = WeightNormLinear(bottleneck_width, prototypes)

    def forward(self, features: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(features), dim=-1))


class WeightNormLinear(nn.Module):
    """A linear layer without bias whose rows have the lengths `weight_g`, here fixed to 1.

    torch.nn.utils.weight_norm has the same parameters, but a module with it cannot be copied.
    """

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_width, 1), requires_grad=False)
        self.weight_v = nn.Parameter(torch.empty(out_width, width))
        nn.init.kaiming_uniform_(self.weight_v, a=math.sqrt(5))  # as torch initializes a linear layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight_v, dim=-1) * self.weight_g)
