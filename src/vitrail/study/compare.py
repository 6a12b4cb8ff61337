"""Compare the predictions of models, their heads and the ground truth on the same images (DeiT, 2012.12877, table 4).

B batch, V voters, L layers, P images, N tokens, D width.
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

from vitrail.base.errors import ConfigError, DataError, VitrailError, describe_error
from vitrail.data.images.augment.augmentations import normalise
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, TorchDataset, open_data
from vitrail.data.images.loader import evaluation_batches
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.evaluation.evaluation_data import (
    find_default_data,
    get_validation_images,
    is_same_data_path,
    open_evaluation_data,
)
from vitrail.inspection.attention.capture import capture_tokens, list_blocks
from vitrail.loaded_model import LoadedModel
from vitrail.models.base.checks import check_count, find_image_config
from vitrail.models.base.contract import find_image_model, takes_other_sizes
from vitrail.models.catalog.preset_list import shorten_model_names
from vitrail.opening import open_model
from vitrail.study.compare_results import TRUTH, ClassDistillationSimilarity, Comparison, Voter
from vitrail.tasks.teacher import Teacher

HEAD_NAMES = ("class head", "distillation head", "both heads")
UNREADABLE = -1  # in place of a class


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model with its preprocessing and the columns of the data's classes."""

    name: str
    model: Any
    preprocessing: Preprocessing
    classes: int
    class_columns: tuple[int, ...]  # index of each class of the data in its logits
    note: str = ""

    @property
    def is_distilled(self) -> bool:
        declared = find_image_model(self.model)
        return declared is not None and len(declared.heads) == 2

    @property
    def token_states(self) -> int:
        """The tokens that `capture_tokens` captures: after the embedding, each block and the final norm."""
        declared = find_image_model(self.model)
        return 0 if declared is None else len(list_blocks(declared)) + 2

    @property
    def heads(self) -> tuple[str | None, ...]:
        return HEAD_NAMES if self.is_distilled else (None,)


