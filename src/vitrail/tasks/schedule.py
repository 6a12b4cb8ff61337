"""Learning rate schedules."""

from math import cos, pi, sqrt

from vitrail.recipes.recipe import OptimizationSettings


def lr_factor(step: int, steps: int, warmup: int, settings: OptimizationSettings) -> float:
    """Learning rate of a step (from 0) as a share of the peak: linear warm-up, then the schedule."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)  # 0 at the peak, 1 at the end
    if settings.schedule == "cosine":
        return settings.final_lr + (1 - settings.final_lr) * (1 + cos(pi * done)) / 2
    if settings.schedule == "linear":
        return settings.final_lr + (1 - settings.final_lr) * (1 - done)
    if settings.schedule == "inverse_sqrt":  # Vaswani 2017: d^-0.5 · min(t^-0.5, t·w^-1.5), scaled to a peak of 1
        return sqrt(max(warmup, 1) / (step + 1))
    return 1.0
