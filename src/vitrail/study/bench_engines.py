"""Engines of a benchmark: the files of a model for each engine and peer, how each predicts a batch, and its start-up.

Imports torch and peers only when needed, so that they do not count towards the start-up of other engines.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import ConfigError, VitrailError, describe_error, missing_package_error, unknown_name_error
from vitrail.base.machine import PROCESS_STATUS_FILE, read_resident_bytes
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checks import pair
from vitrail.models.catalog.external_families import TRUSTED, trust

if TYPE_CHECKING:
    from vitrail.opening import GivenPreprocessing, Opened

ENGINES = ("eager", "compiled", "bfloat16", "onnx", "int8")
TORCH_ENGINES = ("eager", "compiled", "bfloat16")  # read the same files
INEXACT_ENGINES = ("bfloat16", "int8")
PEERS = ("timm", "transformers")
CALIBRATION_IMAGES = 8  # for int8 quantization
ENGINES_WITH_STREAMS = ("onnx", "int8")  # also measured with one stream per thread
EXTRA_PREDICTIONS = 2  # in a new process, after the first and before memory is read

PixelBatch = NDArray[np.uint8]  # (B, rows, columns, C)
PredictStep = Callable[[], NDArray[np.float32]]  # logits of the batch that it was made for: (B, classes)


@dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """An engine or a peer, and the folder of its files."""

    name: str  # one of ENGINES or PEERS
    folder: Path
    preprocessing: Preprocessing
    threads: int
    streams: int = 1  # parts of a batch that run in parallel, with threads/streams threads each

    @property
    def label(self) -> str:
        return self.name if self.streams == 1 else f"{self.name} × {self.streams}"

    @property
    def exact(self) -> bool:
        return self.name not in INEXACT_ENGINES


def check_peers_installed(peers: tuple[str, ...]) -> None:
    """Check the peers before any work."""
    for name in peers:
        if name not in PEERS:
            raise unknown_name_error("peer", name, PEERS)
        if find_spec(name) is None:
            raise missing_package_error(f"`peers` {name}", name, "parity")


class ModelFiles:
    """Files of one model at one image size for each engine, written when first needed."""

    def __init__(
        self,
        model: str,
        size: tuple[int, int] | None,
        root: Path,
        seed: int = 0,
        fields: Mapping[str, Any] | None = None,
        preprocessing: "GivenPreprocessing" = None,
    ) -> None:
        from vitrail.export.description import is_exported
        from vitrail.export.exported_model import ExportedModel
        from vitrail.opening import open_model

        self.model, self.root, self.exported = model, root, None
        self.folders, self.errors = dict[str, Path](), dict[str, Exception]()
        if not is_exported(model):
            loaded = open_benchmark_model(model, size, seed, fields, preprocessing)
            self.module, self.preprocessing, self.labels = loaded.module, loaded.preprocessing, loaded.labels
            return
        loaded = open_model(model, kind="image", fields=fields, preprocessing=preprocessing)
        assert isinstance(loaded.model, ExportedModel)
        self.exported = loaded.model.description
        own, multiple = pair(self.exported.preprocessing.image_size), self.exported.multiple
        size = size or own
        if size != own and not (multiple and size[0] % multiple == size[1] % multiple == 0):
            allowed = f"multiples of {multiple}" if multiple else f"{format_image_size(own)}, or the checkpoint"
            raise ConfigError(f"`image_size` is {format_image_size(size)}, but {model} is exported; expected {allowed}")
        self.preprocessing = replace(loaded.preprocessing, image_size=size)

    @property
    def size(self) -> tuple[int, int]:
        return pair(self.preprocessing.image_size)

    @property
    def default_engines(self) -> tuple[str, ...]:
        """Engines measured by default; without `compiled`, which takes long to compile."""
        if self.exported is not None:
            return (self.exported_engine,)
        return ("eager", "onnx", "int8") if find_spec("onnxruntime") else ("eager",)

    @property
    def exported_engine(self) -> str:
        assert self.exported is not None
        return "int8" if self.exported.precision == "int8" else "onnx"

    def folder_for(self, name: str) -> Path:
        """Folder with the files of an engine or a peer."""
        if self.exported is not None:
            if name != self.exported_engine:
                needed = "weights" if name in (*PEERS, *TORCH_ENGINES) else "an export of that kind"
                raise ConfigError(f"{self.model} is exported for {self.exported_engine}; {name} needs {needed}")
            return Path(self.model)
        kind = "vitrail" if name in TORCH_ENGINES else name
        if kind in self.errors:
            raise self.errors[kind]
        if kind not in self.folders:
            try:
                self.write_files(kind, self.root / kind)
            except Exception as error:
                self.errors[kind] = error  # it would fail again, which may take a minute
                raise
            self.folders[kind] = self.root / kind
        return self.folders[kind]

    def write_files(self, kind: str, folder: Path) -> None:
        from vitrail.checkpoint.writing import write

        if kind in ENGINES:
            self.write_export(folder, int8=kind == "int8")
            return
        layout = {"vitrail": "vitrail", "timm": "timm", "transformers": "hf"}[kind]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on metadata that a layout cannot store: only the weights count here
            write(self.module, folder, layout, preprocessing=self.preprocessing, labels=self.labels)

    def write_export(self, folder: Path, *, int8: bool) -> None:
        """Export to ONNX; int8 is quantized from the float32 file."""
        from vitrail.export.agreement import make_photo_crops
        from vitrail.export.description import find_onnx_file, read_description
        from vitrail.export.export import export_model
        from vitrail.export.quantize import write_int8_export

        if not int8:
            export_model(self.module, folder, preprocessing=self.preprocessing, labels=self.labels, progress=False)
            return
        exact = self.folder_for("onnx")
        write_int8_export(
            find_onnx_file(exact),
            folder,
            read_description(exact, {}),
            make_photo_crops(CALIBRATION_IMAGES, self.preprocessing),
        )

    def make_engine(self, name: str, threads: int, streams: int = 1) -> BenchEngine:
        folder = self.folder_for(name)
        return BenchEngine(name=name, folder=folder, preprocessing=self.preprocessing, threads=threads, streams=streams)

    def make_pixels(self, batch: int, seed: int = 0) -> PixelBatch:
        """Random images: the time of a prediction does not depend on the image."""
        return random_pixels((batch, *self.size, len(self.preprocessing.mean)), seed)


def random_pixels(shape: tuple[int, ...], seed: int = 0) -> PixelBatch:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def open_benchmark_model(
    model: str,
    size: tuple[int, int] | None,
    seed: int,
    fields: Mapping[str, Any] | None = None,
    preprocessing: "GivenPreprocessing" = None,
) -> "Opened":
    """A checkpoint, a run or a bundled model; the name of a preset gives random weights."""
    import torch

    from vitrail.checkpoint.hub import is_hub_name
    from vitrail.checkpoint.weight_folders import find_bundled_model
    from vitrail.models.catalog.families import build_preset
    from vitrail.opening import choose_preprocessing, open_torch_model

    fields = {**(fields or {}), **({} if size is None else {"image_size": size})}
    if Path(model).exists() or is_hub_name(model) or find_bundled_model(model):
        loaded = open_torch_model(model, fields=fields, preprocessing=preprocessing)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = randomize_zero_head(build_preset(model, **fields))
        given = choose_preprocessing(module, None, preprocessing)  # random weights have no preprocessing
        loaded = open_torch_model(module, preprocessing=given)
    if not loaded.classes:
        raise ConfigError(f"{model} has no head, so no outputs to compare; expected a model with classes")
    config: Any = loaded.module.config
    return replace(loaded, preprocessing=replace(loaded.preprocessing, image_size=size or config.image_size))


def randomize_zero_head(module: Any) -> Any:
    """Randomize a new head: its weights are 0, so all its predictions would be equal."""
    from torch import nn

    for weight in module.parameters():
        if weight.ndim == 2 and not weight.detach().any():
            nn.init.normal_(weight, std=0.02)
    return module


def make_predict_step(engine: BenchEngine, pixels: PixelBatch) -> PredictStep:
    """Open an engine for a batch. Peers get normalized tensors, so their preprocessing is not timed."""
    return make_peer_step(engine, pixels) if engine.name in PEERS else make_engine_step(engine, pixels)


def make_engine_step(engine: BenchEngine, pixels: PixelBatch) -> PredictStep:
    from vitrail.predict.predictor import Predictor

    name: Any = engine.name
    threads = max(1, engine.threads // engine.streams)
    run = Predictor(engine.folder, engine=name, streams=engine.streams, threads=threads).engine.run
    if engine.streams == 1:
        return lambda: run(pixels)
    from concurrent.futures import ThreadPoolExecutor

    pool, parts = ThreadPoolExecutor(engine.streams), np.array_split(pixels, engine.streams)
    return lambda: np.concatenate(list(pool.map(run, parts)))


def make_peer_step(engine: BenchEngine, pixels: PixelBatch) -> PredictStep:
    import torch

    model = load_peer_model(engine.name, engine.folder)
    torch.set_num_threads(engine.threads)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (engine.preprocessing.mean, engine.preprocessing.std))
    images = ((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std).contiguous()

    def step() -> NDArray[np.float32]:
        with torch.inference_mode():
            output = model(images)
        return (output if isinstance(output, torch.Tensor) else output.logits).numpy()  # transformers wraps it

    return step


def load_peer_model(name: str, folder: Path) -> Any:
    """Load the same weights into the peer's model, from files in its own layout."""
    try:
        if name == "timm":
            import timm

            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        from transformers import AutoModelForImageClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    except Exception as error:  # a peer may raise anything
        raise ConfigError(f"{name} cannot open the model: {describe_error(error)}") from error


