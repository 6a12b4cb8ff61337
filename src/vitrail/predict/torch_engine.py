"""Models run by torch, as they are or compiled."""

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, describe_error
from vitrail.export.description import OutputKind
from vitrail.export.export_module import check_output_available, compute_output


class TorchEngine:
    """A model in eval mode; a call computes on `threads` threads, which is torch's own choice if they are None."""

    exact = True

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        output: OutputKind = "logits",
        *,
        name: Literal["eager", "compiled"] = "eager",
        streams: int = 1,
        threads: int | None = None,
    ) -> None:
        check_output_available(model, output)
        self.name, self.streams, self.threads = name, streams, threads
        run = partial(compute_output, model, output=output)
        self.output_function: Any = torch.compile(run, dynamic=True) if name == "compiled" else run
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.mean, self.std = (
            torch.tensor(each, device=self.device)[:, None, None] for each in (preprocessing.mean, preprocessing.std)
        )

    @torch.inference_mode()
    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → (B, classes), or features."""
        before = torch.get_num_threads()  # of this thread; each that calls has its own
        if self.threads not in (None, before):
            torch.set_num_threads(self.threads)
        try:
            return self.compute(pixels)
        finally:
            if torch.get_num_threads() != before:  # which others may use for other things
                torch.set_num_threads(before)

    def compute(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        images = torch.from_numpy(pixels).to(self.device).permute(0, 3, 1, 2).float()
        images = ((images / 255 - self.mean) / self.std).to(self.dtype)
        try:
            return self.output_function(images).float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a batch of {len(pixels)} does not fit; expected fewer: {describe_error(error)}"
            ) from None
