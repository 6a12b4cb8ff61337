"""A toy captioner: a few collages, a tiny ViT and a tiny decoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.checkpoint.writing import write_caption_model
from vitrail.data.captions.captions import CaptionedImages, CaptionSplits, open_collages
from vitrail.data.captions.collages import COLLAGE_SIDE, CollageImages
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.models.text.caption_model import CaptionModel
from vitrail.opening import Opened, open_model
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.recipes.task_settings import CaptionSettings
from vitrail.tasks.caption import CaptionTask, create_decoder
from vitrail.tasks.caption_source import CaptionSource

WIDTH = 16
HOW = Preprocessing(image_size=COLLAGE_SIDE, crop=1.0, mean=(0.5,), std=(0.5,))
RECIPE = Recipe(
    loop=LoopSettings(epochs=2, batch=8),
    optimization=OptimizationSettings(lr=3e-3, warmup=0.5),
)
SETTINGS = CaptionSettings(
    decoder_width=WIDTH,
    decoder_depth=2,
    decoder_heads=2,
    decoder_mlp_width=32,
    decoder_dropout=0.0,
    vocabulary=200,
    scored_images=6,
)


def make_captions(train: int = 24, val: int = 10) -> CaptionSplits:
    """Collages; every second training image has two captions."""
    parts = open_collages(CollageImages("train", count=train)), open_collages(CollageImages("val", count=val))
    captions = tuple(each * (1 + number % 2) for number, each in enumerate(parts[0].captions))
    return CaptionSplits(name="toy", train=replace(parts[0], captions=captions), val=parts[1])


def list_texts(data: CaptionedImages) -> list[str]:
    return [caption for captions in data.captions for caption in captions]


def make_tokenizer() -> TextTokenizer:
    return TextTokenizer.train_bpe(CollageImages("train", count=400).list_sentences(), 200)


def make_encoder(**fields: Any) -> Any:
    given = {"depth": 1, "width": WIDTH, "heads": 2, "mlp_width": 32, "classes": 0, **fields}
    return vitrail.create("vit_tiny_patch16_224", image_size=COLLAGE_SIDE, patch_size=14, channels=1, **given)


def make_caption_task(fields: dict[str, Any] | None = None, **settings: Any) -> CaptionTask:
    torch.manual_seed(3)
    chosen = replace(SETTINGS, **settings)
    encoder = make_encoder(**(fields or {}))
    return CaptionTask(encoder, create_decoder(chosen, encoder, make_tokenizer()), chosen)


def make_caption_source(recipe: Recipe = RECIPE, data: CaptionSplits | None = None) -> CaptionSource:
    return CaptionSource.encode(
        data or make_captions(),
        make_tokenizer(),
        max_length=20,
        limit=None,
        preprocessing=HOW,
        augmentation=recipe.augmentation,
        batch=recipe.loop.batch,
        seed=recipe.loop.seed,
    )


def write_toy_captioner(folder: Path) -> Path:
    """A captioner with random weights, as a run writes it."""
    task = make_caption_task()
    model = CaptionModel(task.backbone, task.decoder)
    write_caption_model(model, folder, preprocessing=HOW, tokenizer=make_tokenizer().to_json())
    return folder


def open_toy_captioner(folder: Path) -> Opened:
    return open_model(write_toy_captioner(folder), kind="caption")
