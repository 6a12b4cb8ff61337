"""Seconds and peak memory of the twelve most expensive small files known, each read in its own process.

    PYTHONPATH=tests .venv/bin/python benchmarks/worst_inputs.py [--before SRC]

With --before, the src folder of another checkout, every file is read by both. A process that takes longer than
--seconds, or more than 12 GB, is stopped. Memory is the growth of the resident set at its peak, after the imports.
"""

import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cyclopts import run
from PIL import Image
from support import hostile_images as images
from support.bad_checkpoints import zip_pickle
from support.toy_onnx_graphs import write_graph_folder

from vitrail.base.text import format_table

MEMORY_LIMIT = 12 * 2**30
BMP_SKIPS = b"\0\2\xff\xff"  # run-length code of BMP: skip 255 pixels to the right and 255 down
READ_SCRIPT = """
import os, resource, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import vitrail
from vitrail.data.images.formats.cifar import CIFAR_LAYOUTS, read_pickled_batch
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.formats.mnist_idx import read_idx_file
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.recipes.recipe import open_recipe
load, predictor = vitrail.load, vitrail.Predictor
readers = {
    "load": load,
    "image": lambda path: decode_for_model(path, Preprocessing(image_size=224)),
    "idx": lambda path: read_idx_file(path, 3),
    "cifar": lambda path: read_pickled_batch(path, CIFAR_LAYOUTS[1]),
    "recipe": lambda path: open_recipe(str(path)),
    "predict": lambda path: predictor(path).predict(Path(os.environ["PHOTO"])),
}
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # of this process only
read, path, before = readers[sys.argv[1]], Path(sys.argv[2]), peak()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
start = time.perf_counter()
try:
    read(path)
    outcome = "read"
except vitrail.VitrailError:
    outcome = "refused"
except BaseException as error:
    outcome = type(error).__name__
print(f"{time.perf_counter() - start:.2f} s, {(peak() - before) / 1024:.0f} MB, {outcome}")
"""


def rebuild_on_device() -> bytes:
    """A tensor of one number that claims two billion, copied to a device."""
    one = b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
    view = b"ctorch._utils\n_rebuild_tensor_v2\n" + one + b"K\0(J\0\xca\x9a;t(K\0t\x89ccollections\nOrderedDict\n)RtR"
    copy = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + view + b"ctorch\nfloat64\nX\x03\0\0\0cpu\x89tR"
    return zip_pickle(b"\x80\x02}X\x01\0\0\0a" + copy + b"s.", b"\0\0\0\0")


def nested_lists(levels: int = 26) -> bytes:
    """A tensor of nested lists, each of which contains the previous one twice."""
    lists = b"K\0](K\x01K\x01eq\0" + b"".join(
        b"K" + bytes((n,)) + b"](h" + bytes((n - 1,)) + b"h" + bytes((n - 1,)) + b"eq" + bytes((n,))
        for n in range(1, levels)
    )
    return zip_pickle(b"\x80\x02}(" + lists + b"X\x01\0\0\0actorch\nFloatTensor\nh" + bytes((levels - 1,)) + b"\x85Ru.")


def tuple_key(levels: int = 44) -> bytes:
    """A dictionary whose key is a nested tuple, each level of which contains the previous one twice."""
    tuples = b")" + b"".join(b"q" + bytes((n,)) + b"h" + bytes((n,)) + b"\x86" for n in range(levels))
    return b"\x80\x02}" + tuples + b"K\x01s."


def gzip_bomb() -> bytes:
    return gzip.compress(bytes((0, 0, 8, 3)) + (2**12).to_bytes(4, "big") * 3 + bytes(2**32 - 2**20), 9)


def yaml_alias_bomb() -> bytes:
    rows = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 8))
    return f"epochs: [&a0 [x, x, x, x, x, x, x, x, x], {rows}]\n".encode()


def large_image(kind: str, side: tuple[int, int], **options: object) -> bytes:
    return images.encode_image(Image.new("RGB", side, (200, 30, 60)), kind, **options)


INPUTS: dict[str, tuple[str, str, Callable[[], bytes]]] = {  # what it is → how it is read, its file name, its bytes
    "pickle: a copy to a device of a stride-0 tensor": ("load", "a.pth", rebuild_on_device),
    "pickle: a tensor of nested lists": ("load", "b.pth", nested_lists),
    "CIFAR pickle: 44 nested tuples as a key": ("cifar", "data_batch_1", tuple_key),
    "idx: a gzip bomb": ("idx", "train-images-idx3-ubyte.gz", gzip_bomb),
    "recipe: YAML aliases": ("recipe", "recipe.yaml", yaml_alias_bomb),
    "PNG, 1 bit, 13,300²": ("image", "a.png", lambda: images.png(13300, 13300, bits=1, color=0)),
    "PNG, 16 bits, 13,300²": ("image", "b.png", lambda: images.png(13300, 13300, bits=16, color=0)),
    "JPEG, progressive, 4:4:4, 13,300²": (
        "image",
        "a.jpg",
        lambda: large_image("JPEG", (13300, 13300), progressive=True, subsampling=0),
    ),
    "JPEG, progressive, 2,000 scans": ("image", "b.jpg", lambda: images.jpeg(4096, 4096, frame=0xC2, scans=2000)),
    "WebP, 10,900 × 16,383": ("image", "a.webp", lambda: large_image("WEBP", (10900, 16383), lossless=True)),
    "BMP in runs, 8,192²": (
        "image",
        "a.bmp",
        lambda: images.bmp(8192, 8192, compression=1, data=b"\0\2\xff\xff" * 8000),
    ),
    "exported graph that loops": ("predict", "graph", bytes),
}


def measure(source: Path, reader: str, path: Path, photo: Path, seconds: float) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source), "PHOTO": str(photo)}
    command = [sys.executable, "-c", READ_SCRIPT, reader, str(path), str(MEMORY_LIMIT)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {seconds:.0f} s"
    return done.stdout.strip() or f"ended by itself ({done.returncode})"


def main(*, before: Path | None = None, seconds: float = 90.0) -> None:
    """Print one row per input: its size, and the result of each checkout."""
    here = Path(__file__).parents[1] / "src"
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder) / "photo.png"
        Image.new("RGB", (8, 8)).save(photo)
        for name, (reader, file, make) in INPUTS.items():
            path = Path(folder) / file
            if reader == "predict":
                write_graph_folder(path, "loops")
            else:
                path.write_bytes(make())
            size = path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())
            sources = [here] if before is None else [before, here]
            rows.append([name, f"{size:,}", *(measure(each, reader, path, photo, seconds) for each in sources)])
    heading = ["input", "bytes", *([] if before is None else ["before"]), "now"]
    print("\n".join(format_table(heading, rows, "lr" + "l" * (len(heading) - 2))))


if __name__ == "__main__":
    run(main)
