"""The linear classifier after the encoder."""

from torch import nn


def make_head(width: int, classes: int) -> nn.Linear | nn.Identity:
    """A linear map to the logits; without classes the features are returned unchanged."""
    return nn.Linear(width, classes) if classes else nn.Identity()


def zero_head(*heads: nn.Module | None) -> None:
    """Set the weights to 0, so that training starts from equal probabilities."""
    for head in heads:
        if isinstance(head, nn.Linear):
            nn.init.zeros_(head.weight)
