"""Who disagrees with whom: models, their heads and the ground truth on the same pictures (DeiT, 2012.12877, table 4).

B batch, V voters, L layers, P pictures, N tokens, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoint.class_mapping import map_classes
from vitrail.data.augment.batch_transforms import normalise
from vitrail.data.datasets import DatasetSplits, ImageDataset, open_data
from vitrail.data.loader import evaluation_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.torch_dataset import TorchDataset
from vitrail.errors import ConfigError, DataError, VitrailError, describe_error
from vitrail.inspection.capture import capture_tokens
from vitrail.loading import LoadedModel, open_model
from vitrail.study.compare_results import TRUTH, Comparison, TokenSimilarity, Voter
from vitrail.train.evaluate import temporary_eval_mode
from vitrail.train.evaluation_data import get_validation_images, is_same_data_path, open_evaluation_data
from vitrail.train.teacher import Teacher

HEAD_NAMES = ("class head", "distillation head", "both heads")
UNREADABLE = -1  # in place of an answer


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model, and how to ask it."""

    name: str
    model: Any
    preprocessing: Preprocessing
    classes: int
    class_columns: tuple[int, ...]  # its class of each class of the data
    note: str = ""

    @property
    def is_distilled(self) -> bool:
        return bool(getattr(getattr(self.model, "config", None), "distilled", False))

    @property
    def heads(self) -> tuple[str | None, ...]:
        return HEAD_NAMES if self.is_distilled else (None,)


@dataclass(frozen=True)
class PredictedClasses:
    """What one model said to the pictures; a picture that could not be read has UNREAD, and why in `unread`."""

    truth: Tensor  # int32 (P,)
    predicted: Tensor  # int32 (heads, P)
    cosines: Tensor | None  # (L, P), of a distilled model
    unreadable: dict[int, str]


