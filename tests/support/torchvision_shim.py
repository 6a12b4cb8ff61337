"""Define two operators that torchvision looks up by name, so that it can be imported with a CPU build of torch.

Import this before timm, transformers or vit-pytorch. For tests and benchmarks only.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # the operators live as long as this object
for operator in ("nms", "qnms"):
    LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
