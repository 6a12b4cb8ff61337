"""The images that a model is evaluated on: the validation part of the data, for a run those it was not trained on."""

from pathlib import Path

from vitrail.checkpoint.run_files import FinishedRun
from vitrail.data.datasets import DatasetSplits, ImageDataset, open_data
from vitrail.errors import ConfigError, DataError


def open_evaluation_data(data: str | None, real: Path | None, run: FinishedRun | None) -> DatasetSplits:
    """Open `data`, by default that of the run. The run's own data is split as in training, other data is not."""
    where = data or (run.data if run else None)
    if where is None:
        raise ConfigError(
            "no `data`; expected fashion, or a folder of images: val/CLASS/*.jpg or CLASS/*.jpg", ("data",)
        )
    if run is not None and is_same_data_path(run.data, where):
        return open_data(where, seed=run.seed, val_share=run.val_share, real=real)
    return open_data(where, val_share=1.0, real=real)


def is_same_data_path(data: str | None, other: str) -> bool:
    """Whether two paths mean the same folder."""
    return data is not None and Path(data).resolve() == Path(other).resolve()


def get_validation_images(data: DatasetSplits) -> ImageDataset:
    if data.val is None or not len(data.val):
        raise DataError(f"{data.name} has no validation images; expected some, for instance in val/CLASS/")
    return data.val
