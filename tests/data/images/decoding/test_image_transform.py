"""A loaded model's transform works as torchvision's do, also in the workers of a data loader."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.toy_datasets import write_class_folders
from support.toy_exports import ExportFinder, make_toy_model
from torch.utils.data import DataLoader

import vitrail
from vitrail.base.errors import DataError
from vitrail.data.images.decoding.model_input import ImageTransform
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.data.photos import list_example_photos


@pytest.mark.parametrize("crop", [0.875, 0.9, 1.0])
def test_it_equals_timms_evaluation_transform(crop: float) -> None:
    pytest.importorskip("timm")
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform

    how = Preprocessing(image_size=96, crop=crop, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    config = {"input_size": (3, 96, 96), "crop_pct": crop, "mean": how.mean, "std": how.std, "interpolation": "bicubic"}
    make: Any = create_transform
    theirs: Any = make(**resolve_data_config(config))
    for path in list_example_photos():
        difference = ImageTransform(how, torch.float32)(path) - theirs(Image.open(path).convert("RGB"))
        assert difference.abs().max() < 1e-6


def test_it_works_in_an_image_folder_and_pickles_without_the_model(tmp_path: Path) -> None:
    folders: Any = pytest.importorskip("torchvision.datasets")
    write_class_folders(tmp_path, ants=3, bees=2)
    loaded = vitrail.open_model(make_toy_model("vit"), preprocessing=Preprocessing())
    assert len(pickle.dumps(loaded.transform)) < 1000
    dataset = folders.ImageFolder(tmp_path, transform=loaded.transform)
    ((images, labels),) = DataLoader[Any](dataset, batch_size=5, num_workers=1)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(images, loaded.make_batch([path for path, _ in dataset.samples]))
    assert loaded.module(images).shape == (5, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_is_on_the_cpu_in_the_models_dtype(dtype: torch.dtype) -> None:
    loaded = vitrail.open_model(make_toy_model("vit").to(dtype), preprocessing=Preprocessing(crop=0.7))
    found = loaded.transform("example:coffee")
    photo = Image.open(next(path for path in list_example_photos() if path.stem == "coffee"))
    expected = preprocess_image(photo, loaded.preprocessing)
    assert (found.dtype, found.device.type, found.shape) == (dtype, "cpu", (3, 48, 32))
    assert torch.equal(found, torch.from_numpy(expected).to(dtype))


def test_an_exported_model_gets_pixels(exported: ExportFinder) -> None:
    found = vitrail.open_model(exported("onnx"), threads=1).transform("example:cat")
    assert (found.dtype, found.shape) == (np.uint8, (48, 32, 3))


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    for name in ("none.jpg", "bad.jpg"):
        with pytest.raises(DataError, match=rf"'.*{name}'"):
            ImageTransform(Preprocessing(), torch.float32)(tmp_path / name)
    with pytest.raises(DataError, match="the image is a int; expected a path"):
        ImageTransform(Preprocessing(), torch.float32)(7)
