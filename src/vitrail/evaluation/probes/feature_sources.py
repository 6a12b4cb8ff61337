"""What turns images into features: a model, the same model untrained, or the pixels themselves.

B batch, C channels, N tokens, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.base.errors import ConfigError, VitrailError
from vitrail.checkpoint.checksums import LIBRARIES, checksum_tensors
from vitrail.data.images.augment.augmentations import normalize
from vitrail.data.images.datasets import ImageDataset
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.export.agreement import make_photo_crops
from vitrail.export.exported_model import ExportedModel
from vitrail.export.torch_modules import ExportedModule
from vitrail.models.base.checks import find_image_config, pair
from vitrail.models.base.contract import ImageModel, check_reads_images, find_image_model
from vitrail.opening import Opened
from vitrail.predict.engine_selection import EngineChoice, EngineOptions, choose_engine_for_dataset
from vitrail.predict.pipeline import Engine
from vitrail.predict.predictor import Predictor

UNTRAINED_SEED = 0
MAX_PIXEL_SIDE = 32  # larger images are averaged to at most this, so that raw pixels are at most 3,072 numbers
SourceKind = Literal["model", "pixels", "untrained"]


@dataclass(frozen=True, kw_only=True)
class FeatureSource:
    """Normalized images (B, C, H, W) → features (B, D)."""

    name: str
    kind: SourceKind
    preprocessing: Preprocessing
    compute: Callable[[Tensor], Tensor]
    digest: str | None  # of everything that the features of an image depend on; None if that is not known
    module: nn.Module | None = None  # moved to the device and put into eval mode
    opened: Opened | None = None  # the model, if an engine may compute the features
    engine: Engine | None = None  # which computes them in place of the module


def make_model_source(loaded: Opened, name: str, layer: str | int = "last") -> FeatureSource:
    """The features of a model: what its head reads, or the output of a block."""
    module = loaded.module
    check_reads_images(module)
    return FeatureSource(
        name=name,
        kind="model",
        preprocessing=loaded.preprocessing,
        compute=choose_features(loaded, module, name, layer),
        digest=compute_source_digest(module, loaded.preprocessing, layer),
        module=module,
        opened=loaded if layer == "last" else None,
    )


def make_untrained_source(loaded: Opened, name: str, layer: str | int = "last") -> FeatureSource | None:
    """The same architecture with the initial weights of seed 0; None for a model of another library or an export."""
    declared = find_image_model(loaded.module)
    if declared is None:
        return None
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(UNTRAINED_SEED)
        fresh = type(declared)(declared.config).to(next(declared.parameters()).dtype)
    unlike = Opened(source=name, model=fresh, preprocessing=loaded.preprocessing, classes=loaded.classes)
    return FeatureSource(
        name=name,
        kind="untrained",
        preprocessing=loaded.preprocessing,
        compute=choose_features(unlike, fresh, name, layer),
        digest=compute_source_digest(fresh, loaded.preprocessing, layer),
        module=fresh,
        opened=unlike if layer == "last" else None,
    )


def make_pixel_source(preprocessing: Preprocessing, name: str) -> FeatureSource:
    """The normalized pixels of the model's input, averaged to at most MAX_PIXEL_SIDE rows and columns."""
    return FeatureSource(
        name=name,
        kind="pixels",
        preprocessing=preprocessing,
        compute=partial(flatten_pixels, factor=find_pixel_factor(preprocessing)),
        digest=f"pixels {MAX_PIXEL_SIDE} {preprocessing}",
    )


