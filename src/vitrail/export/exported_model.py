"""A model written by `vitrail export`, run by ONNX Runtime. Needs numpy and onnxruntime; torch is not imported."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.export.description import ExportDescription, find_onnx_file, read_description, read_folder_description
from vitrail.export.onnx_session import (
    FOR_ONE_IMAGE,
    TIMEOUT_SECONDS,
    import_onnxruntime,
    open_verified_session,
    run_with_timeout,
)
from vitrail.models.base.checks import pair


class ExportedModel:
    """One session of ONNX Runtime. A call runs on `threads` threads; up to `streams` calls may run at once."""

    def __init__(self, path: str | Path, *, streams: int = 1, threads: int = 1) -> None:
        self.file, self.has_run = find_onnx_file(path), False
        import_onnxruntime()
        description = read_folder_description(path)
        checksums = {} if description is None else description.files
        once = FOR_ONE_IMAGE.get() and description is not None and description.precision == "fp32"
        self.session = open_verified_session(self.file, threads, checksums, pack=not once)
        self.path, self.streams = Path(path), streams
        self.threads: int | None = threads
        metadata = self.session.get_modelmeta().custom_metadata_map
        self.description: ExportDescription = description or read_description(path, metadata)
        self.name = "int8" if self.description.precision == "int8" else "onnx"
        self.exact = self.description.precision == "fp32"
        self.check_signature()

    def with_threads(self, streams: int, threads: int) -> "ExportedModel":
        """The same file in a new session."""
        return ExportedModel(self.path, streams=streams, threads=threads)

    def check_signature(self) -> None:
        """Refuse a graph whose inputs and outputs do not match its description."""
        about, inputs = self.description, self.session.get_inputs()
        outputs = self.session.get_outputs()[:1]  # others are for programs that show them
        rows, columns = ("rows", "columns") if about.multiple else pair(about.preprocessing.image_size)
        channels = len(about.preprocessing.mean)
        fits = [(each.name, each.type) for each in (*inputs, *outputs)] == [
            ("pixels", "tensor(uint8)"),
            (about.output, "tensor(float)"),
        ]
        if fits:
            input_shape, output_shape = inputs[0].shape[1:], outputs[0].shape[1:]
            fits = input_shape[2:] == [channels] and (bool(about.multiple) or input_shape[:2] == [rows, columns])
            fits = fits and (about.output != "logits" or output_shape == [about.classes])
        if not fits:
            given = [(each.name, each.type, each.shape) for each in (*inputs, *outputs)]
            raise CheckpointError(
                f"{self.file} has {str(given)[:400]}; expected pixels of uint8 (batch, {rows}, {columns}, {channels}) "
                f"and {about.output}{f' of {about.classes} classes' * (about.output == 'logits')}, as `vitrail export` "
                "writes them, with its own config.json"
            )

    def run(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(B, rows, columns, C) → logits (B, classes), or features."""
        if self.exact:
            return self.compute(pixels)
        # int8 measures one activation range per call: run alone, the output of an image does not depend on others
        return np.concatenate([self.compute(each[None]) for each in pixels])

    __call__ = run

    def compute(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Run the graph once. It is untrusted: the first run has a time limit, and every output is checked."""
        try:
            if self.has_run:
                found: Any = self.session.run([self.description.output], {"pixels": pixels})
            else:
                seconds, names = TIMEOUT_SECONDS * len(pixels), [self.description.output]
                found = run_with_timeout(self.session, pixels, seconds, names)
        except Exception as error:  # ONNX Runtime has a class per reason
            raise CheckpointError(f"{self.file} failed: {describe_error(error)}; export the model again") from None
        self.check_values(found[0], len(pixels))
        self.has_run = True
        return found[0]

    def check_values(self, values: Any, batch: int) -> None:
        """Check dtype and shape of the output: a graph may declare one shape and return another."""
        shape: tuple[int, ...] = np.shape(values)
        output, classes = self.description.output, self.description.classes
        fits = (
            isinstance(values, np.ndarray)
            and len(shape) == (3 if output == "tokens" else 2)
            and shape[0] == batch
            and prod(shape) > 0
        )
        if not fits or values.dtype != np.float32 or (output == "logits" and shape[1] != classes):
            dtype = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            expected = {"logits": f"({batch}, {classes})", "tokens": f"({batch}, tokens, width)"}
            raise CheckpointError(
                f"{self.file} returned {dtype} of shape {shape} for {batch} images; expected float32 of shape "
                f"{expected.get(output, f'({batch}, width)')}: export the model again"
            )