@dataclass(frozen=True)
class PredictedClasses:
    """Predicted classes of one model; unreadable images have UNREADABLE, and the reason in `unreadable`."""

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
    """Share of the images that each pair of voters classifies differently, and the accuracy of each voter.

    Voters are the ground truth and the models; a distilled model has three votes: each head, and both. A model is a
    name as for `open_model`, or a vitrail.Teacher. Each uses its own preprocessing and predicts among the data's
    classes, matched by name. `data` defaults to that of the first run; its validation part is used: for a run's own
    data the images that the run held out, otherwise all. Unreadable images are excluded for all models and listed, or
    an error if `strict`. `progress` is called after each batch with its number of images.

    >>> comparison = vitrail.compare(["vit_fashion"], "fashion")  # print it for the table
    >>> comparison.images
    1000
    """
    start = perf_counter()
    if isinstance(models, str | Path | Teacher | LoadedModel):
        models = [models]
    if not isinstance(models, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the models are {repr(models)[:60]}; expected a list of names or LoadedModels")
    if not models:
        raise ConfigError("no models were given; expected at least one: a run folder, a checkpoint, or timm:NAME")
    check_count("batch", batch)
    opened = [open_compared_model(each) for each in models]
    splits = open_comparison_data(opened, data)
    names = shorten_model_names([each.source for each in opened], taken=(TRUTH,))
    compared = [match_model_to_data_classes(each, name, splits) for each, name in zip(opened, names, strict=True)]
    predictions = [
        predict_classes(each, get_validation_images(splits), batch, workers, device, strict, progress)
        for each in compared
    ]

    unreadable = dict[int, str]()
    for each in predictions:
        unreadable = each.unreadable | unreadable
    kept = torch.ones_like(predictions[0].truth, dtype=torch.bool)
    kept[list(unreadable)] = False
    if not kept.any():
        raise DataError(f"no image of {splits.name} can be read, for instance: {next(iter(unreadable.values()))}")
    # (V, P), the ground truth first
    votes = torch.cat([predictions[0].truth[None], *(each.predicted for each in predictions)])[:, kept]
    disagreement = torch.stack([(votes != row).sum(1) for row in votes]).double() / votes.shape[1]  # (V, V)
    accuracies = ((votes == votes[0]).sum(1).double() / votes.shape[1]).tolist()
    names = [(TRUTH, None, None)]
    names += [
        (f"{each.name}, {head}" if head else each.name, each.name, head) for each in compared for head in each.heads
    ]
    return Comparison(
        data=splits.name,
        images=votes.shape[1],
        voters=tuple(Voter(*each, accuracy) for each, accuracy in zip(names, accuracies, strict=True)),
        disagreement=tuple(map(tuple, disagreement.tolist())),
        similarities=tuple(
            average_class_distillation_similarity(each, found.cosines[:, kept])
            for each, found in zip(compared, predictions, strict=True)
            if found.cosines is not None
        ),
        skipped=tuple(unreadable[index] for index in sorted(unreadable)),
        notes=(*splits.notes, *(each.note for each in compared if each.note)),
        seconds=perf_counter() - start,
    )


def open_compared_model(model: str | Path | Teacher | LoadedModel) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, Teacher):
        labels = None if model.labels is None else tuple(model.labels)
        config = find_image_config(model.model)
        classes = len(labels or ()) if config is None else config.classes
        how = model.preprocessing
        return LoadedModel(source=model.name, model=model.model, preprocessing=how, classes=classes, labels=labels)
    if not isinstance(model, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the model is {repr(model)[:60]}; expected a name, or a vitrail.Teacher for a module")
    return open_model(str(model))


def open_comparison_data(
    opened: Sequence[LoadedModel], data: str | Path | DatasetSplits | ImageDataset | TorchDataset | None
) -> DatasetSplits:
    """Open the given data, by default that of the first run; of a run's own data, the part that it held out."""
    if isinstance(data, DatasetSplits):
        return data
    if data is not None and not isinstance(data, str | Path):
        return open_data(data, val_share=1.0)
    path = next(filter(None, map(find_default_data, opened)), None) if data is None else str(data)
    runs = [(each.source, each.run) for each in opened if each.run is not None and each.run.data is not None]
    own = next((run for _, run in runs if path is None or is_same_data_path(run.data, path)), None)
    splits = open_evaluation_data(path, None, own)
    if own is None or own.data is None:
        return splits
    split = (own.seed, own.val_share)
    others = [
        name for name, run in runs if is_same_data_path(run.data, own.data) and (run.seed, run.val_share) != split
    ]
    if others and open_data(own.data, val_share=1.0).train is None:  # no validation part that all runs held out
        note = f"{', '.join(others)}: held out other images, and was trained on some of these"
        return replace(splits, notes=(*splits.notes, note))
    return splits


def match_model_to_data_classes(opened: LoadedModel, name: str, data: DatasetSplits) -> ComparedModel:
    """Match the model's classes with the data's; an error, before any image is read, if that is impossible."""
    get_validation_images(data)
    module = opened.module
    if not opened.classes:
        raise ConfigError(f"{opened.source} has no head, so it cannot predict classes; expected a model with classes")
    how, config = opened.preprocessing, find_image_config(module)
    if config is not None and not takes_other_sizes(module):
        how = replace(how, image_size=config.image_size)
    try:
        columns, note = match_data_classes_to_model(opened.labels, opened.classes, data.classes)
    except DataError as error:
        raise DataError(f"{opened.source} cannot predict the classes of {data.name}: {error}") from None
    if len(columns) < opened.classes:
        restricted = f"of its {opened.classes} classes only the data's {len(columns)} are compared"
        note = f"{note}; {restricted}" if note else restricted
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
    """Predict the class of every image in one pass; only classes are stored, not logits."""
    model, count = compared.model, len(dataset)
    truth = torch.full((count,), UNREADABLE, dtype=torch.int32)
    predicted = torch.full((len(compared.heads), count), UNREADABLE, dtype=torch.int32)
    cosines = torch.full((compared.token_states, count), torch.nan) if compared.is_distilled else None
    columns, unreadable = torch.tensor(compared.class_columns), dict[int, str]()
    token_capture = (
        capture_tokens(model, class_distillation_cosine) if compared.is_distilled else nullcontext(list[Tensor]())
    )
    with temporary_eval_mode(model, device), torch.inference_mode(), token_capture as captured:
        dtype = next(model.parameters(), torch.empty(0)).dtype
        batches = evaluation_batches(dataset, compared.preprocessing, batch=batch, workers=workers)
        for first, each in zip(range(0, count, batch), batches, strict=True):
            if strict and each.skipped:
                raise DataError(each.skipped[0])
            indices = range(first, min(first + batch, count))
            missing = sorted(set(indices) - set(each["indices"].tolist()))
            unreadable.update(zip(missing, each.skipped, strict=True))  # both in the order of the images
            if each.size:
                images = normalise(each["images"].to(device), compared.preprocessing).to(dtype)
                try:
                    logits = torch.stack(compute_head_logits(compared, images)).float().cpu()  # (heads, B, classes)
                except Exception as error:  # a custom model may raise anything
                    raise ConfigError(
                        f"{compared.name} fails to predict: {describe_error(error)}; expected logits"
                    ) from error
                check_logits(compared, logits, each.size)
                truth[each["indices"]] = each["labels"].int()
                predicted[:, each["indices"]] = logits[..., columns].argmax(-1).int()
                if cosines is not None:
                    cosines[:, each["indices"]] = torch.stack(captured).cpu()
            if progress is not None:
                progress(len(indices))
    return PredictedClasses(truth, predicted, cosines, unreadable)


def compute_head_logits(compared: ComparedModel, images: Tensor) -> tuple[Tensor, ...]:
    """Logits of each head and of both, from one forward pass."""
    if not compared.is_distilled:
        return (compared.model(images),)
    by_label, by_teacher = compared.model.head_logits(compared.model.encode(images, queries=2))
    return by_label, by_teacher, (by_label + by_teacher) / 2


def check_logits(compared: ComparedModel, logits: Tensor, image_count: int) -> None:
    if logits.shape[1:] != (image_count, compared.classes):
        expected = f"expected logits of {image_count} images and {compared.classes} classes"
        raise ConfigError(f"{compared.name} returns a tensor of shape {tuple(logits.shape[1:])}; {expected}")
    if not logits.isfinite().all():
        raise VitrailError(f"{compared.name} predicts NaN or infinity; check that its weights are finite")


def class_distillation_cosine(tokens: Tensor) -> Tensor:
    """Cosine similarity of class and distillation tokens, which every pass computes in all blocks: (B, N, D) → (B,)."""
    return F.cosine_similarity(tokens[:, 0].float(), tokens[:, 1].float(), dim=-1)


def average_class_distillation_similarity(compared: ComparedModel, cosines: Tensor) -> ClassDistillationSimilarity:
    """Means over the images of cosines (L, P)."""
    *layers, end = cosines.double().mean(1).tolist()
    learned = F.cosine_similarity(compared.model.cls_token.float(), compared.model.dist_token.float(), dim=-1)
    return ClassDistillationSimilarity(compared.name, learned.item(), tuple(layers), end)
