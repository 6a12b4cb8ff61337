"""Few-shot least squares against scikit-learn."""

import numpy as np
import pytest
import torch

from vitrail.evaluation.feature_rows import compute_mean_and_std
from vitrail.evaluation.probes.few_shot import classify_by_least_squares, measure_few_shot, permute_classes

RNG = np.random.default_rng(0)
CLASSES, WIDTH = 3, 10
LABELS = RNG.integers(0, CLASSES, 60)
FEATURES = (RNG.normal(size=(60, WIDTH)) * 3 + 5 + 2 * np.eye(CLASSES, WIDTH)[LABELS]).astype(np.float32)
QUERY_LABELS = RNG.integers(0, CLASSES, 40)
QUERIES = (RNG.normal(size=(40, WIDTH)) * 3 + 5 + 2 * np.eye(CLASSES, WIDTH)[QUERY_LABELS]).astype(np.float32)


def predict_with_scikit_learn(chosen: np.ndarray) -> np.ndarray:
    linear_model = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    features = FEATURES[chosen].astype(np.float64)
    some = features if len(chosen) >= 10 else FEATURES.astype(np.float64)
    mean, std = some.mean(0), some.std(0) + 1e-5

    def pad(x: np.ndarray) -> np.ndarray:
        return np.pad((x - mean) / std, ((0, 0), (0, 1)), constant_values=100.0)

    peer = linear_model.Ridge(alpha=1024, fit_intercept=False)
    peer.fit(pad(features), 2 * np.eye(CLASSES)[LABELS[chosen]] - 1)
    return peer.predict(pad(QUERIES)).argmax(-1)


@pytest.mark.parametrize("count", [2, 15])  # fewer and more images than columns
def test_predictions_are_those_of_scikit_learn(count: int) -> None:
    chosen = np.concatenate([each[:count] for each in permute_classes(LABELS, CLASSES, 0)])
    assert (len(chosen) >= WIDTH + 1) == (count == 15)
    few, known = torch.from_numpy(FEATURES[chosen]), compute_mean_and_std(FEATURES) if count == 2 else None
    found = classify_by_least_squares(few, LABELS[chosen], QUERIES, CLASSES, known)
    assert (found == predict_with_scikit_learn(chosen)).all()


def test_one_image_of_each_of_two_classes_tells_them_apart() -> None:
    """A fifth of the features differ by three standard deviations; standardised by the two images, 58% are right."""
    labels = np.arange(200) % 2
    features = np.random.default_rng(0).normal(size=(200, 100)).astype(np.float32)
    features[:, :20] += 3 * labels[:, None]
    found = measure_few_shot(features, labels, features, labels, classes=2, shots=(1,), seeds=range(20))
    assert np.mean(found[1]) > 0.9


def test_each_seed_draws_its_own_images_of_each_class() -> None:
    found = measure_few_shot(FEATURES, LABELS, QUERIES, QUERY_LABELS, classes=CLASSES, shots=(1, 15), seeds=range(3))
    assert [len(each) for each in found.values()] == [3, 3]
    for seed, accuracy in enumerate(found[15]):
        generator = np.random.default_rng(seed)  # one generator for all classes, as in big_vision
        chosen = np.concatenate([generator.permutation(np.where(label == LABELS)[0])[:15] for label in range(CLASSES)])
        assert accuracy == (predict_with_scikit_learn(chosen) == QUERY_LABELS).mean()
    assert len(set(found[1])) > 1, "the test can fail"
