"""Shared by all tests: one thread per worker, no network, and paths of published weights and photos."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share the cores, and so do the commands they start
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test has two threads, they sleep while they wait

import pytest
import torch
from hypothesis import settings
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before timm and transformers
from support.toy_exports import ExportFinder, make_export_finder

import vitrail.train.fit
import vitrail.train.run
from vitrail.base.figures import new_figure, save_figure
from vitrail.predict import engine_selection
from vitrail.train import speed_choice

torch.set_num_threads(1)
speed_choice.find_bfloat16_instructions = str  # `precision` auto is float32, so that results do not depend on the CPU
engine_selection.find_bfloat16_instructions = str  # nor does the engine of `fast`


def save_blank_curves(_: object, path: Path, *__: object) -> None:
    """Stands for the curves of a run, which take longer than a toy run; commands in new processes draw them."""
    save_figure(new_figure(4, 3), path)


vitrail.train.fit.plot_training_curves = save_blank_curves
vitrail.train.run.plot_training_curves = save_blank_curves
settings.register_profile("any machine", deadline=None)  # no time limit per example on a busy machine
settings.load_profile("any machine")

os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))  # listing fonts is slow
HOME = TemporaryDirectory(prefix="vitrail-home-")  # engine caches are written below it
os.environ["HOME"] = HOME.name

SHARED = Path(__file__).parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutations", type=int, default=2000, help="damaged or hostile files per fuzz test")
    parser.addoption("--kills", type=int, default=12, help="kills of a run or a job per torture test")


@pytest.fixture(scope="session")
def mutations(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--mutations") or 0)


@pytest.fixture(scope="session")
def kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills") or 0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a traceback for each kind of device


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """The path of a file in ../shared/data; skips the test if it is missing."""

    def find(name: str) -> Path:
        if not (SHARED / name).exists():
            pytest.skip(f"needs ../shared/data/{name}")
        return SHARED / name

    return find


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> ExportFinder:
    """Toy exports by name, each written at the first use; do not modify them."""
    return make_export_finder(tmp_path_factory, worker_id)
