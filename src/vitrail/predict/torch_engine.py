"""Run a model with torch: eagerly, compiled, or with autocast to bfloat16."""

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrail.base.errors import ConfigError, describe_error
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.description import OutputKind
from vitrail.export.torch_modules import (
    check_output_available,
    compute_logits_or_features,
    make_channel_tensors,
    normalize_uint8_batch,
)


class TorchEngine:
    """A model in eval mode. A call runs on `threads` threads; None leaves the number to torch."""

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        output: OutputKind = "logits",
        *,
        name: Literal["eager", "compiled", "bfloat16"] = "eager",
        streams: int = 1,
        threads: int | None = None,
    ) -> None:
        check_output_available(model, output)
        self.name, self.streams, self.threads = name, streams, threads
        self.exact = name != "bfloat16"
        run = partial(compute_logits_or_features, model, output=output)
        self.output_function: Any = torch.compile(run, dynamic=True) if name == "compiled" else run
        weight = next(model.parameters())
        self.dtype = weight.dtype
        self.mean, self.std = make_channel_tensors(preprocessing, weight.device)

    @torch.inference_mode()
    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → logits (B, classes), or features."""
        before = torch.get_num_threads()  # of the calling thread: each has its own number
        if self.threads not in (None, before):
            torch.set_num_threads(self.threads)
        try:
            return self.compute(pixels)
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def compute(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        images = normalize_uint8_batch(pixels, self.mean, self.std).to(self.dtype)
        try:
            with torch.autocast(images.device.type, torch.bfloat16, enabled=not self.exact):
                return self.output_function(images).float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a batch of {len(pixels)} images does not fit into memory; use a smaller `batch`: "
                f"{describe_error(error)}"
            ) from None
