"""Cache of a teacher's logits on disk, for training without augmentation: each image is predicted only once."""

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.base.array_file import ArrayFile
from vitrail.base.errors import CheckpointError, DataError, OutputError
from vitrail.base.files import make_folder, write_text
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import DatasetSplits, DatasetSubset, ImageDataset
from vitrail.data.images.loader import evaluation_batches
from vitrail.distributed import Ranks
from vitrail.tasks.classification import LossInputs
from vitrail.tasks.teacher import TeacherView

IMAGES_PER_BLOCK = 4096  # computed by one process
DESCRIPTION_FILE = "teacher.json"  # for humans: teacher and data of this folder
LOGITS_FILE = "logits.npy"
OLD_FILES = "[0-9][0-9][0-9][0-9][0-9].npy"  # of caches without row checksums
MAX_IMAGES_IN_KEY = 64  # evenly spaced images whose pixels are part of the key


@dataclass(frozen=True, eq=False)
class TeacherCache:
    """The teacher's logits for all training images, memory-mapped."""

    file: ArrayFile
    rows: NDArray[np.float32]  # (images, classes)
    device: torch.device

    def __call__(self, inputs: LossInputs) -> Tensor:
        indices = inputs.indices.cpu().numpy()
        rows = self.rows[indices]
        if not self.file.valid[indices].all() or not np.isfinite(rows).all():
            raise CheckpointError(
                f"{self.file.path} lacks logits of some images, which could not be read before; resume the run to "
                "compute them"
            )
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    @classmethod
    def build(
        cls,
        folder: Path,
        teacher_view: TeacherView,
        data: DatasetSplits,
        ranks: Ranks,
        progress: Callable[[int], object] | None = None,
    ) -> "TeacherCache | None":
        """Compute the logits that are not in the folder yet; None, with a warning, if they cannot be kept there.

        Each combination of teacher and images has a subfolder of its own.
        """
        train_images = data.train
        if train_images is None:
            raise DataError(f"{data.name} has no images to train on; expected some in train/")
        key = compute_cache_key(teacher_view, train_images)
        folder, file, failed = folder / key, None, torch.zeros(1)
        make_folder(folder)
        for turn in (0, 1):  # in the first each process computes its blocks; then what is missing on its machine
            try:
                if turn == 0 and ranks.is_first:
                    describe_folder(folder, teacher_view, data, len(train_images))
                file = ArrayFile(folder / LOGITS_FILE, len(train_images), key)
                if turn == 0 and ranks.is_first and file.damaged:
                    lost = f"{file.damaged} of {file.count} rows"
                    warnings.warn(
                        f"{file.path} is damaged ({lost}); the teacher predicts these images again", stacklevel=3
                    )
                blocks = range(0, file.count, IMAGES_PER_BLOCK)
                own = blocks[ranks.rank :: ranks.world_size] if turn == 0 else blocks
                fill_blocks(file, teacher_view, train_images, own, progress if turn == 0 else None)
            except OutputError as error:
                warnings.warn(f"the teacher's logits are not cached: {error}; it runs at every step", stacklevel=3)
                failed += 1
            if ranks.all_reduce_sum(failed).item() or file is None:
                return None
        return cls(file, file.open_rows(), teacher_view.device)


def describe_folder(folder: Path, teacher_view: TeacherView, data: DatasetSplits, count: int) -> None:
    about = {"teacher": teacher_view.teacher.name, "data": data.name, "pictures": count}
    write_text(folder / DESCRIPTION_FILE, json.dumps(about, indent=2))
    if any(folder.glob(OLD_FILES)) and not (folder / LOGITS_FILE).exists():
        warnings.warn(
            f"{folder} has logits of an earlier version ({OLD_FILES}), which are not used and can be deleted; the "
            "teacher predicts all images again",
            stacklevel=4,
        )


def fill_blocks(
    file: ArrayFile,
    teacher_view: TeacherView,
    images: ImageDataset,
    blocks: Iterable[int],
    progress: Callable[[int], object] | None,
) -> None:
    """Compute the missing logits of the blocks that start at these images. Another run may be computing them, too."""
    for start in blocks:
        rows = range(start, min(start + IMAGES_PER_BLOCK, file.count))
        computed = 0
        if not file.valid[rows.start : rows.stop].all():
            with file.lock(rows) as missing:
                compute_teacher_logits(file, teacher_view, images, missing, progress)
                computed = len(missing)
        if progress is not None:
            progress(len(rows) - computed)


def compute_teacher_logits(
    file: ArrayFile,
    teacher_view: TeacherView,
    dataset: ImageDataset,
    indices: NDArray[np.int64],
    progress: Callable[[int], object] | None,
) -> None:
    """Store the teacher's logits for these images; unreadable ones, which are never in a batch, have none."""
    for batch in evaluation_batches(DatasetSubset(dataset, indices), teacher_view.student_preprocessing, batch=64):
        if batch.size:
            images = normalize(batch["images"].to(teacher_view.device), teacher_view.student_preprocessing)
            file.write(indices[batch["indices"].numpy()], teacher_view(images).float().cpu().numpy())
        if progress is not None:
            progress(batch.size + len(batch.skipped))


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
