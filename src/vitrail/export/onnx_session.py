"""ONNX Runtime, imported only when an exported model is run."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import CheckpointError, ConfigError, describe_error, missing_package_error
from vitrail.base.files import file_checksum, open_regular_file_descriptor

MAX_ONNX_BYTES = 2**31  # bytes of an ONNX file: the limit of protobuf
FOR_ONE_IMAGE = ContextVar("FOR_ONE_IMAGE", default=False)  # sessions that are opened for a single image
TIMEOUT_SECONDS = 60.0  # seconds to open a graph, and for its first image: a malicious one may loop forever


def import_onnxruntime() -> Any:
    try:
        import onnxruntime as found
    except ImportError:
        raise missing_package_error("an exported model", "onnxruntime", "export") from None
    return found


@contextmanager
def open_for_one_image() -> Generator[None]:
    """Within it, float32 weights are not copied into the order in which products read them: it would not pay off."""
    token = FOR_ONE_IMAGE.set(True)
    try:
        yield
    finally:
        FOR_ONE_IMAGE.reset(token)


def open_session(model: Path | bytes, threads: int = 0, *, pack: bool = True) -> Any:
    """Open a graph; 0 threads is one per core. Weights in a file next to it are read, never mapped."""
    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised, not logged
    if not pack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    weights = b"" if isinstance(model, bytes) else read_external_data(model)
    if weights and not isinstance(model, bytes):
        # ONNX Runtime would map the file: overwriting it would change the model, truncating it would crash the process
        try:
            add = options.add_external_initializers_from_files_in_memory
        except AttributeError:
            raise ConfigError(
                f"{external_data_path(model)} needs a newer ONNX Runtime; update it: pip install -U onnxruntime"
            ) from None
        add([external_data_path(model).name], [weights], [len(weights)])
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def external_data_path(model: Path) -> Path:
    return model.with_name(f"{model.name}.data")


def read_external_data(model: Path) -> bytes:
    """The weights in the .data file next to the model; empty if there is none."""
    if not os.path.lexists(external_data_path(model)):
        return b""
    with os.fdopen(open_regular_file_descriptor(external_data_path(model)), "rb") as file:
        return file.read()


def open_verified_session(model: Path, threads: int, checksums: Mapping[str, str], *, pack: bool = True) -> Any:
    """Open a graph with a time limit, and verify the checksums in the meantime."""
    size = model.stat().st_size
    if size > MAX_ONNX_BYTES:
        raise CheckpointError(f"{model} has {size:,} bytes; expected an ONNX file, of at most {MAX_ONNX_BYTES:,}")
    found = dict[str, str]()
    checked = [each for each in (model, external_data_path(model)) if each.name in checksums]
    # a daemon thread: opening computes constants, which may take hours
    opener = SessionOpener(model, threads, pack)
    opener.start()
    for file in checked:
        try:
            found[file.name] = file_checksum(file)
        except OSError as error:
            found[file.name] = describe_error(error)  # never equal to a checksum
    opener.join(TIMEOUT_SECONDS)
    for path in checked:
        if found.get(path.name) != checksums[path.name]:
            raise CheckpointError(
                f"{path} does not match its checksum in config.json: it is damaged, or was replaced; export the model "
                'again, or, if you replaced it, delete "files" and "checksum" in config.json'
            )
    if opener.is_alive():
        raise CheckpointError(f"{model} took longer than {TIMEOUT_SECONDS:g} s to open; expected an export of a model")
    if opener.failure is not None:
        raise CheckpointError(
            f"{model} cannot be run: {describe_error(opener.failure)}; expected a complete ONNX file: export it again"
        ) from None
    return opener.session


class SessionOpener(Thread):
    """Opens a graph in a thread that can be abandoned."""

    def __init__(self, model: Path, threads: int, pack: bool) -> None:
        super().__init__(daemon=True)
        self.model, self.threads, self.pack = model, threads, pack
        self.session: Any = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.session = open_session(self.model, self.threads, pack=self.pack)
        except Exception as error:  # ONNX Runtime has a class per reason
            self.failure = error


def run_with_timeout(
    session: Any, pixels: NDArray[np.uint8], seconds: float | None = None, output_names: Sequence[str] | None = None
) -> list[Any]:
    """The outputs of a graph; an error if it takes longer than `seconds`, since it may loop forever."""
    seconds = TIMEOUT_SECONDS if seconds is None else seconds
    options = import_onnxruntime().RunOptions()
    options.log_severity_level = 4
    timer = Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        return session.run(output_names, {"pixels": pixels}, options)
    except Exception as error:
        if options.terminate:
            raise CheckpointError(f"it took longer than {seconds:g} s for {len(pixels)} images") from None
        raise CheckpointError(describe_error(error)) from None
    finally:
        timer.cancel()


def run_onnx_file(model: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Run a file image by image: (B, rows, columns, C) → (B, …)."""
    opened = open_session(model)
    return np.concatenate([run_with_timeout(opened, each[None])[0] for each in pixels])


@contextmanager
def silence_warnings() -> Generator[None]:
    """Silence the log messages and warnings of exporters and quantizers about their own internals."""
    import logging  # slow to import, and not needed to run a model
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
