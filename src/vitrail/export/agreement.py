"""Whether two engines say the same of a picture. Needs numpy and nothing else."""

import numpy as np
from numpy.typing import NDArray

MIN_COSINE = 0.95  # cosine from which on they do; of ViT-Ti and DeiT-Ti in 8 bits 0.99, of all their tokens 0.97


def count_agreeing_images(found: NDArray[np.float32], expected: NDArray[np.float32], output: str) -> int:
    """Pictures with the same likeliest class, or whose features point the same way: (B, …) and (B, …)."""
    if output == "logits":
        return int((found.argmax(-1) == expected.argmax(-1)).sum())
    a, b = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return int(((a * b).sum(1) >= MIN_COSINE * lengths).sum())
