"""Distillation of features and relations: a student learns what is inside a teacher, not only what it predicts.

Hints (FitNets, arXiv 1412.6550) compare the outputs of two blocks; relations (RKD, arXiv 1904.05068) compare the
distances and angles between the examples of a batch. B batch, D width, n places of a grid.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError
from vitrail.distributed import Ranks
from vitrail.layers.positions import Grid
from vitrail.models.base.contract import ImageModel, Level, find_image_model
from vitrail.recipes.recipe import DistillationSettings

HEAD = "head"  # the key of what the first head reads, among the recorded outputs
Recorded = tuple[dict[str, Any], dict[str, Any]]  # outputs by name, of student and teacher


def hint_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """½‖teacher − student‖², summed over the width and averaged over all others: (B, …, D) each."""
    return 0.5 * (teacher - student).square().sum(-1).mean()


def distance_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Smooth L1 between all pairwise distances (B, B), each network's divided by their mean: (B, D) each."""
    return F.smooth_l1_loss(measure_relative_distances(student), measure_relative_distances(teacher))


def angle_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Smooth L1 between the cosines (B, B, B) of the angles that all triplets of examples form: (B, D) each."""
    return F.smooth_l1_loss(measure_angles(student), measure_angles(teacher))


def measure_relative_distances(x: Tensor) -> Tensor:
    squares = x.square().sum(1)
    distances = (squares[:, None] + squares[None] - 2 * x @ x.T).clamp(min=1e-12).sqrt()
    distances = distances * (1 - torch.eye(len(x), device=x.device, dtype=x.dtype))
    return distances / (distances.sum() / (distances > 0).sum().clamp(min=1))  # the mean of the positive ones


def measure_angles(x: Tensor) -> Tensor:
    """cos ∠ of the examples j, i, k at i."""
    directions = F.normalize(x[None] - x[:, None], dim=2)  # from i to j
    return directions @ directions.mT


@dataclass(frozen=True)
class Hint:
    """A block of the student that learns the output of a block of the teacher."""

    student: "HintBlock"
    teacher: "HintBlock"


@dataclass(frozen=True)
class HintBlock:
    """A block of a model, and what its output looks like."""

    module: str  # its name
    level: Level
    prefix: int  # tokens before the patches

    def read(self, output: Any, tokens: str) -> Tensor:
        """The class token (B, D), or all patches as a map (B, D, h, w)."""
        if not isinstance(output, Tensor):
            raise ConfigError(f"{self.module} returns a {type(output).__name__}; expected a block that returns tokens")
        if tokens == "class":
            return output[:, 0]
        if output.ndim == 3:  # (B, N, D)
            patches, (rows, columns) = output[:, self.prefix :], self.level.grid
            rows = round((patches.shape[1] * rows / columns) ** 0.5)  # images may have another size than the config
            return patches.mT.unflatten(2, (rows, patches.shape[1] // rows))
        channels_first = output.shape[1] == self.level.width and output.shape[-1] != self.level.width
        return output if channels_first or output.shape[2:] == self.level.grid else output.movedim(-1, 1)


class FeatureDistillation(nn.Module):
    """The weighted losses of hints and relations; `projectors` map the student's features to the teacher's width."""

    def __init__(
        self, student: Any, teacher: nn.Module, name: str, settings: DistillationSettings, ranks: Ranks
    ) -> None:
        super().__init__()
        self.settings, self.ranks = settings, ranks
        self.teacher = (teacher,)  # not a submodule: it is neither trained nor saved
        self.hints = find_hints(student, teacher, name, settings) if settings.hint_weight else []
        self.projectors = nn.ModuleList(
            nn.Linear(hint.student.level.width, hint.teacher.level.width) for hint in self.hints
        )

    @property
    def reads_patches(self) -> bool:
        """Whether it needs tokens that the heads may not read."""
        return bool(self.hints) and self.settings.hint_tokens == "patches"

    @property
    def relates_examples(self) -> bool:
        return bool(self.settings.distance_weight or self.settings.angle_weight)

    @contextmanager
    def record(self, student: nn.Module) -> Generator[Recorded]:
        """What both models compute within this context: the outputs of the hints' blocks, and the heads' input."""
        with (
            record_outputs(student, [hint.student.module for hint in self.hints]) as ours,
            record_outputs(self.teacher[0], [hint.teacher.module for hint in self.hints]) as theirs,
        ):
            yield ours, theirs

    def forward(self, recorded: Recorded, teacher_logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum, and each loss by its name."""
        (student, teacher), settings, losses = recorded, self.settings, dict[str, Tensor]()
        total = teacher_logits.new_zeros((), dtype=torch.float32)
        if self.hints:
            pairs = zip(self.projectors, self.hints, strict=True)
            each = [self.compare(projector, hint, student, teacher) for projector, hint in pairs]
            losses["hint_loss"] = torch.stack(each).mean()
            total = total + settings.hint_weight * losses["hint_loss"]
        if self.relates_examples:
            read = student[HEAD], teacher.get(HEAD, teacher_logits)  # a module of another library has its logits
            ours, theirs = (self.ranks.gather_with_gradient(features.float()) for features in read)
            if settings.distance_weight:
                losses["distance_loss"] = distance_loss(ours, theirs)
                total = total + settings.distance_weight * losses["distance_loss"]
            if settings.angle_weight:
                losses["angle_loss"] = angle_loss(ours, theirs)
                total = total + settings.angle_weight * losses["angle_loss"]
        return total, {name: loss.detach() for name, loss in losses.items()}

    def compare(
        self, projector: nn.Module, hint: Hint, student: Mapping[str, Any], teacher: Mapping[str, Any]
    ) -> Tensor:
        tokens = self.settings.hint_tokens
        ours = hint.student.read(student[hint.student.module], tokens)
        theirs = hint.teacher.read(teacher[hint.teacher.module], tokens)
        if tokens == "patches":
            grid = min(get_grid(ours), get_grid(theirs))
            ours, theirs = (F.adaptive_avg_pool2d(each, grid).movedim(1, -1) for each in (ours, theirs))
        return hint_loss(projector(ours).float(), theirs.float())


