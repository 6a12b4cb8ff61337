"""Exported models, run by ONNX Runtime. Needs numpy and onnxruntime; torch is not imported."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, describe_error
from vitrail.export.description import ExportDescription, find_onnx_file, read_description, read_folder_description
from vitrail.export.onnx_session import TIMEOUT_SECONDS, import_onnxruntime, open_verified_session, run_with_timeout
from vitrail.models.checks import pair


class OnnxEngine:
    """One session; a call computes on `threads` threads, and as many calls as there are streams may run at once."""

    def __init__(self, place: str | Path, *, streams: int = 1, threads: int = 1) -> None:
        self.file, self.has_run = find_onnx_file(place), False
        import_onnxruntime()
        about = read_folder_description(place)
        self.session = open_verified_session(self.file, threads, {} if about is None else about.files)
        self.export_path, self.streams = Path(place), streams
        self.threads: int | None = threads
        inside = self.session.get_modelmeta().custom_metadata_map
        self.description: ExportDescription = read_description(place, inside) if about is None else about
        self.name = "int8" if self.description.precision == "int8" else "onnx"
        self.exact = self.description.precision == "fp32"
        self.check_signature()

    def check_signature(self) -> None:
        """Someone else's graph under our description would answer anything."""
        about, inputs, outputs = self.description, self.session.get_inputs(), self.session.get_outputs()
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
                f"{self.file} has {str(given)[:400]}; expected pixels of uint8 (batch, {rows}, {columns}, {channels}) "
                f"and {about.output}{f' of {about.classes} classes' * (about.output == 'logits')}: what `vitrail "
                "export` wrote, with its own config.json"
            )

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → (B, classes), or features."""
        if self.exact:
            return self.compute(pixels)
        # in 8 bits one step is measured for all that is computed at once: alone, a picture's answer is its own
        return np.concatenate([self.compute(each[None]) for each in pixels])

    def compute(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """One call of the graph; the first has a time limit, and every output is checked: the graph is untrusted."""
        try:
            if self.has_run:
                found: Any = self.session.run(None, {"pixels": pixels})
            else:
                found = run_with_timeout(self.session, pixels, TIMEOUT_SECONDS * len(pixels))
        except Exception as error:  # ONNX Runtime has a class per reason
            raise CheckpointError(
                f"{self.file} failed: {describe_error(error)}; expected what `vitrail export` wrote: export it again"
            ) from None
        self.check_values(found[0], len(pixels))
        self.has_run = True
        return found[0]

    def check_values(self, values: Any, batch: int) -> None:
        """Checks dtype and shape of the output: a graph may declare one shape and return another."""
        shape: tuple[int, ...] = np.shape(values)
        sides = 3 if self.description.output == "tokens" else 2
        fits = len(shape) == sides and shape[0] == batch and prod(shape) > 0 and values.dtype == np.float32
        if not fits or (self.description.output == "logits" and shape[1] != self.description.classes):
            kind = getattr(values, "dtype", type(values).__name__)
            wanted = {"logits": f"({batch}, {self.description.classes})", "tokens": f"({batch}, tokens, width)"}
            raise CheckpointError(
                f"{self.file} returned {kind} of shape {shape} for {batch} images; expected float32 of shape "
                f"{wanted.get(self.description.output, f'({batch}, width)')}: export the model again"
            )
