"""Projectors: the layers between the features and a loss that compares views. Probes use the features before them."""

from itertools import pairwise

from torch import nn

from vitrail.tasks.sync_batch_norm import SyncBatchNorm1d


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
