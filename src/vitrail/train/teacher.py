"""A teacher: a trained model that answers the very views that its student sees, made to look as it knows them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.datasets import Data, Subset
from vitrail.data.loader import evaluation_batches
from vitrail.data.mixing import normalise
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError, DataError, VitrailError, one_line
from vitrail.models.checks import pair
from vitrail.train.evaluate import class_mapping
from vitrail.train.opened import open_model

TRIED = 2  # pictures that a teacher must answer before it may teach


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Any module that gives logits; `preprocessing` is what it was trained with, `labels` the names of its classes.

    To teach, it is moved to the student's device, frozen, and left in eval mode.
    """

    model: nn.Module
    preprocessing: Preprocessing
    labels: Sequence[str] | None = None
    name: str = "the teacher"

    @classmethod
    def opened(cls, name: str) -> "Teacher":
        found = open_model(name)
        return cls(model=found.model, preprocessing=found.preprocessing, labels=found.labels, name=name)

    def fingerprint(self) -> str:
        """Of its weights and of how it looks at pictures."""
        found = hashlib.sha256(repr(self.preprocessing).encode())
        for name, tensor in self.model.state_dict().items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()


class Lessons:
    """The teacher's logits to a student's views, in the order of the student's classes; without gradients."""

    def __init__(
        self, teacher: Teacher, data: Data, seen: Preprocessing, device: torch.device, *, compiled: bool = False
    ) -> None:
        self.teacher, self.seen, self.device = teacher, seen, device
        model = teacher.model.to(device).eval().requires_grad_(False)
        self.notes = list[str]()
        given, taken = len(seen.mean), len(teacher.preprocessing.mean)
        if given != taken and given != 1:
            raise ConfigError(
                f"{teacher.name} sees {taken} channels and the student {given}; expected as many, or a grey student"
            )
        self.model: Callable[[Tensor], Tensor] = model
        classes = self.tried(data)
        try:
            self.columns, note = class_mapping(teacher.labels, classes, data.classes)
        except DataError as error:
            raise DataError(f"{teacher.name} cannot teach {data.name}: {error}") from None
        self.notes += [f"{teacher.name}: {note}"] if note else []
        in_order = self.columns == tuple(range(classes))
        self.order = None if in_order else torch.tensor(self.columns, device=device)
        if compiled:
            self.model = torch.compile(model)

    def tried(self, data: Data) -> int:
        """How many classes it tells apart; that it answers at all, and in numbers, is seen before any step."""
        pictures = data.train if data.train is not None and len(data.train) else data.val
        if pictures is None or not len(pictures):
            raise DataError(f"{data.name} has no pictures; expected some to learn from")
        some = Subset(pictures, range(min(TRIED, len(pictures))))
        name = self.teacher.name
        for batch in evaluation_batches(some, self.seen, batch=TRIED):
            if not len(batch.labels):
                continue
            try:
                logits: Any = self.model(self.shown(normalise(batch.images.to(self.device), self.seen)))
            except (RuntimeError, TypeError, ValueError, VitrailError) as error:
                rows, columns = pair(self.teacher.preprocessing.image_size)
                raise ConfigError(
                    f"{name} cannot answer: {one_line(error)}; expected a model that takes (pictures, "
                    f"{len(self.teacher.preprocessing.mean)}, {rows}, {columns}), as its preprocessing says"
                ) from None
            if not (isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(batch.labels)):
                kind = (
                    f"a tensor of {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                )
                raise ConfigError(f"{name} answers {kind}; expected a tensor of logits, (pictures, classes)")
            if not logits.isfinite().all():
                raise ConfigError(f"{name} answers NaN or infinity; expected numbers: are its weights whole?")
            return logits.shape[1]
        return len(data.classes)  # none could be read: the training says so

    def __call__(self, images: Tensor) -> Tensor:
        """The student's input, augmented, normalised and mixed, → the teacher's logits (B, classes)."""
        with torch.no_grad():
            logits = self.model(self.shown(images))
        return logits if self.order is None else logits[:, self.order]

    def shown(self, images: Tensor) -> Tensor:
        """Normalised and resized as the teacher was trained: what it sees is the student's view, not another."""
        seen, known = self.seen, self.teacher.preprocessing
        if len(seen.mean) != len(known.mean):
            seen = replace(seen, mean=seen.mean * len(known.mean), std=seen.std * len(known.std))
            images = images.expand(-1, len(known.mean), -1, -1)
        if (seen.mean, seen.std) != (known.mean, known.std):
            mean, std, its_mean, its_std = (
                images.new_tensor(each).reshape(-1, 1, 1) for each in (seen.mean, seen.std, known.mean, known.std)
            )
            images = torch.addcmul((mean - its_mean) / its_std, images, std / its_std)
        size = pair(known.image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode=known.interpolation, antialias=True)
        return images
