"""Exported models, run by ONNX Runtime. Needs numpy and onnxruntime; torch is not imported."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, one_line
from vitrail.export.exported import Exported, description, model_file
from vitrail.export.session import onnxruntime, session
from vitrail.models.checks import pair


class OnnxEngine:
    """One session; a call computes on `threads` threads, and as many calls as there are streams may run at once."""

    def __init__(self, place: str | Path, *, streams: int = 1, threads: int = 1) -> None:
        file = model_file(place)
        onnxruntime()
        try:
            self.session = session(file, threads)
        except Exception as error:  # a class of its own for each reason
            reason = one_line(error)
            raise CheckpointError(
                f"{file} cannot be run: {reason}; expected an ONNX file, whole: export it again"
            ) from None
        self.place, self.streams = Path(place), streams
        self.threads: int | None = threads
        self.about: Exported = description(place, self.session.get_modelmeta().custom_metadata_map)
        self.name = "int8" if self.about.precision == "int8" else "onnx"
        self.exact = self.about.precision == "fp32"
        self.check_signature(file)

    def check_signature(self, file: Path) -> None:
        """Someone else's graph under our description would answer anything."""
        about, inputs, outputs = self.about, self.session.get_inputs(), self.session.get_outputs()
        rows, columns = ("rows", "columns") if about.multiple else pair(about.preprocessing.image_size)
        channels = len(about.preprocessing.mean)
        fits = [(each.name, each.type) for each in (*inputs, *outputs)] == [
            ("pixels", "tensor(uint8)"),
            (about.output, "tensor(float)"),
        ]
        if fits:
            sides, answers = inputs[0].shape[1:], outputs[0].shape[1:]
            fits = sides[2:] == [channels] and (bool(about.multiple) or sides[:2] == [rows, columns])
            fits = fits and (about.output != "logits" or answers == [about.classes])
        if not fits:
            given = [(each.name, each.type, each.shape) for each in (*inputs, *outputs)]
            raise CheckpointError(
                f"{file} has {str(given)[:400]}; expected pixels of uint8 (batch, {rows}, {columns}, {channels}) and "
                f"{about.output}{f' of {about.classes} classes' * (about.output == 'logits')}: what `vitrail export` "
                "wrote, with its own config.json"
            )

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → (B, classes), or features."""
        if self.exact:
            return self.session.run(None, {"pixels": pixels})[0]
        # in 8 bits one step is measured for all that is computed at once: alone, a picture's answer is its own
        return np.concatenate([self.session.run(None, {"pixels": each[None]})[0] for each in pixels])
