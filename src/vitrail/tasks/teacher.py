"""Teachers for distillation: they receive the student's augmented views, in their own normalization and size."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, DataError, describe_error
from vitrail.base.text import AMERICAN_NAMES
from vitrail.checkpoint.checksums import checksum_own_code
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.loader import evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import takes_other_sizes
from vitrail.models.catalog.external_families import TIMM_PREFIX
from vitrail.opening import open_model
from vitrail.tasks.feature_distillation import compute_all_tokens

TRIAL_BATCH_SIZE = 2  # images for a first check of the teacher's outputs


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Any module that returns logits, with the preprocessing that it was trained with and the names of its classes.

    For training, it is moved to the student's device and put into eval mode.

    >>> teacher = vitrail.Teacher.from_name("vit_fashion")
    >>> student = vitrail.create("ViT-Ti/16", image_size=28, patch_size=7, channels=1, classes=10, depth=1)
    >>> vitrail.fit(student, "fashion", teacher=teacher, steps=1).steps
    1
    """

    model: nn.Module
    preprocessing: Preprocessing
    labels: Sequence[str] | None = None
    name: str = "the teacher"

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("preprocessing", Preprocessing)):
            if not isinstance(vars(self)[name], kind):
                given = type(vars(self)[name]).__name__
                raise ConfigError(f"the teacher's {name} is a {given}; expected a {kind.__name__}")

    @classmethod
    def from_name(cls, name: str, **fields: Any) -> "Teacher":
        """Open a trained model by name; `fields` are config fields that its checkpoint does not specify."""
        found = open_model(name, kind="image", fields=fields)
        return cls(model=found.module, preprocessing=found.preprocessing, labels=found.labels, name=name)

    def at_size(self, size: tuple[int, int]) -> "Teacher":
        """The teacher for images of this size; only models that take any size have others."""
        known = pair(self.preprocessing.image_size)
        if known == size:
            return self
        if not takes_other_sizes(self.model):
            (rows, columns), (its_rows, its_columns) = size, known
            raise ConfigError(
                f"{self.name} takes images of {its_rows}×{its_columns}; expected a teacher for the student's "
                f"{rows}×{columns}, opened with `image_size`, or `teacher_size` trained"
            )
        return replace(self, preprocessing=replace(self.preprocessing, image_size=size))

    def fingerprint(self) -> str:
        """Digest of the weights and everything else that the logits depend on."""
        config = getattr(self.model, "config", None)  # a module of another library may have none
        about = repr((type(self.model).__name__, config, self.preprocessing, self.labels))
        for old, new in AMERICAN_NAMES.items():  # in the fingerprints of earlier runs
            about = about.replace(f"{new}=", f"{old}=").replace(f"={new!r}", f"={old!r}")
        code = [] if self.name.startswith(TIMM_PREFIX) else checksum_own_code(self.model)  # timm's follows its version
        found = hashlib.sha256("".join([about, *code]).encode())
        for name, tensor in self.model.state_dict().items():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()


class TeacherView:
    """The teacher's logits for the student's views, in the order of the student's classes, without gradients."""

    def __init__(
        self,
        teacher: Teacher,
        data: DatasetSplits,
        student_preprocessing: Preprocessing,
        device: torch.device,
        *,
        compiled: bool = False,
        every_token: bool = False,
    ) -> None:
        self.teacher, self.student_preprocessing, self.device = teacher, student_preprocessing, device
        model = teacher.model.to(device).eval()
        self.dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
        self.notes = list[str]()
        given, taken = len(student_preprocessing.mean), len(teacher.preprocessing.mean)
        if given != taken and given != 1:
            raise ConfigError(
                f"{teacher.name} takes {taken} channels and the student {given}; expected the same, or a gray student"
            )
        self.model: Callable[[Tensor], Tensor] = partial(compute_all_tokens, model) if every_token else model
        classes = self.check_outputs_and_count_classes(data)
        try:
            self.columns, note = match_data_classes_to_model(teacher.labels, classes, data.classes)
        except DataError as error:
            raise DataError(f"{teacher.name} cannot teach {data.name}: {error}") from None
        self.notes += [f"{teacher.name}: {note}"] if note else []
        in_order = self.columns == tuple(range(classes))
        self.class_order = None if in_order else torch.tensor(self.columns, device=device)
        if compiled:
            self.model = torch.compile(model)

    def check_outputs_and_count_classes(self, data: DatasetSplits) -> int:
        """Check that the teacher returns finite logits for some images, and return its number of classes."""
        train_images = data.train if data.train is not None and len(data.train) else data.val
        if train_images is None or not len(train_images):
            raise DataError(f"{data.name} has no images; expected at least one")
        name = self.teacher.name
        for batch in evaluation_batches(train_images, self.student_preprocessing, batch=TRIAL_BATCH_SIZE):
            if not batch.size:
                continue  # none of these could be read; try the next ones
            try:
                logits: Any = self.compute_logits(
                    normalize(batch["images"].to(self.device), self.student_preprocessing)
                )
            except Exception as error:  # the user's module may raise anything
                rows, columns = pair(self.teacher.preprocessing.image_size)
                raise ConfigError(
                    f"{name} failed: {describe_error(error)}; expected a model that takes images of shape (batch, "
                    f"{len(self.teacher.preprocessing.mean)}, {rows}, {columns}), as in its preprocessing"
                ) from None
            if not (isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == batch.size):
                kind = (
                    f"a tensor of {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                )
                raise ConfigError(f"{name} returned {kind}; expected logits of shape (batch, classes)")
            if not logits.isfinite().all():
                raise ConfigError(f"{name} returned NaN or infinity; expected finite logits: check its weights")
            return logits.shape[1]
        raise DataError(f"no image of {data.name} can be read; expected at least one")

    def __call__(self, images: Tensor) -> Tensor:
        """The teacher's logits (B, classes) for the student's input, which is augmented, normalized and mixed."""
        logits = self.compute_logits(images).float()
        return logits if self.class_order is None else logits[:, self.class_order]

    def compute_logits(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(self.adapt_images(images).to(self.dtype))

    def adapt_images(self, images: Tensor) -> Tensor:
        """The student's views with the teacher's normalization, image size and channels."""
        seen, known = self.student_preprocessing, self.teacher.preprocessing
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
