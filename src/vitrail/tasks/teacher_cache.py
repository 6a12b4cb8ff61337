"""Cache of a teacher's logits on disk, for training without augmentation: each image is predicted only once."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.errors import CheckpointError, DataError, describe_error
from vitrail.base.files import CHUNK_BYTES, make_folder, open_regular_file_descriptor, write_atomically, write_text
from vitrail.base.locks import wait_for_entry_lock
from vitrail.base.npy_header import HEADER_BYTES, parse_npy_header
from vitrail.data.images.augment.augmentations import normalise
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.images.loader import evaluation_batches
from vitrail.distributed import Ranks
from vitrail.tasks.classification import LossInputs
from vitrail.tasks.teacher import TeacherView

IMAGES_PER_FILE = 4096
DESCRIPTION_FILE = "teacher.json"  # for humans: teacher and data of this folder
MAX_IMAGES_IN_KEY = 64  # evenly spaced images whose pixels are part of the key
CHECKSUM_PREFIX = b"\nsha256:"  # precedes the checksum at the end of a file


@dataclass(frozen=True)
class TeacherCache:
    """The teacher's logits for all training images, in files of IMAGES_PER_FILE rows; rows are read on demand."""

    folder: Path
    files: tuple["LogitsFile", ...]
    device: torch.device

    def __call__(self, inputs: LossInputs) -> Tensor:
        rows = np.stack(
            [
                self.files[index // IMAGES_PER_FILE].read_row(index % IMAGES_PER_FILE)
                for index in inputs.indices.tolist()
            ]
        )
        if not np.isfinite(rows).all():  # the image was unreadable when the cache was written
            raise CheckpointError(f"{self.folder} lacks logits of some images; delete the folder to compute them again")
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    @classmethod
    def build(
        cls,
        folder: Path,
        teacher_view: TeacherView,
        data: DatasetSplits,
        ranks: Ranks,
        progress: Callable[[int], object] | None = None,
    ) -> "TeacherCache":
        """Compute the logits that are not in the folder yet, and open all files. Files are written atomically.

        Each combination of teacher and images has a subfolder of its own.
        """
        train_images = data.train
        if train_images is None:
            raise DataError(f"{data.name} has no images to train on; expected some in train/")
        folder = folder / compute_cache_key(teacher_view, train_images)
        make_folder(folder)
        if ranks.is_first:
            about = {"teacher": teacher_view.teacher.name, "data": data.name, "pictures": len(train_images)}
            write_text(folder / DESCRIPTION_FILE, json.dumps(about, indent=2))
        count = -(-len(train_images) // IMAGES_PER_FILE)
        for number in range(ranks.rank, count, ranks.world_size):
            rows = range(number * IMAGES_PER_FILE, min((number + 1) * IMAGES_PER_FILE, len(train_images)))
            path = folder / f"{number:05}.npy"
            with wait_for_entry_lock(path):  # another run may be writing it; an intact file is never replaced
                if open_intact_logits_or_none(path, (len(rows), len(data.classes))) is None:
                    found = compute_teacher_logits(teacher_view, train_images, rows, progress)
                    write_atomically(path, lambda place, found=found: write_array_with_checksum(place, found))
                elif progress is not None:
                    progress(len(rows))
        ranks.all_reduce_sum(torch.zeros(1))  # wait until all processes have written
        last = len(train_images) - (count - 1) * IMAGES_PER_FILE
        files = [
            open_intact_logits_or_none(
                folder / f"{number:05}.npy", (last if number == count - 1 else IMAGES_PER_FILE, len(data.classes))
            )
            for number in range(count)
        ]
        if any(each is None for each in files):
            raise CheckpointError(f"{folder}: files were deleted while the cache was opened; start the run again")
        return cls(folder, tuple(each for each in files if each is not None), teacher_view.device)


@dataclass(frozen=True)
class LogitsFile:
    """A verified file of logits (rows, classes), read row by row, not memory-mapped, so that changes are detected."""

    path: Path
    shape: tuple[int, int]
    fingerprint: tuple[int, ...]  # of the file at the time of verification

    def read_row(self, row: int) -> NDArray[np.float32]:
        length = 4 * self.shape[1]
        try:
            descriptor = open_regular_file_descriptor(self.path)
            try:
                data = os.pread(descriptor, length, HEADER_BYTES + row * length)
                same = file_fingerprint(os.fstat(descriptor)) == self.fingerprint
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {describe_error(error)}; start the run again") from None
        if not same or len(data) < length:
            raise CheckpointError(f"{self.path} changed during the run; resume the run to verify it again")
        return np.frombuffer(data, "<f4").astype(np.float32)


def file_fingerprint(stat_result: os.stat_result) -> tuple[int, ...]:
    return stat_result.st_dev, stat_result.st_ino, stat_result.st_size, stat_result.st_mtime_ns, stat_result.st_ctime_ns


def check_recorded_cache(folder: str | None, run: Path) -> None:
    """Refuse a folder that only run.json names: it is written to if it is in the run, or has such logits already."""
    if folder is None:
        return
    try:
        inside = Path(folder).resolve().is_relative_to(run.resolve())
        known = inside or next(Path(folder).glob(f"*/{DESCRIPTION_FILE}"), None) is not None
    except (OSError, RuntimeError, ValueError):
        known = False
    if not known:
        raise CheckpointError(
            f"{run} names {folder!r} for a teacher's logits, which has none; expected a folder in the run, or one that "
            f"has */{DESCRIPTION_FILE}: restore it, or start a new run"
        )


def compute_cache_key(teacher_view: TeacherView, dataset: ImageDataset) -> str:
    """Digest of everything that the logits depend on: the teacher, the images in order, and their preprocessing."""
    found = hashlib.sha256(
        f"{teacher_view.teacher.fingerprint()} {teacher_view.columns} {teacher_view.student_preprocessing}".encode()
    )
    for index in range(len(dataset)):
        name = re.sub("^image (?=[0-9]+ of )", "picture ", dataset.name(index))  # as in the keys of old caches
        found.update(f"{name} {dataset.label(index)}\n".encode("utf-8", "surrogateescape"))
    # files may be replaced under the same names
    some = np.linspace(0, len(dataset) - 1, min(MAX_IMAGES_IN_KEY, len(dataset))).astype(np.int64)
    for batch in evaluation_batches(DatasetSubset(dataset, some), teacher_view.student_preprocessing):
        found.update(batch["images"].contiguous().numpy().data)
    return found.hexdigest()[:16]


def compute_teacher_logits(
    teacher_view: TeacherView, dataset: ImageDataset, rows: range, progress: Callable[[int], object] | None
) -> NDArray[np.float32]:
    """The teacher's logits for these images; NaN for unreadable ones, which are never in a batch."""
    found = np.full((len(rows), len(teacher_view.columns)), np.nan, np.float32)
    for batch in evaluation_batches(DatasetSubset(dataset, rows), teacher_view.student_preprocessing, batch=64):
        if batch.size:
            images = normalise(batch["images"].to(teacher_view.device), teacher_view.student_preprocessing)
            found[batch["indices"].numpy()] = teacher_view(images).float().cpu().numpy()
        if progress is not None:
            progress(batch.size + len(batch.skipped))
    return found


def write_array_with_checksum(path: Path, array: NDArray[np.float32]) -> None:
    """Write a .npy file with a checksum appended, which numpy ignores."""
    with path.open("w+b") as file:
        np.save(file, array, allow_pickle=False)
        size = file.tell()
        file.seek(0)
        checksum = compute_checksum_of_first_bytes(file, size)
        file.seek(size)
        file.write(CHECKSUM_PREFIX + checksum)


def open_intact_logits_or_none(path: Path, shape: tuple[int, int]) -> LogitsFile | None:
    """Open a file; None if it is missing, or, with a warning, if it is damaged."""
    try:
        return open_verified_logits_file(path, shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if not path.is_file():
            raise CheckpointError(f"{path} cannot be used: {describe_error(error)}") from None
        warnings.warn(
            f"{path} is damaged ({describe_error(error)}); the teacher predicts these images again", stacklevel=3
        )
        return None


def open_verified_logits_file(path: Path, shape: tuple[int, int]) -> LogitsFile:
    """Open a file and verify its checksum; files of earlier versions have none."""
    with os.fdopen(open_regular_file_descriptor(path), "rb") as file:
        state = file_fingerprint(os.fstat(file.fileno()))
        if parse_npy_header(file.read(HEADER_BYTES)) != shape:
            raise ValueError(f"it is not an array of shape {shape}")
        size = HEADER_BYTES + 4 * shape[0] * shape[1]
        file.seek(size)
        trailer = file.read(len(CHECKSUM_PREFIX) + 65)
        if os.fstat(file.fileno()).st_size < size:
            raise ValueError("it is truncated")
        file.seek(0)
        if trailer and trailer != CHECKSUM_PREFIX + compute_checksum_of_first_bytes(file, size):
            raise ValueError("checksum mismatch")
    return LogitsFile(path, shape, state)


def compute_checksum_of_first_bytes(file: BinaryIO, size: int) -> bytes:
    found = hashlib.sha256()
    while size and (part := file.read(min(size, CHUNK_BYTES))):
        found.update(part)
        size -= len(part)
    return found.hexdigest().encode()
