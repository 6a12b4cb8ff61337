"""The command lines that `compare_versions.py` runs with two versions of vitrail.

Each version runs them in a folder of its own. There ../data is generated, ../before/NAME is what *before* wrote, and
NAME what the version itself wrote, with or without an ending. Everything is as small as it can be.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Command:
    """A command line; its outputs have the name of the comparison."""

    line: str
    stdout: Literal["json", "text", ""] = ""  # what of it is compared
    code: int = 0  # 2: an image cannot be read
    copied: str = ""  # what *before* wrote under this name is copied first, to be continued
    killed_at: str = ""  # *before* is killed when this file is there and not empty; *after* resumes
    resume: str = ""
    whole: str = ""  # what the command without an interruption wrote


SAME = "--seed 1 --threads 1"
PHOTOS = f"--data ../data/photos {SAME} --batch 40"
STEPS = "--workers 0 --epochs 0.3 --warmup 0 --lr 0.01"  # three steps
SMALL = "--set image_size=32 --set patch_size=8 --set width=32 --set depth=2 --set heads=2"
VIT = f"--recipe scratch --model vit_tiny_patch16_224 {SMALL}"
EVERYTHING = (
    f"train {PHOTOS} {VIT} --optimizer muon --lr 0.005 --mixup 0.2 --cutmix 1 --ema 0.9 --accumulate 2 --erase 0.3 "
    "--policy rand --jitter 0.2 --repeats 2 --smoothing 0.1 --dropout 0.1 --stochastic-depth 0.1 --clip 1 "
    "--save-every 1 --workers 2 --epochs 4"
)
STUDENT = f"--recipe scratch --model deit_tiny_distilled_patch16_224 {SMALL} --teacher ../before/resnet"
TEXT = "--set width=32 --set encoder_depth=1 --set decoder_depth=1 --set heads=2 --set mlp_width=32"
LSTM = "--recipe lstm-cpu --set width=16 --set hidden=16 --pair de-en"
CAPTIONS = f"train --task caption {SAME} --workers 0 --recipe caption-cpu --set width=32 --set depth=2 --set heads=2"
TRAININGS = {
    "fashion": f"train {SAME} --workers 0 --epochs 0.05",
    "everything": EVERYTHING,
    "vit": f"train {PHOTOS} {STEPS} {VIT}",
    "deit": f"train {PHOTOS} {STEPS} --recipe deit --model deit_tiny_patch16_224 {SMALL} --precision bfloat16",
    "cct": f"train {PHOTOS} {STEPS} --recipe scratch --model cct_cpu_32 --early-size 24 --whiten",
    "resnet": f"train {PHOTOS} {STEPS} --recipe scratch --model resnet20_cifar --set stages=[1,1,1] --optimizer sgd",
    "color": f"train --data ../data/color {SAME} --workers 0 --batch 4 --epochs 1 --recipe scratch --model cct_cpu_32",
    "finetune": f"train --data ../data/color {SAME} --workers 0 --batch 4 --epochs 1 --init ../before/vit",
    "linear": f"train {PHOTOS} {STEPS} --init ../before/everything/model --train-blocks 0",
    "hard": f"distill {PHOTOS} {STEPS} {STUDENT} --distill hard",
    "soft": f"distill {PHOTOS} {STEPS} {STUDENT} --distill soft --set distilled=false",
    "text": f"train --data tatoeba {SAME} --workers 0 --epochs 0.02 {TEXT}",
    "lstm": f"train --data tatoeba {SAME} --workers 0 --epochs 0.01 {LSTM}",
    "captions": f"{CAPTIONS} --epochs 0.03",
    **{
        f"pretrain-{task}": f"pretrain {task} --data ../data/photos {SAME} --workers 0 --batch 32 --epochs 0.16"
        for task in ("mae", "simmim", "mpp", "simclr", "byol", "dino", "esvit", "aim", "igpt")
    },
}
EXTENDED = {  # a finished run of *before* is extended
    "vit": "train",
    "hard": "distill",
    "text": "train",
    "captions": "train",
    "pretrain-mae": "pretrain",
    "pretrain-byol": "pretrain",
    "pretrain-dino": "pretrain",
}
IMAGES, RUN = "../data/images --engine eager --batch 4 --streams 1", "../data/images --batch 4 --streams 1"
BELOW = "../data/images/below"
MANY = "../before/vit ../data/many --engine eager --batch 1 --streams 1"  # so that an interruption changes no batch
SENTENCES = "../before/text ../data/sentences.txt --batch 1 --beam 2 --length 12"
COMMANDS: dict[str, Command] = {
    "predict-table": Command(f"predict ../before/color {IMAGES}", "text", 2),
    **{
        f"predict-{name}": Command(f"predict {name} {IMAGES} --format json --exact", "json", 2)
        for name in ("everything", "cct", "hard", "finetune", "cct_cifar10")
    },
    **{
        f"predict-{ending}": Command(f"predict ../before/vit {IMAGES} -o predict-{ending}.{ending}", code=2)
        for ending in ("csv", "jsonl", "parquet")
    },
    "predict-merged": Command(f"predict ../before/vit {IMAGES} --merge 1 --format json", "json", 2),
    "embed-class": Command(f"embed ../before/everything {IMAGES} -o embed-class.npy", code=2),
    "embed-tokens": Command(f"embed hard {IMAGES} --features tokens -o embed-tokens.npy", code=2),
    "embed-mean": Command(f"embed ../before/vit {IMAGES} --features mean -o embed-mean.parquet", code=2),
    "embed-pretrained": Command(f"embed ../before/pretrain-mae {IMAGES} -o embed-pretrained.npy", code=2),
    "embed-maps": Command(f"embed ../before/resnet {IMAGES} --maps -o embed-maps.npz", code=2),
    "translate": Command("translate text ../data/few.txt --n-best 2 --length 12 --format jsonl", "text"),
    "translate-run": Command("translate ../before/text ../data/few.txt --beam 3 --length 12 --format jsonl", "text"),
    "translate-lstm": Command("translate lstm ../data/few.txt --length 12 --format jsonl", "text"),
    "translate-sampled": Command("translate text ../data/few.txt --length 12 --top-k 5 --seed 3", "text"),
    "caption": Command(
        "caption ../before/captions ../data/photos/val/Bag --length 8 --top-k 20 --seed 3 --json", "json"
    ),
    "caption-words": Command(
        "caption captions ../data/photos/val/Bag/000.png --length 8 --top-k 20 --seed 3 -o caption-words --arrays"
    ),
    "eval": Command("eval ../before/everything --json", "json"),
    "eval-folder": Command("eval finetune --json --out eval-folder", "json"),
    "eval-head": Command("eval ../before/hard --head class --json", "json"),
    "eval-text": Command("eval ../before/text --json --beam 1", "json"),
    "eval-captions": Command("eval ../before/captions --json --beam 1", "json"),
    "compare": Command("compare ../before/resnet ../before/hard --json", "json"),
    "probe": Command("probe ../before/pretrain-simclr --data ../data/photos --shots 1,5 --json", "json"),
    "probe-layer": Command("probe ../before/vit --data ../data/photos --layer 0 --no-linear --json", "json"),
    "export-onnx": Command("export ../before/vit export-onnx"),
    "export-int8": Command("export ../before/everything export-int8 --to onnx-int8"),
    "export-mean": Command("export ../before/cct export-mean --features mean"),
    "export-torch": Command("export ../before/vit export-torch --to torch-export"),
    **{
        f"run{side.strip('./')}-{kind}": Command(f"predict {side}export-{kind} {RUN} --format json", "json", 2)
        for kind in ("onnx", "int8")
        for side in ("", "../before/")
    },
    "run-mean": Command(f"embed ../before/export-mean {RUN} --features mean -o run-mean.npy", code=2),
    "convert-npz": Command("convert ../before/vit convert-npz.npz --to google"),
    "convert-hf": Command("convert ../before/deit convert-hf --to hf --dtype float32"),
    "convert-larger": Command("convert ../before/vit convert-larger --to vitrail --image-size 64 --classes 7"),
    "convert-parts": Command("convert ../before/pretrain-mae convert-parts.pth --to mae --parts"),
    **{
        f"explain-{method}": Command(
            f"explain {model} {BELOW}/1.png {BELOW}/0.jpg --method {method} --arrays --json -o explain-{method}", "json"
        )
        for method, model in (
            ("rollout", "../before/vit"),
            ("grad-rollout", "everything --class 3 --check"),
            ("attention", "../before/hard --layer all --head all"),
            ("norms", "cct"),
            ("pca", "../before/hard"),
            ("neighbors", "../before/vit --data ../data/photos"),
        )
    },
    "explain-sentence": Command(
        'explain ../before/text --sentence "Tom ist müde." --arrays --json -o explain-sentence', "json"
    ),
    "look": Command("look ../before/hard --images 4 --method rollout --arrays -o look"),
    "look-color": Command("look cct --data ../data/color --images 2 --arrays -o look-color"),
    "report": Command("report ../before/vit --data ../data/color --images 2 --explained 1 -o report.html"),
    "models": Command("models --json", "json"),
    "summary": Command("summary ViT-B/16 --json", "json"),
    "runs": Command("runs ../before --json", "json"),
}
JOBS = {  # command line, what it writes, and what is there soon after it starts
    "rows": (f"predict {MANY}", "csv", "rows.csv"),
    "features": (f"embed {MANY}", "npy", "*.csv"),
    "maps": (f"embed {MANY} --maps", "npz", "*.csv"),
    "translations": (f"translate {SENTENCES}", "jsonl", "rows*"),
}
KILLED = {
    "killed-run": Command(
        f"{EVERYTHING} -o killed-run",
        killed_at="killed-run/checkpoints/step*",
        resume="train --resume killed-run",
        whole="everything",
    )
}
for name, (line, ending, watched) in JOBS.items():
    COMMANDS[f"whole-{name}"] = Command(f"{line} -o whole-{name}.{ending}")
    line = f"{line} -o killed-{name}.{ending}"
    KILLED[f"killed-{name}"] = Command(
        line, killed_at=f"killed-{name}.{ending}.partial/{watched}", resume=f"{line} --resume", whole=f"whole-{name}"
    )
CASES: dict[str, Command] = {
    **{name: Command(f"{line} -o {name}") for name, line in TRAININGS.items()},
    **{
        f"extended-{name}": Command(f"{command} --resume extended-{name} --epochs 0.5", copied=name)
        for name, command in EXTENDED.items()
    },
    **COMMANDS,
    **KILLED,
}
