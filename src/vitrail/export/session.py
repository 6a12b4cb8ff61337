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

LARGEST = 2**31  # bytes of an ONNX file: protobuf has no more
LIMIT = 60.0  # seconds to open a graph, and for its first image: a hostile one may loop without end


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
        # ONNX Runtime maps such a file: overwritten it would change the model, truncated it would end the process
        options.add_external_initializers_from_files_in_memory([data_file(model).name], [weights], [len(weights)])
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def data_file(model: Path) -> Path:
    return model.with_name(f"{model.name}.data")


def read_data(model: Path) -> bytes:
    """The weights in the file next to it; empty where there is none."""
    if not os.path.lexists(data_file(model)):
        return b""
    with os.fdopen(open_regular(data_file(model)), "rb") as file:
        return file.read()


def verified_session(model: Path, threads: int, checksums: Mapping[str, str]) -> Any:
    """As `session`, of a file that matches its checksum, if it has one; hashing takes no longer than opening."""
    size = model.stat().st_size
    if size > LARGEST:
        raise CheckpointError(f"{model} has {size:,} bytes; expected an ONNX file, of at most {LARGEST:,}")
    found, before = dict[str, str](), identity(model)
    checked = [each for each in (model, data_file(model)) if each.name in checksums]
    # not waited for at exit: constants are computed as a graph is opened, which may be the work of hours
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
            f"{model} cannot be run: {one_line(opener.failure)}; expected an ONNX file, whole: export it again"
        ) from None
    if identity(model) != before:
        raise CheckpointError(f"{model} changed while it was opened; expected a file that stays: try again")
    return opener.opened


class Opener(Thread):
    """Opens a graph in a thread that can be given up."""

    def __init__(self, model: Path, threads: int) -> None:
        super().__init__(daemon=True)
        self.model, self.threads = model, threads
        self.opened: Any = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.opened = session(self.model, self.threads)
        except Exception as error:  # a class of its own for each reason
            self.failure = error


def hash_into(found: dict[str, str], files: Sequence[Path]) -> None:
    for file in files:
        try:
            found[file.name] = file_checksum(file)
        except OSError as error:
            found[file.name] = one_line(error)  # which is no checksum


def identity(file: Path) -> tuple[tuple[int, ...], ...]:
    """Of the file and the one with its weights: another one, or one that was written to, has another."""
    found = [os.stat(each) for each in (file, data_file(file)) if each.exists()]  # noqa: PTH116
    return tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)


def run_within(
    opened: Any, pixels: NDArray[np.uint8], seconds: float | None = None, names: Sequence[str] | None = None
) -> list[Any]:
    """What a graph returns, or an error where it takes longer than so many seconds: it may loop without end."""
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
            raise CheckpointError(f"it took longer than {seconds:g} s for {len(pixels)} of the images") from None
        raise CheckpointError(one_line(error)) from None
    finally:
        timer.cancel()


def answers(model: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of pictures one by one: (B, rows, columns, C) → (B, …)."""
    opened = session(model)
    return np.concatenate([run_within(opened, each[None])[0] for each in pixels])


@contextmanager
def quiet() -> Generator[None]:
    """Exporters' and quantisers' remarks on their own insides are for their makers."""
    import logging  # which running a model does without
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
