"""A photo → the input of a model, as a small object that data loaders can pickle."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import get_pillow_or_default_limits
from vitrail.data.images.preprocessing import Preprocessing, normalise_pixels

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImageTransform:
    """A transform as torchvision's: a photo → a tensor (C, rows, columns) on the CPU.

    A photo is a path, bytes, a Pillow image, an array or a tensor. Without a dtype the result is what an exported model
    takes: an array of uint8 (rows, columns, C), not normalised.
    """

    preprocessing: Preprocessing
    dtype: "torch.dtype | None" = None

    def __call__(self, photo: Any) -> Any:
        pixels = decode_for_model(photo, self.preprocessing, get_pillow_or_default_limits())
        if self.dtype is None:
            return pixels
        import torch

        return torch.from_numpy(normalise_pixels(pixels, self.preprocessing)).to(self.dtype)
