"""Compare the outputs of two engines. Needs only numpy."""

import numpy as np
from numpy.typing import NDArray

MIN_COSINE = 0.95  # of features that agree; ViT-Ti and DeiT-Ti in int8 reach 0.99, all their tokens 0.97
NOT_FINITE_MESSAGE = "the model returns NaN; expected finite weights: load them again, or in float32"


def count_agreeing_images(found: NDArray[np.float32], expected: NDArray[np.float32], output: str) -> int:
    """Count the images with the same top class, or with features of a cosine of at least MIN_COSINE: (B, …), (B, …)."""
    if output == "logits":
        return int((found.argmax(-1) == expected.argmax(-1)).sum())
    a, b = found.reshape(len(found), -1), expected.reshape(len(expected), -1)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return int(((a * b).sum(1) >= MIN_COSINE * lengths).sum())
