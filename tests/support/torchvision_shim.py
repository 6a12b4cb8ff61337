"""Lets the peers import torchvision beside a CPU build of torch: two operators that its Python code looks up by name.

Import this before timm, transformers or vit-pytorch. For tests and benchmarks only.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # kept alive: the operators go with it
for operator in ("nms", "qnms"):
    LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