def compare(
    models: str | Path | Teacher | LoadedModel | Sequence[str | Path | Teacher | LoadedModel],
    data: str | Path | DatasetSplits | ImageDataset | TorchDataset | None = None,
    *,
    batch: int = 64,
    workers: int = 0,
    device: str | torch.device = "cpu",
    strict: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Which share of the pictures each two voters classify differently, and how often each is right.

    The voters are the ground truth and the models; a distilled one votes thrice, with each head and with both. A model
    is named as for `open_model`, or is a vitrail.Teacher. Each sees the pictures through its own preprocessing and
    chooses among the data's classes, found by name. `data` is the first run's own unless given; its validation part is
    taken, of a run's own data what that run did not see, else all. Unreadable pictures are left out for all and named,
    or an error if `strict`. `progress` is told after each batch how many pictures a model was asked for.
    """
    start = perf_counter()
    if isinstance(models, str | Path | Teacher | LoadedModel):
        models = [models]
    if not models:
        raise ConfigError("no models; expected at least one: a run's folder, a checkpoint, or timm:NAME")
    if batch < 1:
        raise ConfigError(f"batch is {batch}; expected at least 1")
    opened = [open_compared_model(each) for each in models]
    given = open_comparison_data(opened, data)
    asked = [
        prepare_compared_model(each, name, given)
        for each, name in zip(opened, shorten_model_names(opened), strict=True)
    ]
    said = [
        predict_classes(each, get_validation_images(given), batch, workers, device, strict, progress) for each in asked
    ]

    unread = dict[int, str]()
    for each in said:
        unread = each.unreadable | unread
    kept = torch.ones_like(said[0].truth, dtype=torch.bool)
    kept[list(unread)] = False
    if not kept.any():
        raise DataError(f"no picture of {given.name} can be read, for instance: {next(iter(unread.values()))}")
    votes = torch.cat([said[0].truth[None], *(each.predicted for each in said)])[
        :, kept
    ]  # (V, P), the ground truth first
    differ = torch.stack([(votes != row).sum(1) for row in votes]).double() / votes.shape[1]  # (V, V)
    right = ((votes == votes[0]).sum(1).double() / votes.shape[1]).tolist()
    who = [(TRUTH, None, None)]
    who += [(f"{each.name}, {head}" if head else each.name, each.name, head) for each in asked for head in each.heads]
    return Comparison(
        data=given.name,
        images=votes.shape[1],
        voters=tuple(Voter(*each, accuracy) for each, accuracy in zip(who, right, strict=True)),
        disagreement=tuple(map(tuple, differ.tolist())),
        similarities=tuple(
            average_token_similarity(each, found.cosines[:, kept])
            for each, found in zip(asked, said, strict=True)
            if found.cosines is not None
        ),
        skipped=tuple(unread[index] for index in sorted(unread)),
        notes=(*given.notes, *(each.note for each in asked if each.note)),
        seconds=perf_counter() - start,
    )


def open_compared_model(model: str | Path | Teacher | LoadedModel) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, Teacher):
        labels = None if model.labels is None else tuple(model.labels)
        classes = getattr(getattr(model.model, "config", None), "classes", len(labels or ()))
        how = model.preprocessing
        return LoadedModel(source=model.name, model=model.model, preprocessing=how, classes=classes, labels=labels)
    if not isinstance(model, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the model is {repr(model)[:60]}; expected its name, or for a module a vitrail.Teacher")
    return open_model(str(model))


def open_comparison_data(
    opened: Sequence[LoadedModel], data: str | Path | DatasetSplits | ImageDataset | TorchDataset | None
) -> DatasetSplits:
    """The data asked for, else the first run's; of a run's own data, the part that it was not trained on."""
    if isinstance(data, DatasetSplits):
        return data
    if data is not None and not isinstance(data, str | Path):
        return open_data(data, val_share=1.0)
    where = None if data is None else str(data)
    runs = [(each.source, each.run) for each in opened if each.run is not None and each.run.data is not None]
    own = next((run for _, run in runs if where is None or is_same_data_path(run.data, where)), None)
    found = open_evaluation_data(where, None, own)
    if own is None or own.data is None:
        return found
    split = (own.seed, own.val_share)
    others = [
        name for name, run in runs if is_same_data_path(run.data, own.data) and (run.seed, run.val_share) != split
    ]
    if others and open_data(own.data, val_share=1.0).train is None:  # it has no validation part that all hold out
        note = f"{', '.join(others)}: held out other pictures, and was trained on some of these"
        return replace(found, notes=(*found.notes, note))
    return found


def prepare_compared_model(opened: LoadedModel, name: str, data: DatasetSplits) -> ComparedModel:
    """Refused, before any picture is read, unless it can answer in the data's classes."""
    get_validation_images(data)
    module = opened.module
    config: Any = getattr(module, "config", None)
    if not opened.classes:
        raise ConfigError(f"{opened.source} has no head, so no classes to answer with; expected a model with classes")
    how = opened.preprocessing
    if hasattr(config, "image_size") and not getattr(config, "dynamic", False):
        how = replace(how, image_size=config.image_size)
    if opened.labels is not None and len(opened.labels) != opened.classes:
        names = len(opened.labels)
        raise ConfigError(f"{opened.source} has {names} names for {opened.classes} classes; expected one for each")
    try:
        columns, note = map_classes(opened.labels, opened.classes, data.classes)
    except DataError as error:
        raise DataError(f"{opened.source} cannot answer {data.name}: {error}") from None
    if len(columns) < opened.classes:
        few = f"of its {opened.classes} classes it may only answer the data's {len(columns)}"
        note = f"{note}; {few}" if note else few
    note = f"{name}: {note}" if note else ""
    return ComparedModel(
        name=name, model=module, preprocessing=how, classes=opened.classes, class_columns=columns, note=note
    )


def predict_classes(
    compared: ComparedModel,
    dataset: ImageDataset,
    batch: int,
    workers: int,
    device: str | torch.device,
    strict: bool,
    progress: Callable[[int], object] | None,
) -> PredictedClasses:
    """One pass over the pictures; classes are held, not logits."""
    model, count = compared.model, len(dataset)
    truth = torch.full((count,), UNREADABLE, dtype=torch.int32)
    said = torch.full((len(compared.heads), count), UNREADABLE, dtype=torch.int32)
    cosines = torch.full((len(model.blocks) + 2, count), torch.nan) if compared.is_distilled else None
    columns, unread = torch.tensor(compared.class_columns), dict[int, str]()
    watching = (
        capture_tokens(model, class_distillation_cosine) if compared.is_distilled else nullcontext(list[Tensor]())
    )
    with temporary_eval_mode(model, device), torch.inference_mode(), watching as seen:
        number = next(model.parameters(), torch.empty(0)).dtype
        batches = evaluation_batches(dataset, compared.preprocessing, batch=batch, workers=workers)
        for first, each in zip(range(0, count, batch), batches, strict=True):
            if strict and each.skipped:
                raise DataError(each.skipped[0])
            here = range(first, min(first + batch, count))
            missing = sorted(set(here) - set(each.indices.tolist()))
            unread.update(zip(missing, each.skipped, strict=True))  # both are in the order of the pictures
            if len(each.labels):
                images = normalise(each.images.to(device), compared.preprocessing).to(number)
                try:
                    logits = torch.stack(compute_head_logits(compared, images)).float().cpu()  # (heads, B, classes)
                except Exception as error:  # whatever their code raises is theirs to mend
                    raise ConfigError(
                        f"{compared.name} cannot answer: {describe_error(error)}; expected logits"
                    ) from error
                check_logits(compared, logits, len(each.labels))
                truth[each.indices] = each.labels.int()
                said[:, each.indices] = logits[..., columns].argmax(-1).int()
                if cosines is not None:
                    cosines[:, each.indices] = torch.stack(seen).cpu()
            if progress is not None:
                progress(len(here))
    return PredictedClasses(truth, said, cosines, unread)


def compute_head_logits(compared: ComparedModel, images: Tensor) -> tuple[Tensor, ...]:
    """Of each head and of both, by one forward pass."""
    if not compared.is_distilled:
        return (compared.model(images),)
    by_label, by_teacher = compared.model.heads(images)
    return by_label, by_teacher, (by_label + by_teacher) / 2


def check_logits(compared: ComparedModel, logits: Tensor, image_count: int) -> None:
    if logits.shape[1:] != (image_count, compared.classes):
        expected = f"expected logits of {image_count} pictures, {compared.classes} classes"
        raise ConfigError(f"{compared.name} answers a tensor of {tuple(logits.shape[1:])}; {expected}")
    if not logits.isfinite().all():
        raise VitrailError(f"{compared.name} answers NaN or infinity; expected finite weights: are they whole?")


def class_distillation_cosine(tokens: Tensor) -> Tensor:
    """Of the class and the distillation token, which also the last block of the pass that answers computes: (B,)."""
    return F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float(), dim=-1)


def average_token_similarity(compared: ComparedModel, cosines: Tensor) -> TokenSimilarity:
    """Means over the pictures; `cosines` is (L, P)."""
    *layers, end = cosines.double().mean(1).tolist()
    learned = F.cosine_similarity(compared.model.cls_token.float(), compared.model.dist_token.float(), dim=-1)
    return TokenSimilarity(compared.name, learned.item(), tuple(layers), end)


def shorten_model_names(opened: Sequence[LoadedModel]) -> list[str]:
    """The last parts of each path that no other ends in; what is given twice is counted."""
    parts = [each.source.rstrip("/").split("/") for each in opened]
    parts = [list(Path(*words).resolve().parts) if words[-1] in ("", ".", "..") else words for words in parts]
    names = list[str]()
    for own in parts:
        others = [words for words in parts if words != own]
        taken = 1
        while taken < len(own) and any(words[-taken:] == own[-taken:] for words in others):
            taken += 1
        names.append("/".join(own[-taken:]))
    unique = list[str]()
    for name in names:
        tries = (name if number == 1 else f"{name} ({number})" for number in range(1, len(names) + 2))
        unique.append(next(each for each in tries if each not in (TRUTH, *unique)))
    return unique
