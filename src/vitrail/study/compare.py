"""Compare the predictions of models, their heads and the ground truth on the same images (DeiT, 2012.12877, table 4).

B batch, V voters, L layers, P images, N tokens, D width.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import ConfigError, DataError, VitrailError, describe_error
from vitrail.base.figures import measure_text, new_figure, save_figure, style_axes, wrap_label
from vitrail.base.files import write_json
from vitrail.base.progress import Advance, Progress, track_progress
from vitrail.base.style import NOTE_POINTS, PALETTE, SHARE_MAP
from vitrail.base.table import TEXT_WIDTH, Column, Shown, Table
from vitrail.base.text import make_printable
from vitrail.data.batch import Batch
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import DatasetSplits, ImageDataset, TorchDataset, open_data
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.evaluation.evaluate import TORCH_BATCH, compute_batches, run_engine, temporary_eval_mode
from vitrail.evaluation.evaluation_data import (
    find_default_data,
    get_validation_images,
    is_same_data_path,
    open_evaluation_data,
)
from vitrail.inspection.attention.capture import capture_tokens, list_blocks
from vitrail.models.base.checks import check_count, find_image_config
from vitrail.models.base.contract import find_image_model, takes_other_sizes
from vitrail.models.catalog.preset_costs import shorten_model_names
from vitrail.opening import Opened, open_model
from vitrail.predict.engine_selection import EngineChoice, EngineOptions, choose_engine_for_dataset
from vitrail.tasks.teacher import Teacher

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARISON_FILES = ("comparison.json", "comparison.png")
TRUTH = "ground truth"
MAX_NAME_LENGTH = 40
MAX_LISTED_ROWS = 10  # pairs and skipped files in the text
MAX_VOTERS_WITH_NUMBERS, MAX_VOTERS_WITH_LABELS = 16, 60  # in the matrix
HEAD_NAMES = ("class head", "distillation head", "both heads")
UNREADABLE = -1  # in place of a class


@dataclass(frozen=True)
class Voter:
    """The ground truth, a model, or one head of a model."""

    name: str
    model: str | None  # None for the ground truth
    head: str | None  # for a distilled model: class head, distillation head, both heads
    accuracy: float  # share of the images

    def shorten_name(self, max_length: int) -> str:
        """Cut the model's name, not the head's."""
        head = f", {self.head}" if self.head else ""
        return make_printable(self.model or self.name, max_length - len(head)) + head


@dataclass(frozen=True)
class VoterPair:
    first: str
    second: str
    disagreement: float


@dataclass(frozen=True)
class ClassDistillationSimilarity:
    """Cosine similarity of a model's class and distillation tokens, averaged over the images."""

    model: str
    tokens: float  # of the learned parameters, without positions
    layers: tuple[float, ...]  # after the embedding, with positions, and after each block
    end: float  # after the final norm, which the heads read


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Accuracies and pairwise disagreement of voters; `str()` formats a report."""

    data: str
    images: int
    voters: tuple[Voter, ...]  # the ground truth first
    disagreement: tuple[tuple[float, ...], ...]  # (voters, voters): share of the images classified differently
    similarities: tuple[ClassDistillationSimilarity, ...] = ()  # one per distilled model
    skipped: tuple[str, ...] = ()  # unreadable images and why, one line each
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.voters)

    def pairs(self) -> list[VoterPair]:
        """All pairs of voters without the ground truth, most similar first."""
        found = [
            VoterPair(self.voters[row].name, self.voters[column].name, self.disagreement[row][column])
            for row, column in combinations(range(1, len(self.voters)), 2)
        ]
        return sorted(found, key=lambda each: each.disagreement)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "data": self.data,
            "images": self.images,
            "voters": [asdict(each) for each in self.voters],
            "disagreement": [list(row) for row in self.disagreement],
            "pairs": [asdict(each) for each in self.pairs()],
            "similarities": [{**asdict(each), "layers": list(each.layers)} for each in self.similarities],
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    @property
    def table(self) -> Table:
        """The accuracy of each voter, and how often it disagrees with the others, by their numbers."""
        numbers = [str(number) for number in range(len(self.voters))]
        data = make_printable(self.data, MAX_NAME_LENGTH)
        return Table(
            title=f"{data}, {self.images:,} images: accuracy and disagreement in %",
            columns=(
                Column(name="#"),
                Column(name="voter"),
                Column(name="correct", unit="%", digits=2),
                *(Column(name=number, unit="%", digits=2) for number in numbers),
            ),
            rows=[
                (
                    row,
                    Shown(voter.name, voter.shorten_name(MAX_NAME_LENGTH)),
                    voter.accuracy,
                    *(Shown(0.0, "·") if row == column else share for column, share in enumerate(shares)),
                )
                for row, (voter, shares) in enumerate(zip(self.voters, self.disagreement, strict=True))
            ],
            repeated=3,
        )

    def list_pairs_table(self) -> Table:
        pairs, short_names = self.pairs(), {each.name: each.shorten_name(MAX_NAME_LENGTH) for each in self.voters}
        heading = f"most similar of {len(pairs)} pairs" if len(pairs) > MAX_LISTED_ROWS else "pair, most similar first"
        return Table(
            columns=(Column(name=heading), Column(name="differ", unit="%", digits=2)),
            rows=[
                (f"{short_names[each.first]} – {short_names[each.second]}", each.disagreement)
                for each in pairs[:MAX_LISTED_ROWS]
            ],
        )

    def list_similarities_table(self) -> Table:
        depth = max(len(each.layers) for each in self.similarities)
        layers = ("tokens alone", "embedding", *(f"block {layer}" for layer in range(1, depth)), "final norm")
        values = [
            (each.tokens, *each.layers, *(None for _ in range(depth - len(each.layers))), each.end)
            for each in self.similarities
        ]
        return Table(
            title="cosine similarity of class and distillation tokens, by layer",
            columns=(
                Column(name="layer"),
                *(Column(name=each.model, digits=3, max_length=MAX_NAME_LENGTH) for each in self.similarities),
            ),
            rows=list(zip(layers, *values, strict=True)),
            repeated=1,
        )

    def __str__(self) -> str:
        tables = [
            self.table,
            *([self.list_pairs_table()] if len(self.voters) > 2 else []),
            *([self.list_similarities_table()] if self.similarities else []),
        ]
        return "\n\n".join(filter(None, (*map(str, tables), self.format_skipped())))

    def format_skipped(self) -> str:
        if not self.skipped:
            return ""
        more = [f"and {len(self.skipped) - MAX_LISTED_ROWS:,} more"] if len(self.skipped) > MAX_LISTED_ROWS else []
        lines = [make_printable(each, TEXT_WIDTH) for each in self.skipped[:MAX_LISTED_ROWS]]
        return "\n".join([f"{len(self.skipped):,} unreadable, excluded for all models:", *lines, *more])

    def write(self, report: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write the report as JSON and the plot to a folder."""
        numbers, plot = (folder / name for name in COMPARISON_FILES)
        write_json(numbers, report)
        save_figure(draw_comparison(self), plot)
        return [numbers, plot]


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model with its preprocessing and the columns of the data's classes."""

    name: str
    model: Any
    preprocessing: Preprocessing
    classes: int
    class_columns: tuple[int, ...]  # index of each class of the data in its logits
    notes: tuple[str, ...] = ()
    engine: EngineChoice | None = None  # None for torch

    @property
    def is_distilled(self) -> bool:
        declared = find_image_model(self.model)
        return declared is not None and len(declared.classifiers) == 2

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
    models: str | Path | Teacher | Opened | Sequence[str | Path | Teacher | Opened],
    data: str | Path | DatasetSplits | ImageDataset | TorchDataset | None = None,
    *,
    batch: int | None = None,
    workers: int = 0,
    device: str | torch.device | None = None,
    strict: bool = False,
    progress: Progress = None,
    options: EngineOptions | None = None,
) -> Comparison:
    """Share of the images that each pair of voters classifies differently, and the accuracy of each voter.

    Voters are the ground truth and the models; a distilled model has three votes: each head, and both. A model is a
    name as for `open_model`, or a vitrail.Teacher. Each uses its own preprocessing and predicts among the data's
    classes, matched by name. `data` defaults to that of the first run; its validation part is used: for a run's own
    data the images that the run held out, otherwise all. Unreadable images are excluded for all models and listed, or
    an error if `strict`. By default a progress bar is shown in a notebook and on a terminal; a function is called after
    each batch with its number of images. With `options`, each model with one head runs on the fastest engine that they
    allow.

    >>> comparison = vitrail.compare(["vit_fashion"], "fashion")  # print it for the table
    >>> comparison.images
    1000
    """
    start = perf_counter()
    if isinstance(models, str | Path | Teacher | Opened):
        models = [models]
    if not isinstance(models, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the models are {repr(models)[:60]}; expected a list of names or Openeds")
    if not models:
        raise ConfigError("no models were given; expected at least one: a run folder, a checkpoint, or timm:NAME")
    check_count("batch", 1 if batch is None else batch)
    opened = [open_compared_model(each) for each in models]
    splits = open_comparison_data(opened, data)
    names = shorten_model_names([each.source for each in opened], taken=(TRUTH,))
    compared = [match_model_to_data_classes(each, name, splits) for each, name in zip(opened, names, strict=True)]
    images = get_validation_images(splits)
    if options is not None:
        options = replace(options, batch=options.batch or batch, device=str(device or "cpu"))
        compared = [choose_engine(each, model, images, options) for each, model in zip(compared, opened, strict=True)]
    with track_progress(progress, len(compared) * len(images), "comparing") as advance:
        predictions = [predict_classes(each, images, batch, workers, device, strict, advance) for each in compared]

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
        notes=(*splits.notes, *(note for each in compared for note in each.notes)),
        seconds=perf_counter() - start,
    )


