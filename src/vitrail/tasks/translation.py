"""Translation: the next target token is predicted from the source sentence and the target tokens before it.

Works with every TextModel. Batches have `source` (B, N), `target_in` and `target_out` (B, M), and a `share`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.base.errors import ConfigError, format_install_command
from vitrail.base.text import format_count
from vitrail.checkpoint.family_recognition import get_family
from vitrail.checkpoint.weight_folders import compute_tokenizer_checksum
from vitrail.data.batch import Batch
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.text.batches import EncodedPairs, PairBatches, load_validation_batches
from vitrail.data.text.pairs import PairSplits
from vitrail.data.text.tokenizer import TRAINERS, TextTokenizer
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.evaluation.text_scores import (
    compute_perplexity,
    is_sacrebleu_installed,
    measure_token_loss,
    score_translations,
)
from vitrail.models.base.family import Family
from vitrail.models.base.text_contract import TextModel, check_reads_text
from vitrail.models.catalog.families import find_preset
from vitrail.opening import Opened, open_model
from vitrail.predict.search.settings import GREEDY
from vitrail.predict.translator import Translator
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import TranslationSettings
from vitrail.tasks.image_task import copy_weights_as_float32
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.task import (
    BuildContext,
    MeanMetrics,
    Source,
    Task,
    TaskKind,
    TaskSetup,
    check_task,
    parse_task_settings,
)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Batches of sentence pairs, each a function of the seed and the step."""

    data: PairSplits
    tokenizer: TextTokenizer
    train: EncodedPairs
    val: EncodedPairs
    batches: PairBatches

    @classmethod
    def encode(
        cls,
        data: PairSplits,
        tokenizer: TextTokenizer,
        *,
        batch: int,
        batch_tokens: int,
        max_length: int,
        limit: int | None = None,
        seed: int = 0,
    ) -> "TextSource":
        """Encode all pairs but those longer than `limit`, the positions of a model, and in training `max_length`."""
        longest = max_length if limit is None else min(max_length, limit)
        train = EncodedPairs.encode(data.train, tokenizer, length=longest)
        batches = PairBatches(pairs=train, batch_tokens=batch_tokens, max_sentences=batch, seed=seed)
        val = EncodedPairs.encode(data.val, tokenizer, length=limit)
        return cls(data=data, tokenizer=tokenizer, train=train, val=val, batches=batches)

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.data.notes, *self.train.notes, *self.val.notes)

    @property
    def example_count(self) -> int:
        return len(self.train)

    @property
    def validation_count(self) -> int:
        return len(self.val)

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps_per_epoch

    @property
    def in_memory(self) -> bool:
        return True

    def load_batches(
        self, steps: range, *, accumulate: int = 1, workers: int = 0, ranks: Ranks | None = None, pin: bool = False
    ) -> Iterator[Batch]:
        """A batch takes less than a millisecond to make, so no workers are needed."""
        del workers
        ranks = ranks or Ranks()
        found = self.batches.load(steps, accumulate=accumulate, rank=ranks.rank, world=ranks.world_size)
        return (batch.pin_memory() for batch in found) if pin else found

    def load_validation_batches(
        self, *, batch: int, workers: int = 0, ranks: Ranks | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Every validation pair once, or the first `limit`."""
        del workers
        ranks = ranks or Ranks()
        return load_validation_batches(self.val, batch=batch, rank=ranks.rank, world=ranks.world_size, limit=limit)

    def describe(self) -> str:
        return (
            f"{self.name} {'-'.join(self.data.languages)}: {format_count(self.example_count, 'training pair')}, "
            f"{format_count(self.validation_count, 'validation pair')}, "
            f"{format_count(self.tokenizer.vocabulary, 'token')} in the vocabulary"
        )

    @cached_property
    def tokenizer_text(self) -> str:
        return self.tokenizer.to_json()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.data.name,
            "languages": list(self.data.languages),
            "train": self.example_count,
            "val": self.validation_count,
            "tokenizer": compute_tokenizer_checksum(self.tokenizer_text),
        }

    def describe_model_input(self, model: Any) -> dict[str, Any]:
        del model
        return {"languages": self.data.languages, "tokenizer": self.tokenizer_text}


def compute_token_loss(
    logits: Tensor, target: Tensor, share: Tensor, *, pad: int, smoothing: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of logits (B, M, V) and targets (B, M), and the accuracy: means over real tokens, times the share.

    The share is the number of this part's tokens relative to the mean of all parts of a step, micro-batches and
    processes, so that the mean over the parts is that over all tokens of the step.
    """
    logits, target = logits.flatten(0, 1).float(), target.flatten()
    loss = F.cross_entropy(logits, target, ignore_index=pad, label_smoothing=smoothing)
    kept = target != pad
    hits = ((logits.detach().argmax(-1) == target) & kept).sum() / kept.sum()
    return loss * share, {"accuracy": hits * share}


class WordTask(Task):
    """Predict each token of a text from those before it; the label smoothing is that of torch.

    A subclass writes `pad`, `predict_words`, and `score_texts` for the metrics of written texts.
    """

    unit = "tokens"  # of the target
    smoothing = 0.0  # that of the recipe after `setup`

    @property
    def pad(self) -> int:
        raise NotImplementedError

    def predict_words(self, batch: Batch) -> Tensor:
        """The logits after each token: (B, M, V)."""
        raise NotImplementedError

    def score_texts(self, source: Any, batch: int, device: torch.device) -> dict[str, float]:
        """Metrics of greedy texts of some validation examples, at the end of a run."""
        raise NotImplementedError

    def setup(self, source: Source, recipe: Recipe) -> None:
        del source
        self.smoothing = recipe.augmentation.smoothing

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        del clock
        return compute_token_loss(
            self.predict_words(batch), batch["target_out"], batch["share"], pad=self.pad, smoothing=self.smoothing
        )

    def count_units(self, batch: Batch) -> int:
        return int((batch["target_out"] != self.pad).sum())

    def evaluate(
        self,
        source: Source,
        clock: Clock,
        *,
        batch: int,
        workers: int = 0,
        device: torch.device,
        limit: int | None = None,
    ) -> MeanMetrics:
        """Loss and perplexity; at the end of a run also the scores of some texts."""
        skipped = list[str]()
        batches = source.load_validation_batches(batch=batch, workers=workers, ranks=self.ranks, limit=limit)

        def compute_logits(each: Batch) -> Tensor:
            skipped.extend(each.skipped)
            return self.predict_words(each)

        readable = (each for each in batches if each.size)
        loss, _ = measure_token_loss(self, readable, self.pad, device, self.ranks, compute_logits)
        metrics = {"perplexity": compute_perplexity(loss), "loss": loss}
        if clock.step >= clock.steps:
            metrics |= self.score_texts(source, batch, device)
        count = source.validation_count if limit is None else min(limit, source.validation_count)
        return MeanMetrics(metrics=metrics, skipped=tuple(skipped), examples=count)


class TranslationTask(WordTask):
    """Train a text model on sentence pairs."""

    example = "sentence"
    kind = "text"
    metrics = (
        Metric(name="perplexity", label="perplexity", higher_is_better=False),
        LOSS_METRIC,
        Metric(name="bleu", label="BLEU"),
        Metric(name="chrf", label="chrF2"),
    )

    def __init__(self, model: TextModel, settings: TranslationSettings | None = None) -> None:
        super().__init__()
        self.backbone = model
        self.settings = settings or TranslationSettings()

    @property
    def pad(self) -> int:
        return self.backbone.config.pad

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        del ranks
        check_reads_text(type(self.backbone), "the model")
        pairs, config = check_text_source(source, self), self.backbone.config
        known = pairs.tokenizer
        sources = asdict(config).get("source_vocabulary") or config.vocabulary
        if (config.vocabulary, sources, config.pad) != (known.vocabulary, known.vocabulary, known.pad):
            raise ConfigError(
                f"a model of {config.vocabulary} tokens and padding {config.pad}; expected {known.vocabulary} and "
                f"{known.pad}, as the tokenizer has"
            )
        default = Augmentation()
        for each in fields(Augmentation):
            if each.name != "smoothing" and vars(recipe.augmentation)[each.name] != vars(default)[each.name]:
                raise ConfigError(f"`{each.name}` changes images, but {pairs.name} has sentences; remove it")

    def predict_words(self, batch: Batch) -> Tensor:
        return self.backbone(batch["source"], batch["target_in"])

    def score_texts(self, source: Any, batch: int, device: torch.device) -> dict[str, float]:
        """BLEU and chrF of greedy translations of the first validation sentences; each process translates a share."""
        del batch
        pairs = check_text_source(source, self)
        rows = pairs.val.indices[: self.settings.bleu_sentences].tolist()
        if not rows or not is_sacrebleu_installed():
            return {}
        loaded = Opened(source=pairs.name, kind="text", model=self.backbone, tokenizer=pairs.tokenizer)
        with temporary_eval_mode(self.backbone):
            translator = Translator(loaded, device=str(device))
            own = [pairs.data.val.source(row) for row in rows[self.ranks.rank :: self.ranks.world_size]]
            texts = [str(each) for each in translator.iterate(own, GREEDY)]
        parts = self.ranks.all_gather_objects(texts)
        merged = [parts[place % len(parts)][place // len(parts)] for place in range(len(rows))]
        found = score_translations(merged, [pairs.data.val.target(row) for row in rows])
        return {"bleu": found.bleu, "chrf": found.chrf}


def check_text_source(source: Source, task: Task) -> TextSource:
    if not isinstance(source, TextSource):
        raise ConfigError(f"{type(task).__name__} trains on sentence pairs; expected pairs, not {source.name}")
    return source


@dataclass(frozen=True, kw_only=True)
class StartingTextModel:
    """The model that training starts from, with its tokenizer."""

    model: TextModel
    tokenizer: TextTokenizer
    family: Family
    started_from: str | None = None  # a checkpoint


def build_translation(request: Request, context: BuildContext) -> TaskSetup:
    settings: TranslationSettings = parse_task_settings(TASK, request.recipe)
    recipe, data = request.recipe, request.open_pairs()
    if request.init:
        start = open_starting_text_model(request)
    else:
        with context.progress(None, "tokenizer"):
            texts = chain(data.train.sources, data.train.targets)
            tokenizer = open_tokenizer(settings.tokenizer, settings.vocabulary, texts)
        start = create_starting_text_model(request, tokenizer)
    source = TextSource.encode(
        data,
        start.tokenizer,
        batch=recipe.loop.batch,
        batch_tokens=settings.batch_tokens,
        max_length=settings.max_length,
        limit=start.model.length_limit,
        seed=recipe.loop.seed,
    )
    task = TranslationTask(start.model, settings)
    check_task(task, source, recipe, context.ranks)
    for note in source.notes:
        context.report(f"note   {note}")
    if settings.bleu_sentences and not is_sacrebleu_installed():
        context.report(f"note   sacrebleu is not installed: no BLEU at the end; run: {format_install_command('text')}")
    name = recipe.model or start.family.name
    return TaskSetup(
        task=task,
        source=source,
        model_name=name,
        facts={
            "model": {
                "name": name,
                "family": start.family.name,
                "config": json.loads(json.dumps(asdict(start.model.config))),  # tuples as lists, as read from a file
            }
        },
        write_options={"family": start.family},
        started_from=start.started_from,
    )


def open_tokenizer(kind: str, vocabulary: int, texts: Iterable[str]) -> TextTokenizer:
    """A tokenizer from a file, or one of this kind and vocabulary trained on the texts."""
    if kind in TRAINERS:
        return TextTokenizer.train(kind, texts, vocabulary)
    if not Path(kind).is_file():
        raise ConfigError(f"`tokenizer` is {kind!r}; expected {', '.join(TRAINERS)}, or a tokenizer.json or vocab.txt")
    return TextTokenizer.load(kind)


def create_starting_text_model(request: Request, tokenizer: TextTokenizer) -> StartingTextModel:
    """A new model with the vocabulary of the tokenizer."""
    recipe = request.recipe
    if recipe.model is None:
        raise ConfigError("no model is named; use `model` transformer_cpu, or `init` with a run of translation")
    family, preset = find_preset(recipe.model, trusted=request.trusted)
    check_reads_text(family.build, recipe.model)
    config = family.configure(preset, **{"vocabulary": tokenizer.vocabulary, "pad": tokenizer.pad, **recipe.fields})
    model: Any = family.build(config)
    return StartingTextModel(model=model, tokenizer=tokenizer, family=family)


def open_starting_text_model(request: Request) -> StartingTextModel:
    """The model of a checkpoint, which keeps its tokenizer; `fields` may change its dropout."""
    recipe, loaded = request.recipe, open_model(str(request.init), fields=request.recipe.fields, kind="text")
    assert loaded.checkpoint is not None
    if recipe.model is not None:
        raise ConfigError(f"`model` {recipe.model} with `init` {request.init}; expected one of them")
    return StartingTextModel(
        model=copy_weights_as_float32(loaded.model),
        tokenizer=loaded.tokenizer,
        family=get_family(loaded.checkpoint.description, loaded.source),
        started_from=str(loaded.source if loaded.run is None else loaded.run.model),
    )


TASK = TaskKind(name="translation", settings=TranslationSettings, build=build_translation, needs_classes=False)
