"""Images in memory."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_datasets import random_array

from vitrail.base.errors import DataError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import open_data


def test_images_labels_and_names() -> None:
    images = random_array(3, 4, 5, 3)
    arrays = ArrayDataset(images, [1, 0, 1], ["cat", "dog"], "toys")
    assert len(arrays) == 3
    assert arrays.classes == ("cat", "dog")
    assert np.array_equal(arrays.source(1), images[1])
    assert (arrays.label(0), arrays.name(2), arrays.real_labels(0)) == (1, "image 2 of toys", None)
    image, label = arrays[2]
    assert np.array_equal(np.asarray(image), images[2])
    assert label == 1
    assert pickle.loads(pickle.dumps(arrays)).label(1) == 0


def test_gray_images_get_a_channel_and_are_writable() -> None:
    values = np.frombuffer(random_array(2, 4, 4).tobytes(), np.uint8).reshape(
        2, 4, 4
    )  # read-only, of which torch would warn
    arrays = ArrayDataset(values, np.array([0, 0], np.uint8), ["one"])
    assert arrays.images.shape == (2, 4, 4, 1)
    assert torch.from_numpy(arrays.images).shape == (2, 4, 4, 1)


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (np.zeros((2, 4, 4, 3)), [0, 1], "toys: images of float64 (2, 4, 4, 3); expected uint8"),
        (random_array(2, 3, 4, 4), [0, 1], "toys: images of uint8 (2, 3, 4, 4); expected"),
        (random_array(2, 0, 4, 3), [0, 1], "expected uint8 (images, rows, columns, 1 or 3)"),
        (random_array(2, 4, 4, 3), [0], "toys: 2 images and 1 labels; expected"),
        (random_array(2, 4, 4, 3), [0, 2], "toys: label 2 of image 1; expected 0 to 1"),
        (random_array(2, 4, 4, 3), [-1, 0], "toys: label -1 of image 0; expected 0 to 1"),
        (random_array(2, 4, 4, 3), [0.5, 1.0], "labels of float64 (2,); expected whole numbers"),
        (random_array(2, 4, 4, 3), [[0], [1, 1]], "expected whole numbers, one per image"),
    ],
)
def test_invalid_arrays_and_labels_are_refused(images: Any, labels: Any, expected: str) -> None:
    with pytest.raises(DataError, match=re.escape(expected)):
        ArrayDataset(images, labels, ["cat", "dog"], "toys")


def test_arrays_without_classes() -> None:
    data = open_data(ArrayDataset(random_array(10, 4, 4, 3), None, ()))
    assert (data.classes, len(data.train or ()), len(data.val or ())) == ((), 8, 2)
    assert data.train is not None
    assert data.train.label(0) == -1
    with pytest.raises(DataError, match="label 0 of image 0; expected -1"):
        ArrayDataset(random_array(1, 4, 4, 3), [0], ())
