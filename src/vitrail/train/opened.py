"""A trained model by whatever name people have for it: a run, a checkpoint of any layout, or one of timm's."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from torch import nn

from vitrail.checkpoint.reading import read, warn_about_report
from vitrail.checkpoint.run_files import FinishedRun, find_finished_run
from vitrail.data.datasets import DatasetSplits, ImageDataset, open_data
from vitrail.data.preprocessing import PILLOW_FILTERS, Preprocessing
from vitrail.errors import CheckpointError, ConfigError, DataError, describe_error

TIMM_PREFIX = "timm:"
TIMM_REGISTRY_NAME = re.compile(
    r"[\w.]+"
)  # a name in timm's registry: not hf-hub:… or local-dir:…, which load other files


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that answers, and all that must be known to ask it."""

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    classes: int
    labels: tuple[str, ...] | None = None
    run: FinishedRun | None = None  # that it came out of


def open_model(name: str, **fields: Any) -> LoadedModel:
    """`name` is the folder of a run, anything that `vitrail.load` takes, or timm:NAME, which timm makes and fetches.

    Fields that a file does not specify, such as heads, may be given.
    """
    if name.startswith(TIMM_PREFIX):
        if fields:
            raise ConfigError(f"{min(fields)} was given for {name}, which timm builds; expected no config fields")
        return open_timm_model(name.removeprefix(TIMM_PREFIX))
    run = find_finished_run(Path(name))
    found = read(name if run is None else run.model, **fields)
    warn_about_report(found, name)
    config, about = found.model.config, found.description
    how = about.preprocessing
    if how is None:
        grey = (0.5,) * config.channels
        how = Preprocessing(image_size=config.image_size, mean=grey, std=grey)
        warnings.warn(f"{name} does not say how it sees pictures: taken as {how}", stacklevel=2)
    if not getattr(config, "dynamic", False):
        how = replace(how, image_size=config.image_size)
    return LoadedModel(
        name=name, model=found.model, preprocessing=how, classes=config.classes, labels=about.labels, run=run
    )


def check_teacher_is_trusted(name: str, code: Sequence[str], where: str) -> list[str]:
    """A file may name models in timm's registry; others only the user may name. Returns the rest of `code`."""
    if (
        name.startswith(TIMM_PREFIX)
        and not TIMM_REGISTRY_NAME.fullmatch(name.removeprefix(TIMM_PREFIX))
        and name not in code
    ):
        raise ConfigError(
            f"{where} names the teacher {name!r}, which timm would load from outside its registry; it is opened only "
            f"if you name it: if you trust it, add --trust-code {quote(name)}"
        )
    return [each for each in code if each != name]


def open_timm_model(name: str) -> LoadedModel:
    try:
        import timm
    except ImportError:
        raise ConfigError(f"{TIMM_PREFIX}{name} needs timm; expected it installed: pip install timm") from None
    except Exception as error:  # a torchvision that does not fit torch is a RuntimeError, for one
        raise ConfigError(
            f"{TIMM_PREFIX}{name}: timm cannot be imported: {describe_error(error)}; expected it to work"
        ) from None
    try:
        model: Any = timm.create_model(name, pretrained=True)
    except Exception as error:  # unknown, not to be fetched, damaged: timm has a kind of error for each
        raise CheckpointError(
            f"timm cannot open {name!r}: {describe_error(error)}; expected a name of timm's with weights"
        ) from None
    about: Mapping[str, Any] = model.pretrained_cfg
    filter_ = about.get("interpolation")
    how = Preprocessing(
        image_size=tuple(about["input_size"][1:]),
        crop=float(about.get("crop_pct") or 1.0),
        interpolation=filter_ if filter_ in PILLOW_FILTERS else "bicubic",  # "random", of some in training
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
    )
    labels = about.get("label_names")
    return LoadedModel(
        name=f"{TIMM_PREFIX}{name}",
        model=model.eval(),
        preprocessing=how,
        classes=int(model.num_classes),
        labels=tuple(labels) if labels else None,
    )


def open_evaluation_data(data: str | None, real: Path | None, run: FinishedRun | None) -> DatasetSplits:
    """The data asked for, else the run's; split as the run split it, if it is the run's, else not at all."""
    where = data or (run.data if run else None)
    if where is None:
        raise ConfigError("no --data; expected fashion, or a folder of pictures: val/CLASS/*.jpg or CLASS/*.jpg")
    if run is not None and is_same_data_path(run.data, where):
        return open_data(where, seed=run.seed, val_share=run.val_share, real=real)
    return open_data(where, val_share=1.0, real=real)


def is_same_data_path(data: str | None, other: str) -> bool:
    """One folder may be written in many ways."""
    return data is not None and Path(data).resolve() == Path(other).resolve()


def get_validation_images(data: DatasetSplits) -> ImageDataset:
    if data.val is None or not len(data.val):
        raise DataError(f"{data.name} has no validation pictures; expected some, say in val/CLASS/")
    return data.val