def format_image_size(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}×{size[1]}"


@dataclass(frozen=True)
class StartupMeasurement:
    seconds: float  # from starting the process to the first prediction
    megabytes: float  # peak resident memory


class StartupError(VitrailError):
    """The process ended without a prediction."""


def measure_startup(engine: BenchEngine, batch: int, imports: Sequence[str] = ()) -> StartupMeasurement:
    """Run an engine in a new process, which first imports the given modules."""
    job = {
        **asdict(engine),
        "folder": str(engine.folder),
        "batch": batch,
        "imports": list(imports),
        "code": TRUSTED.get(),
    }
    start = perf_counter()
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,  # an unread pipe could fill up
        subprocess.Popen(
            # -P: import nothing from the current folder
            [sys.executable, "-P", "-m", "vitrail.study.bench_engines", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        seconds = perf_counter() - start
        rest = process.stdout.read()
        code = process.wait()
        stderr.seek(0)
        reason = stderr.read().strip().splitlines() or [f"exit code {code}"]
    if code or not rest:
        raise StartupError(f"{engine.label} did not start in a new process: {reason[-1][:200]}")
    return StartupMeasurement(seconds, float(rest))


def read_peak_memory() -> float:
    """Peak resident memory in megabytes.

    On Linux from /proc: getrusage includes the process that started this one, which may have been larger.
    """
    if PROCESS_STATUS_FILE.exists():
        return read_resident_bytes("VmHWM") / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure_inside_child_process() -> None:
    """Print one line after the first prediction, and one with the peak memory in megabytes."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    for name in job["imports"]:
        import_module(name)
    preprocessing = Preprocessing().with_fields(job["preprocessing"])
    engine = BenchEngine(
        name=job["name"],
        folder=Path(job["folder"]),
        preprocessing=preprocessing,
        threads=job["threads"],
        streams=job["streams"],
    )
    shape = (job["batch"], *pair(preprocessing.image_size), len(preprocessing.mean))
    with trust(job["code"]):
        step = make_predict_step(engine, random_pixels(shape))
    step()
    sys.stdout.write("predicted\n")
    sys.stdout.flush()
    for _ in range(EXTRA_PREDICTIONS):
        step()
    sys.stdout.write(f"{read_peak_memory()}\n")


if __name__ == "__main__":
    measure_inside_child_process()
