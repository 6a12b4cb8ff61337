"""The jobs of other libraries that `prediction.py` compares with, as their users write them, and how they are timed.

    python benchmarks/peer_prediction_jobs.py timm-photo FOLDER photo.jpg
    python benchmarks/peer_prediction_jobs.py transformers-folder FOLDER photos answers.csv

Each runs in its own process and imports only what it needs. FOLDER holds the weights in the library's layout. The last
line that a job prints is its time in seconds after everything was imported and loaded.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

BATCH = 16  # images
# A small process starts the job, because the peak memory of a new process starts at that of its parent.
LAUNCHER = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
out, err = process.stdout.read(), process.stderr.read()
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024
result = {"seconds": seconds, "megabytes": used.ru_maxrss * unit / 1e6, "code": os.waitstatus_to_exitcode(status)}
print(json.dumps({**result, "out": out.decode("utf-8", "replace"), "err": err.decode("utf-8", "replace")}))
"""


@dataclass(frozen=True)
class FinishedProcess:
    """Time, memory and output of a process."""

    seconds: float
    megabytes: float  # peak resident set
    out: str


def run_job(*command: object) -> FinishedProcess:
    words = [sys.executable, "-S", "-c", LAUNCHER, *map(str, command)]
    result = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    if result["code"]:
        raise SystemExit(f"{' '.join(words[4:])} ended with {result['code']}: {result['err'][-2000:]}")
    return FinishedProcess(result["seconds"], result["megabytes"], result["out"])


def load_timm_model(folder: str) -> tuple[Any, Any]:
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    import timm
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform

    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    resolve: Any = resolve_data_config
    make: Any = create_transform
    return model, make(**resolve({}, model=model))


def predict_photo_with_timm(folder: str, photo: str) -> None:
    model, transform = load_timm_model(folder)
    import torch
    from PIL import Image

    with torch.inference_mode():
        shares = model(transform(Image.open(photo).convert("RGB"))[None]).softmax(-1)
    best = shares.topk(5)
    print(*best.indices[0].tolist())


def predict_folder_with_timm(folder: str, photos: str, answers: str) -> None:
    """A plain loop with PIL: read one batch, then compute it."""
    model, transform = load_timm_model(folder)
    import csv

    import torch
    from PIL import Image

    start = perf_counter()
    files = list_images(photos)
    with Path(answers).open("w", newline="") as file, torch.inference_mode():
        writer = csv.writer(file)
        writer.writerow(["file", "index_1", "probability_1"])
        for at in range(0, len(files), BATCH):
            part = files[at : at + BATCH]
            images = torch.stack([transform(Image.open(path).convert("RGB")) for path in part])
            best = model(images).softmax(-1).topk(5)
            writer.writerows(zip(part, best.indices[:, 0].tolist(), best.values[:, 0].tolist(), strict=True))
    print(perf_counter() - start)


def load_transformers_pipeline(folder: str) -> Any:
    from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]

    # isort: split
    from transformers import pipeline
    from transformers.utils import logging

    logging.disable_progress_bar()
    make: Any = pipeline
    return make("image-classification", model=folder, device="cpu", top_k=5)


def predict_photo_with_transformers(folder: str, photo: str) -> None:
    classify = load_transformers_pipeline(folder)
    print(*(each["label"] for each in classify(photo)))


def predict_folder_with_transformers(folder: str, photos: str, answers: str) -> None:
    """As in its documentation: an iterator of files, predictions in batches."""
    classify = load_transformers_pipeline(folder)
    import csv

    start = perf_counter()
    files, index = list_images(photos), classify.model.config.label2id
    with Path(answers).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "index_1", "probability_1"])
        for path, best in zip(files, classify((path for path in files), batch_size=BATCH), strict=True):
            writer.writerow([path, index[best[0]["label"]], best[0]["score"]])
    print(perf_counter() - start)


def list_images(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


JOBS: dict[str, Any] = {
    "timm-photo": predict_photo_with_timm,
    "timm-folder": predict_folder_with_timm,
    "transformers-photo": predict_photo_with_transformers,
    "transformers-folder": predict_folder_with_transformers,
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
