"""What happens to whole batches, on whatever device they are: normalising, erasing, Mixup and CutMix."""

import torch
from torch import Tensor

from vitrail.data.preprocessing import Preprocessing


def normalise(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """uint8 (…, channels, rows, columns) as the floats a model sees, the same bits as `prepare` gives."""
    images = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    # tensors, for by a plain number torch may multiply with its rounded inverse
    full, mean, std = (images.new_tensor(n).reshape(-1, 1, 1) for n in (255, preprocessing.mean, preprocessing.std))
    return images.div_(full).sub_(mean).div_(std)
