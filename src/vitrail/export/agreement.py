"""Whether two engines say the same of a picture. Needs numpy and nothing else."""

import numpy as np
from numpy.typing import NDArray

ALIKE = 0.98  # cosine of a picture's features, twice computed, from which on they are the same; of ViT-Ti in 8 bits 0.994


def agreeing(found: NDArray[np.float32], expected: NDArray[np.float32], output: str) -> int:
    """Pictures with the same likeliest class, or whose features point the same way: (B, …) and (B, …)."""
    if output == "logits":
        return int((found.argmax(-1) == expected.argmax(-1)).sum())
    a, b = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return int(((a * b).sum(1) >= ALIKE * lengths).sum())
