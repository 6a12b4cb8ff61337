"""Special files where a command expects a file or a folder: one line and exit code 2, and nothing blocks."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.saved_models import write_model_folder
from support.special_files import SPECIAL_FILES
from support.toy_datasets import write_class_folders, write_image
from support.toy_exports import ExportFinder

Run = Callable[..., Any]
STEP = "run/checkpoints/step-00000002.safetensors"
TRAIN = (
    "train --model ViT-Ti/16 --set depth=1 --set width=16 --set heads=2 --set patch_size=8 --image-size 16 --batch 4"
)


@dataclass(frozen=True)
class CommandInput:
    """A path in the folder below, and a command that reads or writes it."""

    path: str
    words: str
    codes: tuple[int, ...] = (2,)
    also: tuple[str, ...] = ()  # kinds that are not an error here
    lines: int = 1  # on stderr, if the exit code is 2


PLACES = [
    CommandInput("model", "predict model photos"),
    CommandInput("model/config.json", "predict model photos"),
    CommandInput("model/model.safetensors", "eval model --data photos"),
    CommandInput("model/config.json", "summary model"),
    CommandInput("model/model.safetensors", "explain model photo.png -o why.png"),
    CommandInput("model/preprocessor_config.json", "summary model"),
    CommandInput("model/model.safetensors", "convert model out.pth --to timm"),
    CommandInput("model/config.json", "export model shipped"),
    CommandInput("model/model.safetensors", "report model -o page.html"),
    CommandInput("model", "look model -o figures"),
    CommandInput("model", "bench model --seconds 0.01"),
    CommandInput("weights.pth", "summary weights.pth"),
    CommandInput("weights.pth", "train --data photos --init weights.pth"),
    CommandInput("sharded/pytorch_model.bin.index.json", "summary sharded"),
    CommandInput("shipped/config.json", "predict shipped photo.png"),
    CommandInput("shipped/model.onnx", "predict shipped photo.png"),
    CommandInput("shipped/model.onnx", "embed shipped photos -o rows.npy"),
    CommandInput("shipped/config.json", "export model shipped --overwrite"),
    CommandInput("photo.png", "predict model photo.png"),
    CommandInput("photo.png", "explain model photo.png -o why.png"),
    CommandInput(
        "photos/a/0.png", "predict model photos -o rows.csv --overwrite", (0, 2), ("folder", "link to a folder"), 2
    ),
    CommandInput("photos", "eval model --data photos"),
    CommandInput("photos", f"{TRAIN} --data photos -o new"),
    CommandInput(
        "photos/a", f"{TRAIN} --data photos -o new", also=("pipe", "link to a pipe", "endless device", "socket")
    ),
    CommandInput("labels.txt", "predict model photos --labels labels.txt"),
    CommandInput("labels.txt", "convert model out.pth --to timm --labels labels.txt"),
    CommandInput("recipe.yaml", f"{TRAIN} --data photos --recipe recipe.yaml -o new"),
    CommandInput("recipe.yaml", "ablate recipe.yaml --without mixup --data photos -o table"),
    CommandInput("real.json", "eval model --data photos --real real.json"),
    CommandInput("run/run.json", "train --resume run"),
    CommandInput("run/run.json", "predict run photos"),
    CommandInput("run/log.jsonl", "train --resume run", (0, 2)),
    CommandInput("run/log.jsonl", "runs run", (0, 2)),
    CommandInput("run/run.json", "runs run", (0, 2)),
    CommandInput("run/checkpoints", "train --resume run", (0, 2)),
    CommandInput(STEP, "train --resume run", (0, 2)),
    CommandInput(STEP, f"summary {STEP}"),
    CommandInput("run/model/config.json", "eval run --data photos"),
    CommandInput("run/.lock", "train --resume run", (0, 2)),
    CommandInput("out.csv", "predict model photos -o out.csv", also=("link that leads nowhere",)),
    CommandInput("out.csv.partial", "predict model photos -o out.csv --overwrite", also=("folder",)),
    CommandInput("out.csv.partial", "embed model photos -o out.csv --format npy --overwrite", also=("folder",)),
    CommandInput("out.csv.partial/job.json", "predict model photos -o out.csv --resume"),
    CommandInput("out.csv.partial/rows.csv", "predict model photos -o out.csv --resume"),
    CommandInput("cifar/data_batch_1.bin", f"{TRAIN} --data cifar -o new"),
    CommandInput("mnist/train-images-idx3-ubyte", f"{TRAIN} --data mnist -o new"),
    CommandInput("new", f"{TRAIN} --data photos -o new", also=("folder", "link to a folder")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs") / "folder"
    write_model_folder(root / "model", image_size=16, patch_size=8, depth=1)
    write_class_folders(root / "photos", a=4, b=4, c=4)
    write_image(root / "photo.png")
    (root / "labels.txt").write_text("a\nb\nc\n")
    (root / "recipe.yaml").write_text("epochs: 1\n")
    for name in ("sharded", "cifar", "mnist", "out.csv.partial"):
        (root / name).mkdir()
    return root


@pytest.fixture
def working_folder(
    folder: Path, exported: ExportFinder, tmp_path: Path, vitrail_: Run, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy that may be modified, with a finished run, as the current folder."""
    if not (folder / "run").exists():
        monkeypatch.chdir(folder)
        shutil.copytree(exported("onnx"), folder / "shipped")
        assert vitrail_(*TRAIN.split(), "--data", "photos", "-o", "run", "--epochs", 1, "--save-every", 1).code == 0
    shutil.copytree(folder, tmp_path / "folder", symlinks=True)
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", range(len(PLACES)), ids=[f"{each.path}: {each.words[:24]}" for each in PLACES])
def test_special_file_is_a_one_line_error(case: int, working_folder: Path, vitrail_: Run, mutations: int) -> None:
    """A third of the kinds for each input; `make fuzz` tests all of them."""
    about = PLACES[case]
    for kind in list(SPECIAL_FILES)[case % 3 :: 3] if mutations < 10_000 else SPECIAL_FILES:
        path = working_folder / about.path
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        SPECIAL_FILES[kind](path)
        result = vitrail_(*about.words.split())
        assert result.code in (*about.codes, *((0, 1, 2) if kind in about.also else ())), (kind, result)
        assert "Traceback" not in result.err, kind
        if result.code == 2:
            faults = [
                line for line in result.err.splitlines() if not line.startswith(("vitrail: note", "vitrail: warning"))
            ]
            assert len(faults) == about.lines, (kind, result.err)
            assert faults[0].startswith("vitrail: "), kind
        if kind == "folder":
            shutil.rmtree(path, ignore_errors=True)
