"""The command lines that `compare_versions.py` runs with two versions of vitrail, and the data that they run on.

Each version runs them in a folder of its own. There ../data is generated, ../before/NAME is what *before* made, NAME
is what the version made itself. Everything is as small as it can be.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL, Signals
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class Command:
    """A command line; what it writes has the name of its comparison, with or without an ending."""

    line: str
    stdout: Literal["json", "text", "numbers", ""] = ""  # what of it is compared
    code: int = 0  # 1: some images cannot be read


@dataclass(frozen=True)
class Interruption:
    """A command line that is interrupted and resumed; NAME stands for what it writes."""

    line: str
    resume: str
    watched: str  # the signal is sent when this file is there and not empty
    whole: str  # the comparison that does the same without interruption
    signal: Signals = SIGKILL


Case = Command | Interruption

CIFAR = "--data ../data/cifar10 --seed 1 --batch 32 --recipe scratch"
SHORT = f"train {CIFAR} --workers 0 --epochs 0.4 --warmup 0 --lr 0.01"
SMALL = "--set image_size=32 --set width=32 --set depth=2 --set heads=2"
EVERYTHING = (
    f"{CIFAR} --model vit_tiny_patch16_224 {SMALL} --set patch_size=8 --optimizer muon --lr 0.005 --mixup 0.2 "
    "--cutmix 1 --ema 0.9 --accumulate 2 --erase 0.3 --policy rand --jitter 0.2 --repeats 2 --smoothing 0.1 "
    "--dropout 0.1 --stochastic-depth 0.1 --clip 1 --epochs 4 --save-every 1 --workers 2"
)
STUDENT = (
    f"{CIFAR} --model deit_tiny_distilled_patch16_224 {SMALL} --set patch_size=8 --workers 0 --teacher ../before/resnet"
)
HARD = f"distill {STUDENT} --epochs 4 --distill hard --save-every 1"
STILL = "--epochs 1 --flip 0 --crop centre --mixup 0 --cutmix 0 --erase 0 --policy none"
FOLDERS = "train --data ../data/folders --seed 2 --batch 4 --epochs 1 --workers 0"

TRAININGS = {
    "fashion": "train --epochs 2 --seed 3",
    "cifar": f"train {EVERYTHING}",
    "vit": f"{SHORT} --model vit_tiny_patch16_224 {SMALL}",
    "pooled": f"{SHORT} --model ViT-Ti/16 {SMALL} --set pool=map --set class_token=false --set registers=2",
    "sincos": f"{SHORT} --model vit_small_patch16_224 {SMALL} --set width=48 --set heads=12 --set positions=sincos_2d",
    "deit": f"{SHORT} --model deit_tiny_patch16_224 {SMALL} --policy three --precision bfloat16",
    "hybrid": f"{SHORT} --model vit_base_r50_s16_224 {SMALL} --set stages=[1,1,1]",
    "cait": f"{SHORT} --model cait_xxs24_224 {SMALL} --set class_depth=1 --layer-decay 0.7",
    "t2t": f"{SHORT} --model t2t_vit_7 {SMALL} --set stage_width=16",
    "cct": f"{SHORT} --model cct_cpu_32 {SMALL} --set stem=[16] --early-size 24 --whiten",
    "linformer": f"{SHORT} --model linformer_tiny_patch16_224 {SMALL} --set patch_size=8 --set projected=4",
    "axial": f"{SHORT} --model axial_tiny_patch16_224 {SMALL} --set patch_size=8 --optimizer sgd --schedule linear",
    "resnet": f"{SHORT} --model resnet18 --set image_size=32 --set stages=[1,1,1,1] --policy auto",
    "resnet-cifar": f"{SHORT} --model resnet20_cifar --set stages=[1,1,1]",
    "regnety": f"{SHORT} --model regnety_040 --image-size 32 --set stages=[1] --set widths=[16] --set group_width=8",
    "photos": f"{FOLDERS} --recipe deit --model deit_tiny_patch16_224 {SMALL}",
    "finetune": f"{FOLDERS} --init ../before/vit --image-size 48",
    "probe": f"{FOLDERS} --init ../before/cifar/model --train-blocks 0",  # the recipe has another name today
    "distill-hard": HARD,
    "distill-soft": f"distill {STUDENT} --epochs 1 --distill soft --set distilled=false",
    "distill-kept": f"distill {STUDENT} {STILL} --distill hard --teacher-cache distill-kept.answers",
    "distill-again": f"distill {STUDENT} {STILL} --distill soft --teacher-cache ../before/distill-kept.answers",
    "ablate": f"ablate scratch {STUDENT.replace('--recipe scratch', '')} --without flip --epochs 0.4",
}
LAYOUTS = {  # model: layout and ending
    "vit": "vitrail timm.safetensors hf torchvision.pth google.npz dino.pth mae.pth deit.safetensors",
    "pooled": "timm",
    "sincos": "moco.pth",
    "deit": "deit.pth hf",
    "distill-hard": "deit.pth timm.pth",
    "hybrid": "google.npz timm.pth",
    "cait": "timm.pth deit.pth",
    "t2t": "t2t.pth t2t_by_width.pth",
    "resnet": "torchvision.pth timm.safetensors",
    "resnet-cifar": "akamaster.pth",
    "regnety": "torchvision.pth",
}
WRITING = {"dino": "--classes 0", "moco": "--classes 0"}  # without a head
READING = {  # what a file cannot say
    **dict.fromkeys(("timm", "torchvision", "dino", "mae", "deit", "t2t"), "--set heads=2"),
    "t2t_by_width": "--set heads=2 --from t2t_by_width",
    "moco": "--set heads=12",
}
NOT_READ = (
    "vit-vitrail",
    "vit-deit",
    "deit-hf",
    "distill-hard-timm",
    "hybrid-timm",
    "cait-deit",
    "resnet-timm",
)  # time
PLAIN = "../data/images --engine eager --batch 4 --streams 1"
MANY = "../before/vit ../data/many --engine eager --batch 1 --streams 1"  # so that an interruption changes no batch
RUN = "../data/images --batch 4 --streams 1"
BELOW = "../data/images/below"


def conversions() -> dict[str, Command]:
    """Every layout is written from our own, and read again. What is said of a file that is read has changed."""
    written, read = dict[str, Command](), dict[str, Command]()
    for model, files in LAYOUTS.items():
        for file in files.split():
            layout = file.split(".")[0]
            out, back = f"write-{model}-{file}", f"read-{model}-{layout}"
            said = READING.get(layout, "") if model not in ("resnet", "regnety") else ""
            line = f"convert ../before/{model}/model {out} --to {layout} {WRITING.get(layout, '')}"
            written[f"write-{model}-{layout}"] = Command(line, "numbers")
            if f"{model}-{layout}" not in NOT_READ:
                read[back] = Command(f"convert ../before/{out} {back} --to vitrail {said}")
    return written | read


PREDICTIONS = {
    "predict-table": Command(f"predict ../before/cifar {PLAIN}", "text", 1),
    "predict-json": Command(f"predict ../before/cifar {PLAIN} --format json", "json", 1),
    "predict-jsonl": Command(f"predict ../before/fashion {PLAIN} --top 3 -o predict-jsonl.jsonl", code=1),
    "predict-csv": Command(f"predict ../before/fashion {PLAIN} --top 3 -o predict-csv.csv", code=1),
    "predict-parquet": Command(f"predict ../before/fashion {PLAIN} --top 3 -o predict-parquet.parquet", code=1),
    **{
        f"predict-{model}": Command(f"predict {model} {PLAIN} --exact --format json", "json", 1)
        for model in ("cait", "t2t", "cct", "linformer", "distill-hard")
    },
    "predict-merged": Command(f"predict ../before/vit {PLAIN} --merge 1 --format json", "json", 1),
    "embed-class": Command(f"embed ../before/cifar {PLAIN} -o embed-class.npy", code=1),
    "embed-tokens": Command(f"embed cait {PLAIN} --features tokens -o embed-tokens.npy", code=1),
    "embed-mean": Command(f"embed ../before/vit {PLAIN} --features mean -o embed-mean.parquet", code=1),
    "whole-rows": Command(f"predict {MANY} -o whole-rows.csv"),
    "whole-features": Command(f"embed {MANY} -o whole-features.npy"),
    "eval-cifar": Command("eval ../before/cifar --json", "json"),
    "eval-folder": Command("eval ../before/finetune --json --out eval-folder", "json"),
    "eval-class": Command("eval ../before/distill-hard --head class --json", "json"),
    "compare": Command("compare ../before/resnet ../before/distill-hard --json", "json"),
}
EXPORTS = {
    "export-onnx": Command("export ../before/vit export-onnx"),
    "export-int8": Command("export ../before/deit export-int8 --to onnx-int8"),
    "export-mean": Command("export ../before/cct export-mean --features mean"),
    "export-torch": Command("export ../before/vit export-torch --to torch-export"),
    "run-onnx": Command(f"predict ../before/export-onnx {RUN} --format json", "json", 1),
    "run-own-onnx": Command(f"predict export-onnx {RUN} --format json", "json", 1),
    "run-int8": Command(f"predict ../before/export-int8 {RUN} --format json", "json", 1),
    "run-own-int8": Command(f"predict export-int8 {RUN} --format json", "json", 1),
    "run-mean": Command(f"embed ../before/export-mean {RUN} --features mean -o run-mean.npy", code=1),
}
GRADIENTS = "--method grad-rollout --class 3 --check --arrays --json"
ALL_HEADS = "--method attention --layer all --head all --arrays"
INSPECTIONS = {
    "explain-rollout": Command(
        f"explain ../before/vit {BELOW} --method rollout --arrays --json -o explain-rollout", "json"
    ),
    "explain-class": Command(f"explain cait {BELOW}/1.png {GRADIENTS} -o explain-class", "json"),
    "explain-heads": Command(f"explain ../before/distill-hard {BELOW}/0.jpg {ALL_HEADS} -o explain-heads"),
    "explain-pool": Command(f"explain pooled {BELOW}/0.jpg --method pool --arrays -o explain-pool"),
    "explain-norms": Command(f"explain linformer {BELOW}/0.jpg --method norms --arrays -o explain-norms"),
    "look-run": Command("look ../before/distill-hard --images 4 --method rollout --arrays -o look-run"),
    "look-folder": Command(
        "look ../before/cct --data ../data/folders --images 2 --method rollout --arrays -o look-folder"
    ),
    "report": Command("report ../before/vit --data ../data/folders --images 2 --explained 1 -o report.html"),
    "inspect-model": Command("inspect-checkpoint ../before/pooled/model --tensors --json", "json"),
    "inspect-npz": Command("inspect-checkpoint ../before/write-vit-google.npz --json", "json"),
    "models": Command("models --json", "json"),
    "models-table": Command("models ViT-B/*", "numbers"),
    "summary": Command("summary ViT-B/16 --json", "json"),
    "summary-cait": Command("summary cait_s24_224 --json --depth 9", "json"),
}
ROWS, FEATURES = f"predict {MANY} -o NAME.csv", f"embed {MANY} -o NAME.npy"
TRAIN = f"train {EVERYTHING} -o NAME"
INTERRUPTIONS = {
    "killed": Interruption(TRAIN, "train --resume NAME", "NAME/checkpoints/step*", "cifar"),
    "stopped": Interruption(f"{HARD} -o NAME", "distill --resume NAME", "NAME/log.jsonl", "distill-hard", SIGINT),
    "killed-rows": Interruption(ROWS, f"{ROWS} --resume", "NAME.csv.partial/rows.csv", "whole-rows"),
    "killed-features": Interruption(FEATURES, f"{FEATURES} --resume", "NAME.npy.partial/files.csv", "whole-features"),
}
COMPARISONS: dict[str, Case] = {
    **{name: Command(f"{line} -o {name}") for name, line in TRAININGS.items()},
    "runs": Command("runs . --json", "json"),
    **conversions(),
    **PREDICTIONS,
    **EXPORTS,
    **INSPECTIONS,
    **INTERRUPTIONS,
}


def public_weights(folder: Path) -> dict[str, Command]:
    """Commands that read the files of a folder, with a name for each that has no dot."""
    commands = dict[str, Command]()
    for path in sorted(folder.resolve().iterdir()):
        name = path.name.replace(".", "-")
        commands[f"weights-{name}"] = Command(f"convert {path} weights-{name} --to vitrail", "numbers")
        commands[f"answers-{name}"] = Command(f"predict {path} {PLAIN} --format json", "json", 1)
    return commands


def write_data(folder: Path) -> None:
    """Small noisy images whose class is their colour: CIFAR-10's files, a folder of classes, and images to predict."""
    random = np.random.default_rng(0)

    def draw(label: int, rows: int, columns: int) -> NDArray[np.uint8]:
        colour = np.random.default_rng(label).integers(40, 216, 3)
        return np.clip(random.normal(colour, 40, (rows, columns, 3)), 0, 255).astype(np.uint8)

    (folder / "cifar10").mkdir(parents=True)
    for part in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        records = [bytes([label]) + draw(label, 32, 32).transpose(2, 0, 1).tobytes() for label in (*range(10),) * 5]
        (folder / "cifar10" / f"{part}.bin").write_bytes(b"".join(records))
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    (folder / "cifar10" / "batches.meta.txt").write_text("\n".join((*names, "", "")))

    sizes = ((40, 60), (64, 64), (33, 32), (200, 150), (24, 90), (700, 500))
    for label, name in enumerate(("ants", "bees", "cats")):
        (folder / "folders" / name).mkdir(parents=True)
        for number, size in enumerate(sizes[:5] * 2):
            Image.fromarray(draw(label, *size)).save(
                folder / "folders" / name / f"{number}.{('jpg', 'png')[number % 2]}"
            )
    images = folder / "images" / "below"
    images.mkdir(parents=True)
    for number, size in enumerate(sizes):
        Image.fromarray(draw(number, *size)).save(images / f"{number}.{('jpg', 'png')[number % 2]}")
    grey = Image.fromarray(draw(7, 50, 40)).convert("L")
    grey.save(images / "grey.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(draw(8, 50, 80)).save(images / "turned.jpg", exif=exif)
    Image.fromarray(draw(9, 50, 80)).convert("RGBA").save(folder / "images" / "alpha.png")
    (folder / "images" / "text.jpg").write_text("this is not an image")
    (folder / "images" / "empty.png").write_bytes(b"")
    (folder / "labels.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    (folder / "many").mkdir()
    for number in range(400):
        shutil.copyfile(
            images / f"{number % 4}.{('jpg', 'png')[number % 2]}",
            folder / "many" / f"{number:03}.{('jpg', 'png')[number % 2]}",
        )
