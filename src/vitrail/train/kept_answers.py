"""A teacher's answers on disk, for pictures that look the same each time: asked once, read ever after."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoint.atomic import make_folder, write_whole
from vitrail.data.datasets import Data, Pictures, Subset
from vitrail.data.loader import evaluation_batches
from vitrail.data.mixing import normalise
from vitrail.errors import CheckpointError, ConfigError, DataError, one_line
from vitrail.train.distributed import Team
from vitrail.train.losses import Inputs
from vitrail.train.teacher import Lessons

KEPT = 4096  # pictures a file
NOTE = "teacher.json"


@dataclass(frozen=True)
class KeptAnswers:
    """The teacher's logits to every training picture, on disk, a few thousand to a file; only what is asked is read."""

    files: tuple[NDArray[np.float32], ...]
    device: torch.device

    def __call__(self, inputs: Inputs) -> Tensor:
        rows = [self.files[index // KEPT][index % KEPT] for index in inputs.indices.tolist()]
        return torch.from_numpy(np.stack(rows)).to(self.device, non_blocking=True)

    @classmethod
    def made(
        cls,
        folder: Path,
        lessons: Lessons,
        data: Data,
        team: Team,
        progress: Callable[[int], object] | None = None,
    ) -> "KeptAnswers":
        """Reads the folder, and asks the teacher for what is not there yet; a file appears whole or not at all."""
        pictures = data.train
        if pictures is None:
            raise DataError(f"{data.name} has no pictures to train on; expected some in train/")
        make_folder(folder)
        check_note(folder, lessons, data, pictures, team)
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
        return cls(tuple(each for each in files if each is not None), lessons.device)


def check_note(folder: Path, lessons: Lessons, data: Data, pictures: Pictures, team: Team) -> None:
    """Answers of another teacher, or to other pictures, are refused."""
    about = {
        "teacher": lessons.teacher.fingerprint(),
        "name": lessons.teacher.name,
        "data": data.name,
        "pictures": len(pictures),
        "classes": list(data.classes),
        "seen": json.loads(json.dumps(asdict(lessons.seen))),
    }
    path = folder / NOTE
    if not path.exists():
        if team.first:
            write_whole(path, lambda place: place.write_text(json.dumps(about, indent=2), "utf-8"))
        return
    try:
        before: Any = json.loads(path.read_text("utf-8"))
        apart = [name for name in about if name != "name" and before[name] != about[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {one_line(error)}; expected kept answers, or an empty folder"
        ) from None
    if apart:
        raise ConfigError(
            f"{folder} keeps the answers of {before['name']} to {before['data']}, with another {apart[0]}; expected "
            "the same teacher, pictures and preprocessing, or another folder"
        )


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
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)


def read_file(path: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """None where it is not there, or not whole."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 else None
