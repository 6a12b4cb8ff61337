"""k-NN, few-shot least squares and the linear probe against scikit-learn; rows that are read in parts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.evaluation.probes import feature_measures
from vitrail.evaluation.probes.feature_measures import (
    FeatureRows,
    SelectedRows,
    StandardizedRows,
    classify_by_least_squares,
    classify_by_neighbors,
    compute_mean_and_std,
    find_most_similar_rows,
    fit_linear_probe,
    hold_out,
    iterate_rows,
    measure_few_shot,
    permute_classes,
    select_rows,
)

GENERATOR = torch.Generator().manual_seed(0)
BANK_LABELS = torch.randint(4, (300,), generator=GENERATOR)
BANK = torch.randn(300, 12, generator=GENERATOR) + 2 * torch.eye(4, 12)[BANK_LABELS]
BANK_QUERIES = torch.randn(90, 12, generator=GENERATOR)
COUNTS = (20, 1, 7, 100)
RNG = np.random.default_rng(0)
CLASSES, WIDTH = 3, 10
LABELS = RNG.integers(0, CLASSES, 60)
FEATURES = (RNG.normal(size=(60, WIDTH)) * 3 + 5 + 2 * np.eye(CLASSES, WIDTH)[LABELS]).astype(np.float32)
QUERY_LABELS = RNG.integers(0, CLASSES, 40)
QUERIES = (RNG.normal(size=(40, WIDTH)) * 3 + 5 + 2 * np.eye(CLASSES, WIDTH)[QUERY_LABELS]).astype(np.float32)
LINEAR_RNG = np.random.default_rng(0)
LINEAR_LABELS = LINEAR_RNG.integers(0, 3, 200)
LINEAR_FEATURES = (5 + LINEAR_RNG.normal(size=(200, 8)) * np.arange(1, 9) + 3 * np.eye(3, 8)[LINEAR_LABELS]).astype(
    np.float32
)


def test_votes_are_those_of_scikit_learn() -> None:
    neighbors: Any = pytest.importorskip("sklearn.neighbors", reason="needs scikit-learn")

    def vote(distances: NDArray[Any]) -> NDArray[Any]:
        return np.exp((1 - distances) / 0.07)

    found = classify_by_neighbors(BANK, BANK_LABELS, BANK_QUERIES, counts=COUNTS)
    assert tuple(found) == COUNTS
    for count in COUNTS:
        peer = neighbors.KNeighborsClassifier(count, metric="cosine", algorithm="brute", weights=vote)
        assert (found[count].numpy() == peer.fit(BANK.numpy(), BANK_LABELS.numpy()).predict(BANK_QUERIES.numpy())).all()
    assert not torch.equal(found[1], found[100]), "the test can fail"


@pytest.mark.parametrize("rows_at_once", [1, 7, 128, 300])
def test_a_bank_on_disk_is_read_in_parts(rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "bank.npy", BANK.numpy())
    bank = np.load(tmp_path / "bank.npy", mmap_mode="r")
    monkeypatch.setattr(feature_measures, "KNN_QUERIES_AT_ONCE", 40)
    read = list[int]()
    inner = feature_measures.read_rows

    def note(rows: FeatureRows, start: int, stop: int) -> torch.Tensor:
        part = inner(rows, start, stop)
        read.append(len(part))
        return part

    monkeypatch.setattr(feature_measures, "read_rows", note)
    similarities, places = find_most_similar_rows(bank, BANK_QUERIES, 20, rows_at_once)
    assert sum(read) == 300
    assert max(read) == rows_at_once
    expected, order = (torch.nn.functional.normalize(BANK_QUERIES) @ torch.nn.functional.normalize(BANK).T).sort(
        descending=True
    )
    torch.testing.assert_close(similarities, expected[:, :20], rtol=0, atol=1e-6)
    assert torch.equal(places, order[:, :20])
    once = classify_by_neighbors(BANK, BANK_LABELS, BANK_QUERIES, counts=COUNTS)
    for count, votes in classify_by_neighbors(
        bank, BANK_LABELS, BANK_QUERIES, counts=COUNTS, rows_at_once=rows_at_once
    ).items():
        assert torch.equal(votes, once[count])


def test_more_neighbors_than_rows_are_all_rows() -> None:
    found = classify_by_neighbors(BANK[:5], BANK_LABELS[:5], BANK_QUERIES, counts=(5, 50))
    assert torch.equal(found[5], found[50])


def test_wide_rows_are_read_in_smaller_parts() -> None:
    assert feature_measures.count_rows_at_once(384) == 65536
    assert feature_measures.count_rows_at_once(3072) * 3072 * 4 <= 2**27
    assert feature_measures.count_rows_at_once(2**40) == 1


def test_selected_rows_are_read_when_they_are_used() -> None:
    rows, indices = np.arange(40, dtype=np.float32).reshape(10, 4), np.array([0, 2, 3, 9])
    some = SelectedRows(rows, indices)
    assert (len(some), some.shape) == (4, (4, 4))
    assert np.array_equal(torch.cat([*iterate_rows(some, 3)]).numpy(), rows[indices])
    assert np.array_equal(select_rows(some, np.array([3, 0])).numpy(), rows[[9, 0]])


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
def test_few_shot_predictions_are_those_of_scikit_learn(count: int) -> None:
    chosen = np.concatenate([each[:count] for each in permute_classes(LABELS, CLASSES, 0)])
    assert (len(chosen) >= WIDTH + 1) == (count == 15)
    few, known = torch.from_numpy(FEATURES[chosen]), compute_mean_and_std(FEATURES) if count == 2 else None
    found = classify_by_least_squares(few, LABELS[chosen], QUERIES, CLASSES, known)
    assert (found == predict_with_scikit_learn(chosen)).all()


def test_one_image_of_each_of_two_classes_tells_them_apart() -> None:
    """A fifth of the features differ by three standard deviations; standardized by the two images, 58% are right."""
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


def test_the_linear_solution_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    found = fit_linear_probe(LINEAR_FEATURES, LINEAR_LABELS, classes=3, weight_decays=(0.01,))
    x = (LINEAR_FEATURES - LINEAR_FEATURES.mean(0)) / (LINEAR_FEATURES.std(0) + 1e-5)
    peer = peers.LogisticRegression(C=1 / (0.01 * len(x)), max_iter=1000, tol=1e-8).fit(x, LINEAR_LABELS)
    torch.testing.assert_close(found.weight.double(), torch.from_numpy(peer.coef_).double(), rtol=0, atol=2e-2)
    assert (found.predict(LINEAR_FEATURES) == peer.predict(x)).mean() > 0.98
    monkeypatch.setattr(feature_measures, "MAX_BYTES_IN_MEMORY", 0)  # read from the file in every iteration
    streamed = fit_linear_probe(LINEAR_FEATURES, LINEAR_LABELS, classes=3, weight_decays=(0.01,))
    torch.testing.assert_close(streamed.weight, found.weight, rtol=0, atol=1e-3)
    assert StandardizedRows(LINEAR_FEATURES, LINEAR_LABELS).stored is None


def test_the_weight_decay_is_chosen_on_held_out_training_images(tmp_path: Path) -> None:
    mask = hold_out(LINEAR_LABELS, 3, seed=0)
    for label in range(3):
        own = np.flatnonzero(np.equal(LINEAR_LABELS, label))
        assert int(mask[torch.from_numpy(own)].sum()) == round(0.2 * len(own))
    assert not hold_out(np.array([0, 1, 1]), 3, seed=0)[0]  # a class of one image stays in training
    path = tmp_path / "features.npy"
    noise = LINEAR_RNG.normal(size=(60, 200)).astype(np.float32)  # more columns than images: a strong decay is better
    np.save(path, noise + 0.5 * np.eye(2, 200, dtype=np.float32)[np.arange(60) % 2])
    found = fit_linear_probe(
        np.load(path, mmap_mode="r"), np.arange(60) % 2, classes=2, weight_decays=(1e-6, 1.0, 30.0)
    )
    assert found.weight_decay in (1.0, 30.0)
    assert 0 < found.held_out_accuracy < 1
