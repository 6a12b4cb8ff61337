"""Exported models without torch: it is neither imported nor installed."""

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from PIL import Image
from support.toy_exports import LABELS, PREPROCESSING, ExportFinder, make_toy_model, random_pixels, save_toy_model

from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.photos import list_example_photos
from vitrail.predict.predictor import Predictor

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "pillow", "onnxruntime", "cyclopts", "rich")
HEAVY = ("torch", "safetensors", "yaml", "onnx", "onnxscript", "scipy", "matplotlib", "huggingface_hub")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One image for each way of decoding."""
    (tmp_path / "photos").mkdir()
    Image.fromarray(random_pixels(1, (60, 70))[0]).save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "b.jpg").write_bytes(list_example_photos()[0].read_bytes())
    Image.fromarray(random_pixels(1, (60, 70))[0]).convert("L").save(tmp_path / "photos" / "c.webp")
    return tmp_path / "photos"


def assert_equal_to_eager(predictions: list[dict[str, Any]], photos: Path) -> None:
    paths = sorted(photos.iterdir())
    assert [row["file"] for row in predictions] == [str(path) for path in paths]
    eager = Predictor(make_toy_model("vit"), preprocessing=PREPROCESSING, labels=LABELS, scaled=True)
    for row, expected in zip(predictions, eager.predict_all(paths), strict=True):
        assert [each["label"] for each in row["top"]] == [each.label for each in expected.top]
        shares = [each.probability for each in expected.top]
        assert [each["probability"] for each in row["top"]] == pytest.approx(shares, abs=1e-4)


def test_nothing_heavy_is_imported(exported: ExportFinder, photos: Path, tmp_path: Path) -> None:
    """By predict and embed, although everything is installed."""
    for words in (
        ["predict", exported("int8"), photos / "a.png", "--format", "json"],
        ["predict", exported("onnx"), photos, "-o", tmp_path / "out.csv", "--exact"],
        ["embed", exported("tokens"), photos, "-o", tmp_path / "out.npy", "--features", "tokens"],
    ):
        program = (
            "import sys, atexit\n"
            f"sys.argv = ['vitrail', *{[str(word) for word in words]!r}]\n"
            "from vitrail.cli import main\n"
            "try:\n    main()\n"
            f"finally:\n    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[-1] == "[]", words[0]


def list_requirements(names: tuple[str, ...]) -> set[str]:
    """These distributions and everything that they require."""
    found, open_ = set[str](), list(names)
    while open_:
        name = open_.pop()
        if name.lower() in found:
            continue
        found.add(name.lower())
        wants = map(Requirement, distribution(name).requires or ())
        open_ += [each.name for each in wants if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vitrail and only the packages that prediction requires."""
    folder = tmp_path_factory.mktemp("bare")
    for name in list_requirements(NEEDED):
        found = distribution(name)
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
    (folder / "vitrail").symlink_to(ROOT / "src" / "vitrail")
    return folder


def run(bare: Path, *words: object) -> Any:
    """Run Python without site-packages: only the folder and the standard library."""
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(bare), "LANG": "C.UTF-8"}
    line = [sys.executable, "-S", "-s", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=env, cwd=bare)


@pytest.mark.parametrize("name", ["torch", "safetensors", "yaml", "onnx", "simplejpeg", "pytest"])
def test_bare_folder_lacks_heavy_packages(bare: Path, name: str) -> None:
    done = run(bare, "-c", f"import {name}")
    assert done.returncode == 1
    assert f"No module named '{name}'" in done.stderr


def test_predict_without_torch(bare: Path, exported: ExportFinder, photos: Path) -> None:
    done = run(bare, "-m", "vitrail", "predict", exported("onnx"), photos, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "vitrail: note: engine onnx: nothing measured for 3 images\n")
    assert_equal_to_eager(json.loads(done.stdout), photos)
    alone = run(bare, "-m", "vitrail", "predict", exported("onnx") / "model.onnx", photos / "a.png", "--format", "json")
    assert json.loads(alone.stdout)[0]["top"] == json.loads(done.stdout)[0]["top"]


def test_decoding_without_torch_is_bit_identical(bare: Path, photos: Path, tmp_path: Path) -> None:
    """Without simplejpeg, files that are decoded in full give the same pixels."""
    paths = [*sorted(photos.iterdir()), *list_example_photos()]
    program = (
        "import sys\nimport numpy as np\n"
        "from vitrail.data.images.decoding.model_input import decode_for_model\n"
        "from vitrail.data.images.preprocessing import Preprocessing\n"
        f"how = Preprocessing(image_size={PREPROCESSING.image_size}, crop={PREPROCESSING.crop}, "
        f"mean={PREPROCESSING.mean}, std={PREPROCESSING.std})\n"
        f"seen = np.stack([decode_for_model(each, how) for each in {list(map(str, paths))!r}])\n"
        f"np.save({str(tmp_path / 'seen.npy')!r}, seen)\n"
    )
    done = run(bare, "-c", program)
    assert done.returncode == 0, done.stderr
    assert np.array_equal(
        np.load(tmp_path / "seen.npy"), np.stack([decode_for_model(each, PREPROCESSING) for each in paths])
    )


def test_embed_without_torch(bare: Path, exported: ExportFinder, photos: Path, tmp_path: Path) -> None:
    words = ("embed", exported("tokens"), photos, "-o", tmp_path / "out.npy", "--features", "tokens")
    done = run(bare, "-m", "vitrail", *words)
    assert done.returncode == 0, done.stderr
    eager = Predictor(make_toy_model("rotary"), preprocessing=PREPROCESSING, output="tokens", scaled=True)
    expected = eager.engine.run(np.stack([eager.prepare_image(path) for path in sorted(photos.iterdir())]))
    assert np.abs(np.load(tmp_path / "out.npy") - expected).max() < 1e-4 * np.abs(expected).max()


def test_missing_packages_are_named(bare: Path, exported: ExportFinder, photos: Path, tmp_path: Path) -> None:
    """int8 of an export needs onnx, so float32 is used; a checkpoint needs torch."""
    done = run(bare, "-m", "vitrail", "predict", exported("onnx"), photos / "a.png", "--fast", "--format", "json")
    assert done.returncode == 0
    assert "engine int8 was left out: writing an ONNX file needs onnx, " in done.stderr
    checkpoint = save_toy_model(tmp_path / "model")
    done = run(bare, "-m", "vitrail", "predict", checkpoint, photos / "a.png")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "this needs torch, which is not installed; run: pip install vitrail; without it, predict" in done.stderr


def test_help_without_torch(bare: Path) -> None:
    for words in (["--help"], ["predict", "--help"], ["--version"]):
        done = run(bare, "-m", "vitrail", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "vitrail" in done.stdout


@pytest.mark.slow
def test_predict_in_a_new_environment(exported: ExportFinder, photos: Path, tmp_path: Path) -> None:
    """pip install --no-deps vitrail, and the packages that prediction requires."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pins = [f"{name}=={distribution(name).version}" for name in sorted(list_requirements(NEEDED))]
    line = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", ROOT, *pins]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False)
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("needs a network to install from")
    assert done.returncode == 0, done.stderr
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run([str(python), "-c", "import torch"], capture_output=True, text=True, check=False, env=env)
    assert "No module named 'torch'" in done.stderr
    command = [str(tmp_path / "env" / "bin" / "vitrail"), "predict", str(exported("onnx")), str(photos)]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert_equal_to_eager(json.loads(done.stdout), photos)