def get_grid(features: Tensor) -> Grid:
    return features.shape[2], features.shape[3]


@contextmanager
def record_outputs(model: nn.Module, blocks: Sequence[str]) -> Generator[dict[str, Any]]:
    """The outputs of blocks by their names, and what the first head reads, if the model declares one."""
    found, handles = dict[str, Any](), list[Any]()

    def keep_output(name: str, _module: nn.Module, _given: object, output: Any) -> None:
        found[name] = output

    def keep_features(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        found[HEAD] = given[0].flatten(1)

    for name in dict.fromkeys(blocks):
        handles.append(model.get_submodule(name).register_forward_hook(partial(keep_output, name)))
    declared = find_image_model(model)
    if declared is not None and declared.classifiers:
        head = declared.get_submodule(declared.classifiers[0][1])
        handles.append(head.register_forward_pre_hook(keep_features))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def compute_all_tokens(model: Any, images: Tensor) -> Tensor:
    """The logits, by a pass that computes every token of the last block, also those that no head reads."""
    if not isinstance(model, ImageModel) or model.no_tokens_reason:
        return model(images)
    return model.logits(model.encode(images))


def find_hints(student: Any, teacher: nn.Module, name: str, settings: DistillationSettings) -> list[Hint]:
    """The pairs of blocks that `hints` names, such as 4:8,last:last."""
    found = list[Hint]()
    for pair in settings.hints.split(","):
        ours, colon, theirs = pair.partition(":")
        if not colon:
            raise ConfigError(f"`hints` has {pair!r}; expected STUDENT:TEACHER, two blocks such as 4:8 or last:last")
        hint = Hint(find_block(student, "the student", ours, settings), find_block(teacher, name, theirs, settings))
        grids = sorted((hint.student.level.grid, hint.teacher.level.grid))
        if settings.hint_tokens == "patches" and any(b % a for a, b in zip(*grids, strict=True)):
            (rows, columns), (its_rows, its_columns) = hint.student.level.grid, hint.teacher.level.grid
            raise ConfigError(
                f"`hints` {pair} compares {rows}×{columns} places of the student with {its_rows}×{its_columns} of "
                f"{name}; expected grids of which one divides the other: use other blocks, or `hint_tokens` class"
            )
        found.append(hint)
    return found


def find_block(model: nn.Module, whose: str, number: str, settings: DistillationSettings) -> HintBlock:
    declared = find_image_model(model)
    if declared is None or not declared.sequence:
        raise ConfigError(
            f"{whose} is a {type(model).__name__}, which declares no blocks; expected a model of vitrail, or "
            "`hint_weight` 0 and `distance_weight` or `angle_weight`, which need none"
        )
    names = declared.sequence
    position = len(names) if number.strip() == "last" else int(number) if number.strip().isdecimal() else 0
    if not 1 <= position <= len(names):
        raise ConfigError(
            f"`hints` names block {number.strip()!r} of {whose}; expected last, or a number from 1 to {len(names)}"
        )
    if settings.hint_tokens == "class" and "class" not in declared.prefix_tokens:
        raise ConfigError(f"{whose} has no class token; expected `hint_tokens` patches")
    depth, level = next(
        (depth, level) for depth, level in enumerate(declared.levels) if names[position - 1] in level.blocks
    )
    return HintBlock(names[position - 1], level, declared.prefix if depth >= declared.prefix_level else 0)
