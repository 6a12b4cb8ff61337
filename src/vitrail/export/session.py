"""ONNX Runtime, which is wanted only where an exported model is run."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import CheckpointError, ConfigError, one_line
from vitrail.files import file_checksum, open_regular

LARGEST = 2**31  # bytes of an ONNX file: the limit of protobuf
LIMIT = 60.0  # seconds to open a graph, and for its first image: a malicious one may loop forever


def onnxruntime() -> Any:
    try:
        import onnxruntime as found
    except ImportError:
        raise ConfigError(
            "an exported model needs ONNX Runtime; expected it installed: pip install onnxruntime"
        ) from None
    return found


def session(model: Path | bytes, threads: int = 0) -> Any:
    """A call computes on so many threads; 0 is one a core. Weights in a file next to it are read, never mapped."""
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # what fails is raised
    weights = b"" if isinstance(model, bytes) else read_data(model)
    if weights and not isinstance(model, bytes):
        # ONNX Runtime would map the file: overwriting it would change the model, truncating it would crash the process
        add = getattr(options, "add_external_initializers_from_files_in_memory", None)
        if add is None:
            raise ConfigError(f"{data_file(model)} needs a newer ONNX Runtime; update it: pip install -U onnxruntime")
        add([data_file(model).name], [weights], [len(weights)])
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def data_file(model: Path) -> Path:
    return model.with_name(f"{model.name}.data")


def read_data(model: Path) -> bytes:
    """The weights in the .data file next to the model; empty if there is none."""
    if not os.path.lexists(data_file(model)):
        return b""
    with os.fdopen(open_regular(data_file(model)), "rb") as file:
        return file.read()


def open_verified(model: Path, threads: int, checksums: Mapping[str, str]) -> Any:
    """As `session`, and verifies the checksums, if there are any, while the session is built."""
    size = model.stat().st_size
    if size > LARGEST:
        raise CheckpointError(f"{model} has {size:,} bytes; expected an ONNX file, of at most {LARGEST:,}")
    found, before = dict[str, str](), file_identity(model)
    checked = [each for each in (model, data_file(model)) if each.name in checksums]
    # not waited for at exit: constants are computed while a graph is opened, which may take hours
    opener = Opener(model, threads)
    opener.start()
    hash_into(found, checked)
    opener.join(LIMIT)
    for path in checked:
        if found.get(path.name) != checksums[path.name]:
            raise CheckpointError(
                f"{path} does not match its checksum in config.json: it is damaged, or was replaced; export the model "
                'again, or, if you replaced it, delete "files" and "checksum" in config.json'
            )
    if opener.is_alive():
        raise CheckpointError(f"{model} took longer than {LIMIT:g} s to open; expected an export of a model")
    if opener.failure is not None:
        raise CheckpointError(
            f"{model} cannot be run: {one_line(opener.failure)}; expected a complete ONNX file: export it again"
        ) from None
    if file_identity(model) != before:
        raise CheckpointError(f"{model} changed while it was opened; try again")
    return opener.opened


class Opener(Thread):
    """Opens a graph in a thread that can be abandoned."""

    def __init__(self, model: Path, threads: int) -> None:
        super().__init__(daemon=True)
        self.model, self.threads = model, threads
        self.opened: Any = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.opened = session(self.model, self.threads)
        except Exception as error:  # ONNX Runtime has a class per reason
            self.failure = error


def hash_into(found: dict[str, str], files: Sequence[Path]) -> None:
    for file in files:
        try:
            found[file.name] = file_checksum(file)
        except OSError as error:
            found[file.name] = one_line(error)  # never equal to a checksum


def file_identity(file: Path) -> tuple[tuple[int, ...], ...]:
    """Identifies the state of a model and its .data file: it changes when either is replaced or written to."""
    found = [os.stat(each) for each in (file, data_file(file)) if each.exists()]  # noqa: PTH116
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)


def run_with_timeout(
    opened: Any, pixels: NDArray[np.uint8], seconds: float | None = None, names: Sequence[str] | None = None
) -> list[Any]:
    """The outputs of a graph; an error if it takes longer than `seconds`, since it may loop forever."""
    seconds = LIMIT if seconds is None else seconds
    options = onnxruntime().RunOptions()
    options.log_severity_level = 4
    timer = Timer(seconds, setattr, (options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        return opened.run(names, {"pixels": pixels}, options)
    except Exception as error:
        if options.terminate:
            raise CheckpointError(f"it took longer than {seconds:g} s for {len(pixels)} images") from None
        raise CheckpointError(one_line(error)) from None
    finally:
        timer.cancel()


def answers(model: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of pictures one by one: (B, rows, columns, C) → (B, …)."""
    opened = session(model)
    return np.concatenate([run_with_timeout(opened, each[None])[0] for each in pixels])


@contextmanager
def quiet() -> Generator[None]:
    """Exporters' and quantisers' remarks on their own insides are for their makers."""
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