def find_pixel_factor(preprocessing: Preprocessing) -> int:
    """How many pixels are averaged per row and per column."""
    return -(-max(pair(preprocessing.image_size)) // MAX_PIXEL_SIDE)


def flatten_pixels(images: Tensor, factor: int) -> Tensor:
    return (F.avg_pool2d(images, factor, ceil_mode=True) if factor > 1 else images).flatten(1)


def compute_source_digest(module: nn.Module, preprocessing: Preprocessing, layer: str | int) -> str | None:
    """Digest of weights, architecture and input; None for code of the user, which may change with equal weights."""
    known = find_image_model(module) is not None and all(
        type(part).__module__.partition(".")[0] in LIBRARIES for part in module.modules()
    )
    if isinstance(module, ExportedModule):
        known = bool(module.exported.description.files)  # checksums, which a file without its description has not
    if not known:
        return None
    config: Any = module.config
    return checksum_tensors(module.state_dict(), repr(module), repr(config), repr(preprocessing), str(layer))


def choose_features(loaded: Opened, module: nn.Module, name: str, layer: str | int) -> Callable[[Tensor], Tensor]:
    """The function that computes the features of a model; an error if it has none, or no such layer."""
    declared = find_image_model(module)
    if layer != "last":
        if declared is None:
            raise ConfigError(f"{name} has no blocks that can be accessed, so `layer` {layer} does not exist; use last")
        return partial(compute_block_features, declared, find_block(declared, name, layer))
    if isinstance(loaded.model, ExportedModel):
        output = loaded.model.description.output
        if output not in ("class", "mean"):
            raise ConfigError(
                f"{name} was exported with {output}; expected features: export it with `features` class or mean, or "
                "use its checkpoint"
            )
        return module
    if not loaded.classes:
        return module
    if declared is not None:
        return partial(compute_head_inputs, declared, tuple(module for _, module in declared.classifiers))
    layers = [(key, part) for key, part in module.named_modules() if isinstance(part, nn.Linear)]
    heads = [key for key, part in layers if part.out_features == loaded.classes]
    if not heads:
        raise ConfigError(f"{name} has no linear layer of {loaded.classes} outputs; expected one, whose input is used")
    return partial(compute_head_inputs, module, (heads[-1],))


def find_block(model: ImageModel, name: str, layer: str | int) -> str:
    """The name of a block in the module, by number or `middle`."""
    if model.no_tokens_reason:
        raise ConfigError(f"`layer` is {layer}; expected last for {name}: {model.no_tokens_reason}")
    blocks = [block for level in model.levels for block in level.blocks]
    if layer == "middle" and blocks:
        return blocks[(len(blocks) - 1) // 2]
    if not isinstance(layer, int) or not -len(blocks) <= layer < len(blocks):
        raise ConfigError(
            f"`layer` is {layer}; expected middle, last, or the number of one of the {len(blocks)} blocks of {name}, "
            f"from 0 to {len(blocks) - 1}"
        )
    return blocks[layer]


def compute_head_inputs(model: nn.Module, heads: tuple[str, ...], images: Tensor) -> Tensor:
    """The input of the head, or the mean of the inputs of several heads: (B, D)."""
    captured = list[Tensor]()
    with ExitStack() as hooks:
        for head in heads:
            part = model.get_submodule(head)
            hooks.enter_context(part.register_forward_pre_hook(lambda _, given: captured.append(given[0])))
        model(images)
    return torch.stack([each.flatten(1, -2).mean(1) if each.ndim > 2 else each for each in captured]).mean(0)


def compute_block_features(model: ImageModel, block: str, images: Tensor) -> Tensor:
    """The output of a block without the final norm: the tokens that the head reads, else the mean of the patches."""
    captured = list[Tensor]()

    def leave(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        captured.append(output)

    with model.get_submodule(block).register_forward_hook(leave):
        model(images)
    output = captured[-1]
    if output.ndim == 4:  # a map of a convnet (B, D, h, w)
        return output.mean((2, 3))
    level = next(level for level in model.levels if block in level.blocks)
    patches = (images.shape[2] // level.stride[0]) * (images.shape[3] // level.stride[1])
    read = [model.prefix_tokens.index(token) for token in model.classifier_tokens]
    if read and output.shape[1] != patches:  # the class token may join after this block
        return output[:, read].mean(1)
    return output[:, max(output.shape[1] - patches, 0) :].mean(1)


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
