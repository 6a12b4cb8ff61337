"""The former place of vitrail.evaluation.representation."""

from vitrail.evaluation.representation import MAX_RANK_FEATURES, effective_rank, feature_spread

__all__ = ["MAX_RANK_FEATURES", "effective_rank", "feature_spread"]
