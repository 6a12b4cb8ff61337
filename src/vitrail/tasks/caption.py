"""Captions: a decoder reads the tokens of an image and predicts each word from them and the words before it.

Works with every image model. Batches have `images`, or the `tokens` of a frozen encoder, `target_in` and
`target_out` (B, M), and a `share`.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, format_install_command
from vitrail.checkpoint.writing import write_caption_model
from vitrail.data.batch import Batch
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import temporary_eval_mode
from vitrail.evaluation.text_scores import is_sacrebleu_installed, score_captions
from vitrail.models.base.checks import pair
from vitrail.models.base.contract import ImageModel
from vitrail.models.base.text_contract import Memory, TextModel, check_reads_text
from vitrail.models.catalog.families import find_preset
from vitrail.models.text.caption_model import CaptionModel, check_parts_fit
from vitrail.predict.captioner import write_captions
from vitrail.predict.search.settings import GREEDY
from vitrail.recipes.recipe import Recipe
from vitrail.recipes.request import Request
from vitrail.recipes.task_settings import CaptionSettings
from vitrail.tasks.caption_source import (
    CaptionSource,
    compute_encoder_features,
    draw_if_generated,
    keep_images_in_memory,
)
from vitrail.tasks.image_task import StartingModel, make_starting_model
from vitrail.tasks.metric import LOSS_METRIC, Metric
from vitrail.tasks.task import BuildContext, Source, Task, TaskKind, TaskSetup, check_task, parse_task_settings
from vitrail.tasks.translation import WordTask, open_tokenizer

UNSUITED_SETTINGS = ("mixup", "cutmix", "erase")  # of the augmentation: they hide or mix what the caption describes


class CaptionTask(WordTask):
    """Train a decoder to describe images, together with the image model whose tokens it reads, or alone.

    `backbone` is the image model, so that layer decay and frozen blocks apply to it.
    """

    example = "caption"
    kind = "caption"
    metrics = (
        Metric(name="perplexity", label="perplexity", higher_is_better=False),
        LOSS_METRIC,
        Metric(name="exact", label="exact match", is_share=True),
        Metric(name="bleu", label="BLEU-4"),
    )

    def __init__(self, encoder: ImageModel, decoder: TextModel, settings: CaptionSettings | None = None) -> None:
        super().__init__()
        check_parts_fit(encoder, decoder)
        self.backbone, self.decoder = encoder, decoder
        self.settings = settings or CaptionSettings()
        self.preprocessing: Preprocessing | None = None  # known after `setup`
        if self.settings.freeze_encoder:
            self.backbone.requires_grad_(False)
        else:
            freeze_unused_weights(self.backbone)

    @property
    def pad(self) -> int:
        return self.decoder.config.pad

    @property
    def result(self) -> CaptionModel:
        return CaptionModel(self.backbone, self.decoder)

    def train(self, mode: bool = True) -> "CaptionTask":
        """A frozen encoder stays in eval mode, without dropout."""
        super().train(mode)
        if self.settings.freeze_encoder:
            self.backbone.eval()
        return self

    def describe(self) -> str:
        encoder, decoder = (sum(each.numel() for each in part.parameters()) for part in (self.backbone, self.decoder))
        pixels = "×".join(map(str, self.backbone.config.image_size))
        frozen = "frozen " if self.settings.freeze_encoder else ""
        return (
            f"{frozen}encoder of {encoder / 1e6:.2f} M and decoder of {decoder / 1e6:.2f} M parameters, {pixels} pixels"
        )

    def check(self, source: Source, recipe: Recipe, ranks: Ranks) -> None:
        del ranks
        captions, config = check_caption_source(source, self), self.decoder.config
        known = captions.tokenizer
        if (config.vocabulary, config.pad) != (known.vocabulary, known.pad):
            raise ConfigError(
                f"a decoder of {config.vocabulary} tokens and padding {config.pad}; expected {known.vocabulary} and "
                f"{known.pad}, as the tokenizer has"
            )
        channels = self.backbone.config.channels
        if len(captions.preprocessing.mean) != channels:
            means = len(captions.preprocessing.mean)
            raise ConfigError(f"{means} means for a model of {channels} channels; expected one per channel")
        for name in UNSUITED_SETTINGS:
            if vars(recipe.augmentation)[name]:
                raise ConfigError(f"`{name}` changes what a caption describes; expected 0 for captions")
        for name in ("early_size", "whiten", "compile"):
            if vars(recipe.loop)[name]:
                raise ConfigError(f"`{name}` is {vars(recipe.loop)[name]}; captions are trained without it: remove it")

    def setup(self, source: Source, recipe: Recipe) -> None:
        super().setup(source, recipe)
        self.preprocessing = check_caption_source(source, self).preprocessing

    def encode(self, batch: Batch) -> Memory:
        """The tokens of the images, those that the batch has or those that the encoder computes: (B, N, D)."""
        if "tokens" in batch.tensors:
            return Memory(batch["tokens"])
        assert self.preprocessing is not None, "called before `setup`"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.settings.freeze_encoder):
            return Memory(self.backbone.tokens(normalize(batch["images"], self.preprocessing)))

    def predict_words(self, batch: Batch) -> Tensor:
        return self.decoder.decode(self.encode(batch), batch["target_in"])

    @torch.no_grad()
    def score_texts(self, source: Any, batch: int, device: torch.device) -> dict[str, float]:
        """Exact matches and BLEU of the first validation images; each process describes a share."""
        captions = check_caption_source(source, self)
        data = captions.data.val
        if data is None or not self.settings.scored_images:
            return {}
        images = np.arange(min(self.settings.scored_images, len(data)))
        found = dict[int, str]()
        with temporary_eval_mode(self):
            for each in captions.load_scored_images(images[self.ranks.rank :: self.ranks.world_size], batch):
                if each.size:
                    memory = self.encode(each.to(device))
                    limit = self.settings.max_length
                    written = write_captions(self.decoder, captions.tokenizer, memory, GREEDY, limit=limit)
                    texts = [captions.tokenizer.decode(best.tokens) for best, *_ in written]
                    found |= dict(zip(each["indices"].tolist(), texts, strict=True))
        gathered = {index: text for part in self.ranks.all_gather_objects(found) for index, text in part.items()}
        if not gathered:
            return {}
        order = sorted(gathered)
        scores = score_captions([gathered[index] for index in order], [data.captions[index] for index in order])
        return {"exact": scores.exact, **({} if scores.bleu is None else {"bleu": scores.bleu})}

    def write_result(self, model: nn.Module, folder: Path, **options: Any) -> None:
        """Write `encoder/` and `decoder/`, each a normal model folder."""
        assert isinstance(model, CaptionModel)
        write_caption_model(model, folder, **options)


def freeze_unused_weights(encoder: ImageModel) -> None:
    """Freeze what the tokens do not depend on, such as the pooling: several processes would wait for its gradients."""
    device, (rows, columns) = next(encoder.parameters()).device, pair(encoder.config.image_size)
    trained = [weight for weight in encoder.parameters() if weight.requires_grad]
    with temporary_eval_mode(encoder), torch.enable_grad():
        tokens = encoder.tokens(torch.zeros(1, encoder.config.channels, rows, columns, device=device))
        gradients = torch.autograd.grad(tokens.sum(), trained, allow_unused=True)
    for weight, gradient in zip(trained, gradients, strict=True):
        weight.requires_grad_(gradient is not None)


def check_caption_source(source: Source, task: Task) -> CaptionSource:
    if not isinstance(source, CaptionSource):
        raise ConfigError(f"{type(task).__name__} trains on captions; expected images with captions, not {source.name}")
    return source


def build_caption(request: Request, context: BuildContext) -> TaskSetup:
    settings: CaptionSettings = parse_task_settings(TASK, request.recipe)
    recipe, data = request.recipe, request.open_captions()
    with context.progress(None, "tokenizer"):
        texts = (caption for captions in data.train.captions for caption in captions)
        tokenizer = open_tokenizer(settings.tokenizer, settings.vocabulary, texts)
    images = draw_if_generated(data.train.images)
    data = replace(data, train=replace(data.train, images=images))
    start = make_starting_model(request, DatasetSplits(name=data.name, train=images, val=None, classes=()))
    task = CaptionTask(start.model, create_decoder(settings, start.model, tokenizer), settings)
    source = CaptionSource.encode(
        data,
        tokenizer,
        max_length=settings.max_length,
        limit=task.decoder.length_limit,
        preprocessing=start.preprocessing,
        augmentation=recipe.augmentation,
        batch=recipe.loop.batch,
        seed=recipe.loop.seed,
    )
    check_task(task, source, recipe, context.ranks)
    for note in source.notes:
        context.report(f"note   {note}")
    if settings.scored_images and not is_sacrebleu_installed():
        context.report(f"note   sacrebleu is not installed: no BLEU at the end; run: {format_install_command('text')}")
    name = recipe.model or start.family.name
    return TaskSetup(
        task=task,
        source=prepare_images(source, task, request, context),
        model_name=name,
        facts={"model": describe_parts(name, start, task.decoder)},
        write_options={"resampling": start.resampling, "family": start.family},
        started_from=start.started_from,
    )


def create_decoder(settings: CaptionSettings, encoder: ImageModel, tokenizer: TextTokenizer) -> TextModel:
    """A new decoder that reads the tokens of the encoder and writes those of the tokenizer."""
    family, preset = find_preset(settings.decoder)
    check_reads_text(family.build, settings.decoder)
    given = {"vocabulary": tokenizer.vocabulary, "pad": tokenizer.pad, "memory_width": encoder.levels[-1].width}
    decoder: Any = family.build(family.configure(preset, **given, **settings.decoder_fields))
    return decoder


def prepare_images(source: CaptionSource, task: CaptionTask, request: Request, context: BuildContext) -> CaptionSource:
    """The source with the tokens of a frozen encoder, or with the images in memory if they fit."""
    settings, how = task.settings, request.recipe.augmentation
    if settings.freeze_encoder and settings.cache_features and not context.dry_run:
        if replace(how, smoothing=0.0) != Augmentation():
            context.report("note   the images are augmented at random, so the tokens of the encoder are not cached")
        elif (found := add_features(source, task, context)) is not None:
            return found
        else:
            context.report("note   the tokens of the encoder cannot be kept on disk: it runs at every step")
    with context.progress(None, "decoding") as advance:
        data = keep_images_in_memory(source.data, request.cache * 1e9, lambda: advance(1))
    return replace(source, data=data)


def add_features(source: CaptionSource, task: CaptionTask, context: BuildContext) -> CaptionSource | None:
    """The source with the tokens of all its images; None if they cannot be kept."""
    data = keep_images_in_memory(source.data, 0)
    datasets = [data.train.images, *([data.val.images] if data.val else [])]
    with context.progress(sum(map(len, datasets)), "encoding") as advance:
        found = compute_encoder_features(
            task.backbone,
            source.preprocessing,
            datasets,
            device=context.device,
            ranks=context.ranks,
            progress=advance,
        )
    if found is None:
        return None
    gigabytes = sum(each.rows.nbytes for each in found) / 1e9
    context.report(f"note   the tokens of the encoder are kept in {found[0].folder}: {gigabytes:.2g} GB")
    return replace(source, data=data, train_features=found[0], val_features=found[1] if data.val else None)


def describe_parts(name: str, start: StartingModel, decoder: TextModel) -> dict[str, Any]:
    """The encoder and the decoder for run.json."""
    facts = {
        "name": name,
        "family": start.family.name,
        "config": asdict(start.model.config),
        "preprocessing": asdict(start.preprocessing),
        "decoder": asdict(decoder.config),
    }
    return json.loads(json.dumps(facts))  # tuples as lists, as read from a file


TASK = TaskKind(name="caption", settings=CaptionSettings, build=build_caption, needs_classes=False)
