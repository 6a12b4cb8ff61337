"""ONNX Runtime, which is wanted only where an exported model is run."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import ConfigError


def onnxruntime() -> Any:
    try:
        import onnxruntime as found
    except ImportError:
        raise ConfigError(
            "an exported model needs ONNX Runtime; expected it installed: pip install onnxruntime"
        ) from None
    return found


def session(model: Path | bytes, threads: int = 0) -> Any:
    """A call computes on so many threads; 0 is one a core."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what fails is raised
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def answers(model: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of pictures one by one: (B, rows, columns, C) → (B, …)."""
    opened = session(model)
    return np.concatenate([opened.run(None, {"pixels": each[None]})[0] for each in pixels])


@contextmanager
def quiet() -> Generator[None]:
    """Exporters' and quantisers' remarks on their own insides are for their makers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
