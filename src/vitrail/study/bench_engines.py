"""Who runs in a benchmark: a model's files for each engine and each peer, and how one of them answers a batch.

Imports neither torch nor a peer before one is asked for: a process that has only to start does not pay for them.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, describe_error, unknown_name_error
from vitrail.models.checks import pair

if TYPE_CHECKING:
    from vitrail.loading import GivenPreprocessing, LoadedModel

ENGINES = ("eager", "compiled", "onnx", "int8")
EXACT_ENGINES = ("eager", "compiled", "onnx")
PEERS = ("timm", "transformers")
CALIBRATION_IMAGES = 8  # pictures that 8 bits are fitted to
ENGINES_WITH_STREAMS = ("onnx", "int8")  # engines that are also tried as one stream a thread

PixelBatch = NDArray[np.uint8]  # (B, rows, columns, C)
PredictStep = Callable[[], NDArray[np.float32]]  # answers the batch that it was made for: (B, classes)


@dataclass(frozen=True, kw_only=True)
class BenchEngine:
    """An engine or a peer with the files that it runs from."""

    name: str  # one of ENGINES or PEERS
    folder: Path
    preprocessing: Preprocessing
    threads: int
    streams: int = 1  # that a batch is split among, each of threads/streams threads

    @property
    def label(self) -> str:
        return self.name if self.streams == 1 else f"{self.name} × {self.streams}"

    @property
    def exact(self) -> bool:
        return self.name != "int8"


def check_peers_installed(peers: tuple[str, ...]) -> None:
    """Before any work: a peer that is not here cannot be compared with."""
    for name in peers:
        if name not in PEERS:
            raise unknown_name_error("peer", name, PEERS)
        if find_spec(name) is None:
            raise ConfigError(f"--peers {name}, which is not installed: pip install {name}, or leave it out")


class ModelFiles:
    """One model at one image size, in every kind of file that a way wants; each is made when it is first asked for."""

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
        from vitrail.loading import open_model

        self.model, self.root, self.exported = model, root, None
        self.folders, self.errors = dict[str, Path](), dict[str, Exception]()
        if not is_exported(model):
            loaded = open_benchmark_model(model, size, seed, fields, preprocessing)
            self.module, self.preprocessing, self.labels = loaded.module, loaded.preprocessing, loaded.labels
            return
        loaded = open_model(model, fields=fields, preprocessing=preprocessing)
        assert isinstance(loaded.model, ExportedModel)
        self.exported = loaded.model.description
        own, multiple = pair(self.exported.preprocessing.image_size), self.exported.multiple
        size = size or own
        if size != own and not (multiple and size[0] % multiple == size[1] % multiple == 0):
            allowed = f"multiples of {multiple}" if multiple else f"{format_image_size(own)}, or its checkpoint"
            raise ConfigError(
                f"--image-size {format_image_size(size)} for {model}, which is exported; expected {allowed}"
            )
        self.preprocessing = replace(loaded.preprocessing, image_size=size)

    @property
    def size(self) -> tuple[int, int]:
        return pair(self.preprocessing.image_size)

    @property
    def default_engines(self) -> tuple[str, ...]:
        """Those to be compared where nobody says which; compiling takes longer than most people wait."""
        if self.exported is not None:
            return (self.exported_engine,)
        return ("eager", "onnx", "int8") if find_spec("onnxruntime") else ("eager",)

    @property
    def exported_engine(self) -> str:
        assert self.exported is not None
        return "int8" if self.exported.precision == "int8" else "onnx"

    def folder_for(self, name: str) -> Path:
        """The files that the engine or the peer of that name runs from."""
        if self.exported is not None:
            if name != self.exported_engine:
                wants = "weights" if name in PEERS or name in ("eager", "compiled") else "an export of that kind"
                raise ConfigError(f"{self.model} is exported for {self.exported_engine}; {name} needs {wants}")
            return Path(self.model)
        kind = "vitrail" if name in ("eager", "compiled") else name
        if kind in self.errors:
            raise self.errors[kind]
        if kind not in self.folders:
            try:
                self.write_files(kind, self.root / kind)
            except Exception as error:
                self.errors[kind] = error  # it would fail again, and an attempt may take a minute
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
            warnings.simplefilter("ignore")  # of what a layout has no place for: here only the numbers count
            write(self.module, folder, layout, preprocessing=self.preprocessing, labels=self.labels)

    def write_export(self, folder: Path, *, int8: bool) -> None:
        """Through torch once: 8 bits are made of the exact file."""
        from vitrail.data.photos import make_photo_views
        from vitrail.export.description import find_onnx_file, read_description
        from vitrail.export.export import export_model
        from vitrail.export.quantise import write_int8_export

        if not int8:
            export_model(self.module, folder, preprocessing=self.preprocessing, labels=self.labels)
            return
        exact = self.folder_for("onnx")
        write_int8_export(
            find_onnx_file(exact),
            folder,
            read_description(exact, {}),
            make_photo_views(CALIBRATION_IMAGES, self.preprocessing),
        )

    def make_engine(self, name: str, threads: int, streams: int = 1) -> BenchEngine:
        folder = self.folder_for(name)
        return BenchEngine(name=name, folder=folder, preprocessing=self.preprocessing, threads=threads, streams=streams)

    def make_pixels(self, batch: int, seed: int = 0) -> PixelBatch:
        """Noise: how long an answer takes does not depend on the picture."""
        return random_pixels((batch, *self.size, len(self.preprocessing.mean)), seed)


def random_pixels(shape: tuple[int, ...], seed: int = 0) -> PixelBatch:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def open_benchmark_model(
    model: str,
    size: tuple[int, int] | None,
    seed: int,
    fields: Mapping[str, Any] | None = None,
    preprocessing: "GivenPreprocessing" = None,
) -> "LoadedModel":
    """A checkpoint or a run; the name of a preset gives random weights."""
    import torch

    from vitrail.checkpoint.hub import is_hub_name
    from vitrail.loading import choose_preprocessing, open_module
    from vitrail.models.catalog import create

    fields = {**(fields or {}), **({} if size is None else {"image_size": size})}
    if Path(model).exists() or is_hub_name(model):
        loaded = open_module(model, fields=fields, preprocessing=preprocessing)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = randomise_zero_head(create(model, **fields))
        given = choose_preprocessing(module.config, None, preprocessing)  # random weights have no preprocessing
        loaded = open_module(module, preprocessing=given)
    if not loaded.classes:
        raise ConfigError(f"{model} has no head, so no outputs to compare; expected a model with classes")
    config: Any = loaded.module.config
    return replace(loaded, preprocessing=replace(loaded.preprocessing, image_size=size or config.image_size))


def randomise_zero_head(module: Any) -> Any:
    """A new head is zero, and all its answers would be equal."""
    from torch import nn

    for weight in module.parameters():
        if weight.ndim == 2 and not weight.detach().any():
            nn.init.normal_(weight, std=0.02)
    return module


def make_predict_step(engine_setup: BenchEngine, pixels: PixelBatch) -> PredictStep:
    """Opens a way and hands it a batch. Peers get it normalised, as a tensor, which is not counted."""
    return (
        make_peer_step(engine_setup, pixels) if engine_setup.name in PEERS else make_engine_step(engine_setup, pixels)
    )


def make_engine_step(engine_setup: BenchEngine, pixels: PixelBatch) -> PredictStep:
    from vitrail.predict.predictor import Predictor

    name: Any = engine_setup.name
    engine = Predictor(
        engine_setup.folder,
        engine=name,
        streams=engine_setup.streams,
        threads=max(1, engine_setup.threads // engine_setup.streams),
    ).engine
    if engine_setup.streams == 1:
        return lambda: engine.run(pixels)
    from concurrent.futures import ThreadPoolExecutor

    pool, parts = ThreadPoolExecutor(engine_setup.streams), np.array_split(pixels, engine_setup.streams)
    return lambda: np.concatenate(list(pool.map(engine.run, parts)))


def make_peer_step(engine_setup: BenchEngine, pixels: PixelBatch) -> PredictStep:
    import torch

    model = load_peer_model(engine_setup.name, engine_setup.folder)
    torch.set_num_threads(engine_setup.threads)
    mean, std = (
        torch.tensor(each).view(-1, 1, 1) for each in (engine_setup.preprocessing.mean, engine_setup.preprocessing.std)
    )
    images = ((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std).contiguous()

    def step() -> NDArray[np.float32]:
        with torch.inference_mode():
            answer = model(images)
        return getattr(answer, "logits", answer).numpy()

    return step


def load_peer_model(name: str, folder: Path) -> Any:
    """The same weights in the peer's own model, from files of the peer's own layout."""
    try:
        if name == "timm":
            import timm

            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        from transformers import AutoModelForImageClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        return AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
    except Exception as error:  # whatever a peer raises is its own
        raise ConfigError(f"{name} cannot open the model: {describe_error(error)}") from error


def format_image_size(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}×{size[1]}"
