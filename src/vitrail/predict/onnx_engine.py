"""Exported models, run by ONNX Runtime. Needs numpy and onnxruntime; torch is not imported."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, ConfigError, one_line
from vitrail.export.exported import Exported, description, model_file


class OnnxEngine:
    """One session; a call computes on `threads` threads, and as many calls as there are streams may run at once."""

    def __init__(self, place: str | Path, *, streams: int = 1, threads: int = 1) -> None:
        ort = onnxruntime()
        file = model_file(place)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4  # what fails is raised
        try:
            self.session: Any = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # a class of its own for each reason
            reason = one_line(error)
            raise CheckpointError(
                f"{file} cannot be run: {reason}; expected an ONNX file, whole: export it again"
            ) from None
        self.place, self.streams, self.threads = Path(place), streams, threads
        self.about: Exported = description(place, self.session.get_modelmeta().custom_metadata_map)
        self.name = "int8" if self.about.precision == "int8" else "onnx"
        self.exact = self.about.precision == "fp32"
        self.check_signature(file)

    def check_signature(self, file: Path) -> None:
        """Someone else's graph under our description would answer anything."""
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        channels = len(self.about.preprocessing.mean)
        fits = len(inputs) == len(outputs) == 1 and inputs[0].type == "tensor(uint8)" and len(inputs[0].shape) == 4
        if not fits or inputs[0].shape[3] != channels or outputs[0].name != self.about.output:
            given = [(each.name, each.type, each.shape) for each in (*inputs, *outputs)]
            raise CheckpointError(
                f"{file} has {given}; expected pixels of uint8 (batch, rows, columns, {channels}) and "
                f"{self.about.output}: what `vitrail export` wrote"
            )

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → (B, classes), or features."""
        if self.exact:
            return self.session.run(None, {"pixels": pixels})[0]
        # in 8 bits one step is measured for all that is computed at once: alone, a picture's answer is its own
        return np.concatenate([self.session.run(None, {"pixels": each[None]})[0] for each in pixels])


def onnxruntime() -> Any:
    try:
        import onnxruntime as found
    except ImportError:
        raise ConfigError(
            "an exported model needs ONNX Runtime; expected it installed: pip install onnxruntime"
        ) from None
    return found
