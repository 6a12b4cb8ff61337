"""A teacher's answers on disk, for pictures that look the same each time: asked once, read ever after."""

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

from vitrail.data.augment.batch_transforms import normalise
from vitrail.data.datasets import DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.loader import evaluation_batches
from vitrail.errors import CheckpointError, DataError, describe_error
from vitrail.files import CHUNK_BYTES, make_folder, open_regular_file, write_atomically, write_text
from vitrail.npy_header import HEADER_BYTES, parse_npy_header
from vitrail.train.distributed import Ranks
from vitrail.train.losses import LossInputs
from vitrail.train.teacher import TeacherView

IMAGES_PER_FILE = 4096  # pictures a file
DESCRIPTION_FILE = "teacher.json"  # for people: whose answers these are
MAX_IMAGES_IN_KEY = 64  # pictures, spread over all, that are part of the key
CHECKSUM_PREFIX = b"\nsha256:"  # precedes the checksum at the end of a file


@dataclass(frozen=True)
class TeacherCache:
    """The teacher's logits to every training picture, on disk, a few thousand to a file; only what is asked is read."""

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
        if not np.isfinite(rows).all():  # could not be read then, and can be now
            raise CheckpointError(f"{self.folder} lacks answers to some pictures; expected all: remove it")
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
        """Reads what is in the folder, and asks the teacher for the rest; a file appears whole or not at all.

        Answers of other teachers, or to other pictures, lie in folders of their own beside these.
        """
        pictures = data.train
        if pictures is None:
            raise DataError(f"{data.name} has no pictures to train on; expected some in train/")
        folder = folder / compute_cache_key(teacher_view, pictures)
        make_folder(folder)
        if ranks.is_first:
            about = {"teacher": teacher_view.teacher.name, "data": data.name, "pictures": len(pictures)}
            write_text(folder / DESCRIPTION_FILE, json.dumps(about, indent=2))
        count = -(-len(pictures) // IMAGES_PER_FILE)
        for number in range(ranks.rank, count, ranks.world_size):
            rows = range(number * IMAGES_PER_FILE, min((number + 1) * IMAGES_PER_FILE, len(pictures)))
            path = folder / f"{number:05}.npy"
            if open_logits_file(path, (len(rows), len(data.classes))) is None:
                found = compute_teacher_logits(teacher_view, pictures, rows, progress)
                write_atomically(path, lambda place, found=found: write_array_with_checksum(place, found))
            elif progress is not None:
                progress(len(rows))
        ranks.all_reduce_sum(torch.zeros(1))  # all have written
        last = len(pictures) - (count - 1) * IMAGES_PER_FILE
        files = [
            open_logits_file(
                folder / f"{number:05}.npy", (last if number == count - 1 else IMAGES_PER_FILE, len(data.classes))
            )
            for number in range(count)
        ]
        if any(each is None for each in files):
            raise CheckpointError(f"{folder} lost files of kept answers while they were read; expected them to stay")
        return cls(folder, tuple(each for each in files if each is not None), teacher_view.device)


@dataclass(frozen=True)
class LogitsFile:
    """A verified file of logits, (rows, classes), read row by row and never mapped: one that changes is an error."""

    path: Path
    shape: tuple[int, int]
    fingerprint: tuple[int, ...]  # of the file when it was verified

    def read_row(self, row: int) -> NDArray[np.float32]:
        length = 4 * self.shape[1]
        try:
            descriptor = open_regular_file(self.path)
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


def compute_cache_key(teacher_view: TeacherView, dataset: ImageDataset) -> str:
    """Of all that the answers depend on: the teacher, the pictures in their order, and how they are shown."""
    found = hashlib.sha256(
        f"{teacher_view.teacher.fingerprint()} {teacher_view.columns} {teacher_view.student_preprocessing}".encode()
    )
    for index in range(len(dataset)):
        name = re.sub("^image (?=[0-9]+ of )", "picture ", dataset.name(index))  # the word in keys of existing caches
        found.update(f"{name} {dataset.label(index)}\n".encode("utf-8", "surrogateescape"))
    some = np.linspace(0, len(dataset) - 1, min(MAX_IMAGES_IN_KEY, len(dataset))).astype(
        np.int64
    )  # names may stay the same
    for batch in evaluation_batches(DatasetSubset(dataset, some), teacher_view.student_preprocessing):
        found.update(batch.images.contiguous().numpy().data)
    return found.hexdigest()[:16]


def compute_teacher_logits(
    teacher_view: TeacherView, dataset: ImageDataset, rows: range, progress: Callable[[int], object] | None
) -> NDArray[np.float32]:
    """The teacher's logits to these pictures; NaN where one cannot be read, which no batch will hold."""
    found = np.full((len(rows), len(teacher_view.columns)), np.nan, np.float32)
    for batch in evaluation_batches(DatasetSubset(dataset, rows), teacher_view.student_preprocessing, batch=64):
        if len(batch.labels):
            images = normalise(batch.images.to(teacher_view.device), teacher_view.student_preprocessing)
            found[batch.indices.numpy()] = teacher_view(images).float().cpu().numpy()
        if progress is not None:
            progress(len(batch.labels) + len(batch.skipped))
    return found


def write_array_with_checksum(path: Path, array: NDArray[np.float32]) -> None:
    """As a .npy file, followed by a checksum of it, which numpy ignores."""
    with path.open("w+b") as file:
        np.save(file, array, allow_pickle=False)
        size = file.tell()
        file.seek(0)
        checksum = compute_file_checksum(file, size)
        file.seek(size)
        file.write(CHECKSUM_PREFIX + checksum)


def open_logits_file(path: Path, shape: tuple[int, int]) -> LogitsFile | None:
    """The file; None if the file is missing, or damaged: then with a warning."""
    try:
        return verify_logits_file(path, shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if not path.is_file():
            raise CheckpointError(f"{path} cannot be used: {describe_error(error)}") from None
        warnings.warn(
            f"{path} is damaged ({describe_error(error)}); the teacher predicts these images again", stacklevel=3
        )
        return None


def verify_logits_file(path: Path, shape: tuple[int, int]) -> LogitsFile:
    """A file that passes its checksum; files of earlier versions have none."""
    with os.fdopen(open_regular_file(path), "rb") as file:
        state = file_fingerprint(os.fstat(file.fileno()))
        if parse_npy_header(file.read(HEADER_BYTES)) != shape:
            raise ValueError(f"it is not an array of shape {shape}")
        size = HEADER_BYTES + 4 * shape[0] * shape[1]
        file.seek(size)
        trailer = file.read(len(CHECKSUM_PREFIX) + 65)
        if os.fstat(file.fileno()).st_size < size:
            raise ValueError("it is truncated")
        file.seek(0)
        if trailer and trailer != CHECKSUM_PREFIX + compute_file_checksum(file, size):
            raise ValueError("checksum mismatch")
    return LogitsFile(path, shape, state)


def compute_file_checksum(file: BinaryIO, size: int) -> bytes:
    found = hashlib.sha256()
    while size and (part := file.read(min(size, CHUNK_BYTES))):
        found.update(part)
        size -= len(part)
    return found.hexdigest().encode()