def open_compared_model(model: str | Path | Teacher | Opened) -> Opened:
    if isinstance(model, Opened):
        return model
    if isinstance(model, Teacher):
        labels = None if model.labels is None else tuple(model.labels)
        config = find_image_config(model.model)
        classes = len(labels or ()) if config is None else config.classes
        how = model.preprocessing
        return Opened(source=model.name, model=model.model, preprocessing=how, classes=classes, labels=labels)
    if not isinstance(model, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the model is {repr(model)[:60]}; expected a name, or a vitrail.Teacher for a module")
    return open_model(str(model), kind="image")


def open_comparison_data(
    opened: Sequence[Opened], data: str | Path | DatasetSplits | ImageDataset | TorchDataset | None
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


def match_model_to_data_classes(opened: Opened, name: str, data: DatasetSplits) -> ComparedModel:
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
    notes = (f"{name}: {note}",) if note else ()
    return ComparedModel(
        name=name, model=module, preprocessing=how, classes=opened.classes, class_columns=columns, notes=notes
    )


def choose_engine(
    compared: ComparedModel, opened: Opened, dataset: ImageDataset, options: EngineOptions
) -> ComparedModel:
    """The same model on the fastest engine; one with two heads stays in torch, which computes both in one pass."""
    if compared.is_distilled:
        return compared
    opened = replace(opened, preprocessing=compared.preprocessing)
    found = choose_engine_for_dataset(opened, dataset, options)
    if found is None:
        return compared
    return replace(
        compared, engine=found, notes=(*compared.notes, *(f"{compared.name}: {each}" for each in found.notes))
    )


def predict_classes(
    compared: ComparedModel,
    dataset: ImageDataset,
    batch: int | None,
    workers: int,
    device: str | torch.device | None,
    strict: bool,
    progress: Advance,
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
    chosen = compared.engine
    batch = chosen.batch if chosen is not None else batch or TORCH_BATCH
    with temporary_eval_mode(model, device), torch.inference_mode(), token_capture as captured:
        first_tensor = next(model.parameters(), torch.empty(0))
        dtype, place = first_tensor.dtype, first_tensor.device

        def compute_logits(each: Batch) -> Tensor | None:  # (heads, B, classes)
            if not each.size:
                return None
            if chosen is not None:
                return run_engine(chosen.predictor.engine, each)[None]
            images = normalize(each["images"].to(place), compared.preprocessing).to(dtype)
            try:
                return torch.stack(compute_head_logits(compared, images)).float().cpu()
            except Exception as error:  # a custom model may raise anything
                raise ConfigError(
                    f"{compared.name} fails to predict: {describe_error(error)}; expected logits"
                ) from error

        streams = 0 if chosen is None else chosen.predictor.engine.streams
        found = compute_batches(
            compute_logits, dataset, compared.preprocessing, batch=batch, workers=workers, streams=streams
        )
        for first, (each, logits) in zip(range(0, count, batch), found, strict=True):
            if strict and each.skipped:
                raise DataError(each.skipped[0])
            indices = range(first, min(first + batch, count))
            missing = sorted(set(indices) - set(each["indices"].tolist()))
            unreadable.update(zip(missing, each.skipped, strict=True))  # both in the order of the images
            if logits is not None:
                check_logits(compared, logits, each.size)
                truth[each["indices"]] = each["labels"].int()
                predicted[:, each["indices"]] = logits[..., columns].argmax(-1).int()
                if cosines is not None:
                    cosines[:, each["indices"]] = torch.stack(captured).cpu()
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


def draw_comparison(result: Comparison) -> "Figure":
    """Draw the matrix of disagreement and, for distilled models, the similarity of the two tokens by layer."""
    voters, lines = len(result.voters), bool(result.similarities)
    names = [wrap_label(f"{number}  {each.name}", 36) for number, each in enumerate(result.voters)]
    labeled = voters <= MAX_VOTERS_WITH_LABELS
    side = min(max(3.0, 0.6 * voters), 13.0)
    margin = labeled * max(measure_text(line, NOTE_POINTS) for name in names for line in name.split("\n"))
    figure = new_figure(side + margin + (6.2 if lines else 1.2), side + 1)
    left, *others = figure.subplots(
        1, 2 if lines else 1, squeeze=False, width_ratios=(side + margin, 5) if lines else None
    )[0]

    percents = [[100 * share for share in row] for row in result.disagreement]
    highest = max(map(max, percents)) or 1.0
    left.imshow(percents, cmap=SHARE_MAP, vmin=0, vmax=highest)
    style_axes(left, f"classified differently, % of {result.images:,} images")
    if labeled:
        left.set_yticks(range(voters), names, fontsize=NOTE_POINTS, parse_math=False)
        left.set_xticks(range(voters), [str(number) for number in range(voters)], fontsize=NOTE_POINTS)
        left.set_xlabel("the same, by number", fontsize=NOTE_POINTS)
    if voters <= MAX_VOTERS_WITH_NUMBERS:
        for row, values in enumerate(percents):
            for column, value in enumerate(values):
                color = "white" if value > 0.6 * highest else "black"
                left.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=NOTE_POINTS, color=color)

    for axes in others:
        for number, each in enumerate(result.similarities):
            color = PALETTE[number % len(PALETTE)]
            axes.plot(each.layers, color=color, marker="o", markersize=4, linewidth=1.6)
            axes.plot(len(each.layers) - 0.5, each.end, color=color, marker="D", markersize=6, linestyle="")
        style_axes(axes, "cosine similarity of class and distillation tokens\n(◆ after the final norm)")
        axes.set(xlabel="after the embedding (0) and each block", ylim=(min(0, *axes.get_ylim()), 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25, linewidth=0.6)
        rows = [axes.lines[2 * number] for number in range(len(result.similarities))]
        legend = axes.legend(rows, ["" for _ in rows], frameon=False, fontsize=NOTE_POINTS)
        for text, each in zip(legend.get_texts(), result.similarities, strict=True):
            text.set(text=wrap_label(each.model, 36), parse_math=False)
    return figure
