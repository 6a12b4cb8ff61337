"""A teacher's answers on disk, for pictures that look the same each time: asked once, read ever after."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.datasets import Data, Pictures, Subset
from vitrail.data.loader import evaluation_batches
from vitrail.data.mixing import normalise
from vitrail.errors import CheckpointError, DataError, one_line
from vitrail.files import CHUNK, make_folder, open_regular, write_text, write_whole
from vitrail.train.distributed import Team
from vitrail.train.losses import Inputs
from vitrail.train.teacher import Lessons

KEPT = 4096  # pictures a file
NOTE = "teacher.json"  # for people: whose answers these are
LOOKED_AT = 64  # pictures, spread over all, that are part of the key
TRAILER = b"\nsha256:"  # precedes the checksum at the end of a file


@dataclass(frozen=True)
class KeptAnswers:
    """The teacher's logits to every training picture, on disk, a few thousand to a file; only what is asked is read."""

    folder: Path
    files: tuple["AnswerFile", ...]
    device: torch.device

    def __call__(self, inputs: Inputs) -> Tensor:
        rows = np.stack([self.files[index // KEPT].read_row(index % KEPT) for index in inputs.indices.tolist()])
        if not np.isfinite(rows).all():  # could not be read then, and can be now
            raise CheckpointError(f"{self.folder} lacks answers to some pictures; expected all: remove it")
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    @classmethod
    def made(
        cls,
        folder: Path,
        lessons: Lessons,
        data: Data,
        team: Team,
        progress: Callable[[int], object] | None = None,
    ) -> "KeptAnswers":
        """Reads what is in the folder, and asks the teacher for the rest; a file appears whole or not at all.

        Answers of other teachers, or to other pictures, lie in folders of their own beside these.
        """
        pictures = data.train
        if pictures is None:
            raise DataError(f"{data.name} has no pictures to train on; expected some in train/")
        folder = folder / key(lessons, pictures)
        make_folder(folder)
        if team.first:
            about = {"teacher": lessons.teacher.name, "data": data.name, "pictures": len(pictures)}
            write_text(folder / NOTE, json.dumps(about, indent=2))
        count = -(-len(pictures) // KEPT)
        for number in range(team.rank, count, team.world):
            rows = range(number * KEPT, min((number + 1) * KEPT, len(pictures)))
            path = folder / f"{number:05}.npy"
            if read_file(path, (len(rows), len(data.classes))) is None:
                found = answered(lessons, pictures, rows, progress)
                write_whole(path, lambda place, found=found: save_array(place, found))
            elif progress is not None:
                progress(len(rows))
        team.total(torch.zeros(1))  # all have written
        last = len(pictures) - (count - 1) * KEPT
        files = [
            read_file(folder / f"{number:05}.npy", (last if number == count - 1 else KEPT, len(data.classes)))
            for number in range(count)
        ]
        if any(each is None for each in files):
            raise CheckpointError(f"{folder} lost files of kept answers while they were read; expected them to stay")
        return cls(folder, tuple(each for each in files if each is not None), lessons.device)


@dataclass(frozen=True)
class AnswerFile:
    """A verified file of logits, (rows, classes), read row by row and never mapped: one that changes is an error."""

    path: Path
    start: int  # of the values, in bytes
    shape: tuple[int, int]
    state: tuple[int, ...]  # of the file when it was verified

    def read_row(self, row: int) -> NDArray[np.float32]:
        length = 4 * self.shape[1]
        try:
            descriptor = open_regular(self.path)
            try:
                data = os.pread(descriptor, length, self.start + row * length)
                same = file_state(os.fstat(descriptor)) == self.state
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {one_line(error)}; start the run again") from None
        if not same or len(data) < length:
            raise CheckpointError(f"{self.path} changed during the run; resume the run to verify it again")
        return np.frombuffer(data, "<f4").astype(np.float32)


def file_state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def key(lessons: Lessons, pictures: Pictures) -> str:
    """Of all that the answers depend on: the teacher, the pictures in their order, and how they are shown."""
    found = hashlib.sha256(f"{lessons.teacher.fingerprint()} {lessons.columns} {lessons.seen}".encode())
    for index in range(len(pictures)):
        found.update(f"{pictures.name(index)} {pictures.label(index)}\n".encode("utf-8", "surrogateescape"))
    some = np.linspace(0, len(pictures) - 1, min(LOOKED_AT, len(pictures))).astype(np.int64)  # names may stay the same
    for batch in evaluation_batches(Subset(pictures, some), lessons.seen):
        found.update(batch.images.contiguous().numpy().data)
    return found.hexdigest()[:16]


def answered(
    lessons: Lessons, pictures: Pictures, rows: range, progress: Callable[[int], object] | None
) -> NDArray[np.float32]:
    """The teacher's logits to these pictures; NaN where one cannot be read, which no batch will hold."""
    found = np.full((len(rows), len(lessons.columns)), np.nan, np.float32)
    for batch in evaluation_batches(Subset(pictures, rows), lessons.seen, batch=64):
        if len(batch.labels):
            images = normalise(batch.images.to(lessons.device), lessons.seen)
            found[batch.indices.numpy()] = lessons(images).float().cpu().numpy()
        if progress is not None:
            progress(len(batch.labels) + len(batch.skipped))
    return found


def save_array(path: Path, array: NDArray[np.float32]) -> None:
    """As a .npy file, followed by a checksum of it, which numpy ignores."""
    with path.open("w+b") as file:
        np.save(file, array, allow_pickle=False)
        size = file.tell()
        file.seek(0)
        checksum = checksum_of(file, size)
        file.seek(size)
        file.write(TRAILER + checksum)


def read_file(path: Path, shape: tuple[int, int]) -> AnswerFile | None:
    """The file; None if the file is missing, or damaged: then with a warning."""
    try:
        return read_verified(path, shape)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if not path.is_file():
            raise CheckpointError(f"{path} cannot be used: {one_line(error)}") from None
        warnings.warn(f"{path} is damaged ({one_line(error)}); the teacher predicts these images again", stacklevel=3)
        return None


def read_verified(path: Path, shape: tuple[int, int]) -> AnswerFile:
    """A file that passes its checksum; files of earlier versions have none."""
    with os.fdopen(open_regular(path), "rb") as file:
        header, state = header_of(shape), file_state(os.fstat(file.fileno()))
        if file.read(len(header)) != header:
            raise ValueError(f"it is not an array of shape {shape}")
        start = len(header)
        size = start + 4 * shape[0] * shape[1]
        file.seek(size)
        trailer = file.read(len(TRAILER) + 65)
        if os.fstat(file.fileno()).st_size < size:
            raise ValueError("it is truncated")
        file.seek(0)
        if trailer and trailer != TRAILER + checksum_of(file, size):
            raise ValueError("checksum mismatch")
    return AnswerFile(path, start, shape, state)


def header_of(shape: tuple[int, int]) -> bytes:
    """The header of such a .npy file: compared instead of parsed, since the file is untrusted."""
    written = BytesIO()
    about = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(written, about)
    return written.getvalue()


def checksum_of(file: BinaryIO, size: int) -> bytes:
    found = hashlib.sha256()
    while size and (part := file.read(min(size, CHUNK))):
        found.update(part)
        size -= len(part)
    return found.hexdigest().encode()
