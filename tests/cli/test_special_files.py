"""Whatever lies where a command expects a file or a folder: one line and exit code 2, and nothing is waited for."""

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
class Place:
    """A path of the folder below, and a command that meets it there."""

    path: str
    words: str
    codes: tuple[int, ...] = (2,)
    also: tuple[str, ...] = ()  # kinds that are no fault here
    lines: int = 1  # on stderr, if the exit code is 2


PLACES = [
    Place("model", "predict model photos"),
    Place("model/config.json", "predict model photos"),
    Place("model/model.safetensors", "eval model --data photos"),
    Place("model/config.json", "summary model"),
    Place("model/model.safetensors", "explain model photo.png -o why.png"),
    Place("model/preprocessor_config.json", "inspect-checkpoint model"),
    Place("model/model.safetensors", "convert model out.pth --to timm"),
    Place("model/config.json", "export model shipped"),
    Place("model/model.safetensors", "report model -o page.html"),
    Place("model", "look model -o figures"),
    Place("model", "bench model --seconds 0.01"),
    Place("weights.pth", "inspect-checkpoint weights.pth"),
    Place("weights.pth", "train --data photos --init weights.pth"),
    Place("sharded/pytorch_model.bin.index.json", "inspect-checkpoint sharded"),
    Place("shipped/config.json", "predict shipped photo.png"),
    Place("shipped/model.onnx", "predict shipped photo.png"),
    Place("shipped/model.onnx", "embed shipped photos -o rows.npy"),
    Place("shipped/config.json", "export model shipped --overwrite"),
    Place("photo.png", "predict model photo.png"),
    Place("photo.png", "explain model photo.png -o why.png"),
    Place("photos/a/0.png", "predict model photos -o rows.csv --overwrite", (0, 2), ("folder", "link to a folder"), 2),
    Place("photos", "eval model --data photos"),
    Place("photos", f"{TRAIN} --data photos -o new"),
    Place("photos/a", f"{TRAIN} --data photos -o new", also=("pipe", "link to a pipe", "endless device", "socket")),
    Place("labels.txt", "predict model photos --labels labels.txt"),
    Place("labels.txt", "convert model out.pth --to timm --labels labels.txt"),
    Place("recipe.yaml", f"{TRAIN} --data photos --recipe recipe.yaml -o new"),
    Place("recipe.yaml", "ablate recipe.yaml --without mixup --data photos -o table"),
    Place("real.json", "eval model --data photos --real real.json"),
    Place("run/run.json", "train --resume run"),
    Place("run/run.json", "predict run photos"),
    Place("run/log.jsonl", "train --resume run", (0, 2)),
    Place("run/log.jsonl", "runs run", (0, 2)),
    Place("run/run.json", "runs run", (0, 2)),
    Place("run/checkpoints", "train --resume run", (0, 2)),
    Place(STEP, "train --resume run", (0, 2)),
    Place(STEP, f"inspect-checkpoint {STEP}"),
    Place("run/model/config.json", "eval run --data photos"),
    Place("run/.lock", "train --resume run", (0, 2)),
    Place("out.csv", "predict model photos -o out.csv", also=("link that leads nowhere",)),
    Place("out.csv.partial", "predict model photos -o out.csv --overwrite", also=("folder",)),
    Place("out.csv.partial", "embed model photos -o out.csv --format npy --overwrite", also=("folder",)),
    Place("out.csv.partial/job.json", "predict model photos -o out.csv --resume"),
    Place("out.csv.partial/rows.csv", "predict model photos -o out.csv --resume"),
    Place("cifar/data_batch_1.bin", f"{TRAIN} --data cifar -o new"),
    Place("mnist/train-images-idx3-ubyte", f"{TRAIN} --data mnist -o new"),
    Place("new", f"{TRAIN} --data photos -o new", also=("folder", "link to a folder")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places") / "folder"
    write_model_folder(root / "model", image_size=16, patch_size=8, depth=1)
    write_class_folders(root / "photos", a=4, b=4, c=4)
    write_image(root / "photo.png")
    (root / "labels.txt").write_text("a\nb\nc\n")
    (root / "recipe.yaml").write_text("epochs: 1\n")
    for name in ("sharded", "cifar", "mnist", "out.csv.partial"):
        (root / name).mkdir()
    return root


@pytest.fixture
def place(folder: Path, exported: ExportFinder, tmp_path: Path, vitrail_: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be spoiled, with a finished run in it: the current folder."""
    if not (folder / "run").exists():
        monkeypatch.chdir(folder)
        shutil.copytree(exported("onnx"), folder / "shipped")
        assert vitrail_(*TRAIN.split(), "--data", "photos", "-o", "run", "--epochs", 1, "--save-every", 1).code == 0
    shutil.copytree(folder, tmp_path / "folder", symlinks=True)
    monkeypatch.chdir(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", range(len(PLACES)), ids=[f"{each.path}: {each.words[:24]}" for each in PLACES])
def test_a_special_file_is_one_line(case: int, place: Path, vitrail_: Run, mutations: int) -> None:
    """A third of the kinds at each place, all of them by `make fuzz`."""
    about = PLACES[case]
    for kind in list(SPECIAL_FILES)[case % 3 :: 3] if mutations < 10_000 else SPECIAL_FILES:
        path = place / about.path
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        SPECIAL_FILES[kind](path)
        said = vitrail_(*about.words.split())
        assert said.code in (*about.codes, *((0, 1, 2) if kind in about.also else ())), (kind, said)
        assert "Traceback" not in said.err, kind
        if said.code == 2:
            faults = [
                line for line in said.err.splitlines() if not line.startswith(("vitrail: note", "vitrail: warning"))
            ]
            assert len(faults) == about.lines, (kind, said.err)
            assert faults[0].startswith("vitrail: "), kind
        if kind == "folder":
            shutil.rmtree(path, ignore_errors=True)
