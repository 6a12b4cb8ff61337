"""Run the sources of features on the fastest engine, where an engine computes what the head reads."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from vitrail.base.errors import VitrailError
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import ImageDataset
from vitrail.evaluation.probes.feature_sources import FeatureSource
from vitrail.export.agreement import make_photo_crops
from vitrail.models.base.checks import find_image_config
from vitrail.predict.engine_selection import EngineChoice, EngineOptions, choose_engine_for_dataset
from vitrail.predict.predictor import Predictor

CHECKED_IMAGES = 2
MAX_DIFFERENCE = 1e-4  # relative to the largest feature


def choose_source_engine(
    source: FeatureSource, dataset: ImageDataset, options: EngineOptions, known: dict[str, EngineChoice]
) -> tuple[FeatureSource, Sequence[str]]:
    """The source on the fastest engine, and notes; an untrained model runs on the engine that its architecture has."""
    if source.opened is None or not has_engine(source):
        return source, ()
    architecture = repr(find_image_config(source.module))
    if source.kind == "untrained":
        if architecture not in known:
            return source, ()
        engine = known[architecture].predictor.engine
        options = replace(
            options, engine=engine.name, exact=False, fast=False, streams=engine.streams, threads=engine.threads
        )
    found = choose_engine_for_dataset(source.opened, dataset, replace(options, output="features"))
    if found is None:
        return source, ()
    known.setdefault(architecture, found)
    engine = found.predictor.engine
    digest = source.digest if engine.exact or source.digest is None else f"{source.digest} {engine.name}"
    return replace(source, engine=engine, digest=digest), [f"{source.name}: {note}" for note in found.notes]


def has_engine(source: FeatureSource) -> bool:
    """Whether an engine returns the same features as the source: not those of some heads and of convnets."""
    assert source.opened is not None
    pixels = make_photo_crops(CHECKED_IMAGES, source.preprocessing)
    images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), source.preprocessing)
    with suppress(VitrailError), torch.inference_mode():
        found = Predictor(source.opened, output="features").engine.run(pixels)
        dtype = torch.float32 if source.module is None else next(source.module.parameters()).dtype
        expected = source.compute(images.to(dtype)).float().numpy()
        return found.shape == expected.shape and bool(
            np.abs(found - expected).max() <= MAX_DIFFERENCE * np.abs(expected).max()
        )
    return False
