"""Image files of every format."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def textured_pixels(rows: int, columns: int, channels: int = 3) -> NDArray[np.uint8]:
    """Smooth shapes with some noise, so that JPEG blocks are neither flat nor saturated."""
    random = np.random.default_rng(rows * 1000 + columns)
    coarse = random.integers(0, 256, (4, 5, 4), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((columns, rows), Image.Resampling.BICUBIC)).astype(int)
    return (soft + random.integers(-20, 21, soft.shape)).clip(0, 255).astype(np.uint8)[..., :channels]


def encode_test_image(kind: str, rows: int, columns: int, mode: str = "RGB", **options: Any) -> bytes:
    if mode == "I;16":
        image = Image.fromarray(textured_pixels(rows, columns)[..., 0].astype(np.uint16) * 251)
    else:
        image = Image.fromarray(textured_pixels(rows, columns, 4)).convert("RGBA" if mode in ("RGBA", "LA") else "RGB")
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, kind.split()[0], **options)
    return file.getvalue()
