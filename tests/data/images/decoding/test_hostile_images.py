"""Generated and damaged image files: each is an image or a DataError, and one process reads all with little memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support import hostile_images

TESTS = Path(__file__).parents[3]
ROUNDS = 30  # mutations for one round of all generators
PEAK = 1200  # MB above that of an idle process
SCRIPT = """
import json, resource, sys, time, warnings
from random import Random

from support import hostile_images
from vitrail.data.images.decoding.crops import CropBox, decode_crop
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.base.errors import DataError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

READ = {
    "open_image": open_image,
    "full size": lambda data: decode_for_model(data, Preprocessing(image_size=32)),
    "reduced": lambda data: decode_for_model(data, Preprocessing(image_size=32, fit="squash"), reduce_jpeg=True),
    "crop": lambda data: decode_crop(data, lambda rows, columns: CropBox(0, 0, rows, columns), (8, 8)),
}
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
idle, longest, read, failures = peak(), 0.0, 0, []
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    for make in hostile_images.GENERATORS:
        data = make(Random(seed))
        for name, function in READ.items():
            start = time.process_time()
            try:
                function(data)
                read += 1
            except DataError as error:
                if "\\n" in str(error) or "expected" not in str(error):
                    failures.append((make.__name__, seed, name, str(error)))
            except BaseException as error:
                failures.append((make.__name__, seed, name, repr(error)))
            longest = max(longest, time.process_time() - start)
print(json.dumps({"read": read, "failures": failures, "longest": longest, "peak": peak() - idle}))
"""


def test_any_bytes_are_an_image_or_a_data_error(mutations: int) -> None:
    """In a subprocess, since a decoder may crash, hang or take all memory."""
    rounds = max(5, mutations // ROUNDS)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "0", str(rounds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["peak"] < PEAK
    assert result["longest"] < 60
    assert result["read"] > rounds // 2  # enough of them are decoded


LARGEST = """
import json, resource, sys, warnings
from vitrail.data.images.decoding.model_input import decode_for_model
from vitrail.data.images.preprocessing import Preprocessing

warnings.simplefilter("ignore")
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
shape = decode_for_model(sys.argv[1], Preprocessing()).shape
print(json.dumps([shape, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 1024]))
"""
SIDE = 8192  # SIDE² pixels are the limit
FILES: dict[str, Callable[[], bytes]] = {
    "16-bit PNG": lambda: hostile_images.png(SIDE, SIDE, bits=16, color=0),
    "PNG with alpha": lambda: hostile_images.png(SIDE, SIDE, color=6),
    "progressive JPEG": lambda: hostile_images.jpeg(SIDE, SIDE, frame=0xC2, scans=60, factors=(0x11,) * 3),
    "16-bit TIFF with alpha": lambda: hostile_images.blank_tiff(SIDE, SIDE, bits=(16,) * 4),
    "WebP": lambda: hostile_images.encode_image(Image.new("RGBA", (7094, 7094)), "WEBP", lossless=True, method=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_largest_image_of_each_format_takes_at_most_a_gigabyte(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "largest"
    path.write_bytes(FILES[kind]())
    assert path.stat().st_size < 10**6
    command = [sys.executable, "-c", LARGEST, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    shape, peak = json.loads(done.stdout)
    assert shape == [224, 224, 3]
    assert peak < 1000
