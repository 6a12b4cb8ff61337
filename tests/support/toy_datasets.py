"""Toy data sets on disk, in the layouts of the published ones."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def random_array(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_image(path: Path, seed: int = 0) -> Path:
    """Write a small image in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random_array(6, 5, 3, seed=seed)).save(path)
    return path


def write_class_folders(root: Path, **counts: int) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            write_image(root / name / f"{number}.png", 100 * label + number)
    return root


def encode_idx(values: NDArray[np.uint8]) -> bytes:
    sizes = np.array(values.shape, ">u4").tobytes()
    return bytes((0, 0, 8, values.ndim)) + sizes + values.tobytes()


def write_idx_files(
    root: Path, train: NDArray[Any], val: NDArray[Any], *, dash: str = "-", packed: bool = False
) -> Path:
    """Write idx files of random images with these labels."""
    root.mkdir(parents=True, exist_ok=True)
    for part, labels in (("train", train), ("t10k", val)):
        images = random_array(len(labels), 28, 28, seed=len(labels))
        for kind, values in ((f"images{dash}idx3", images), (f"labels{dash}idx1", labels.astype(np.uint8))):
            data = encode_idx(values)
            name = f"{part}-{kind}-ubyte"
            (root / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return root


def write_cifar10_binary(root: Path, each: int = 3) -> Path:
    root.mkdir(parents=True)
    for number in range(6):
        labels = np.arange(each, dtype=np.uint8) + number
        records = np.concatenate([labels[:, None], random_array(each, 3072, seed=number)], axis=1)
        (root / (f"data_batch_{number}.bin" if number else "test_batch.bin")).write_bytes(records.tobytes())
    (root / "batches.meta.txt").write_text("\n".join((*CIFAR_CLASSES, "", "")))
    return root


def write_cifar10_python(root: Path, each: int = 3, protocol: int = 2) -> Path:
    """The images of `write_cifar10_binary`, with bytes as keys as in Python 2."""
    root.mkdir(parents=True)
    for number in range(6):
        batch = {
            b"batch_label": b"a toy",
            b"labels": [label + number for label in range(each)],
            b"data": random_array(each, 3072, seed=number),
            b"filenames": [b"a.png"] * each,
        }
        (root / (f"data_batch_{number}" if number else "test_batch")).write_bytes(pickle.dumps(batch, protocol))
    names = [name.encode() for name in CIFAR_CLASSES]
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": names, b"num_vis": 3072}, protocol))
    return root


def write_cifar100(root: Path, *, binary: bool) -> Path:
    root.mkdir(parents=True)
    names = [f"thing_{number:02}" for number in range(100)]
    for part, labels in (("train", [99, 0, 5]), ("test", [7, 8])):
        images = random_array(len(labels), 3072, seed=len(labels))
        if binary:
            two = np.array([[label // 5, label] for label in labels], np.uint8)
            (root / f"{part}.bin").write_bytes(np.concatenate([two, images], axis=1).tobytes())
        else:
            batch = {b"fine_labels": labels, b"coarse_labels": [0] * len(labels), b"data": images}
            (root / part).write_bytes(pickle.dumps(batch, 2))
    if binary:
        (root / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    else:
        (root / "meta").write_bytes(pickle.dumps({b"fine_label_names": [name.encode() for name in names]}, 2))
    return root
