"""The linear probe against scikit-learn, and how its weight decay is chosen."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.evaluation.probes import linear_probe
from vitrail.evaluation.probes.linear_probe import StandardisedRows, fit_linear_probe, hold_out

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 200)
FEATURES = (5 + RNG.normal(size=(200, 8)) * np.arange(1, 9) + 3 * np.eye(3, 8)[LABELS]).astype(np.float32)


def test_the_solution_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = pytest.importorskip("sklearn.linear_model", reason="needs scikit-learn")
    found = fit_linear_probe(FEATURES, LABELS, classes=3, weight_decays=(0.01,))
    x = (FEATURES - FEATURES.mean(0)) / (FEATURES.std(0) + 1e-5)
    peer = peers.LogisticRegression(C=1 / (0.01 * len(x)), max_iter=1000, tol=1e-8).fit(x, LABELS)
    torch.testing.assert_close(found.weight.double(), torch.from_numpy(peer.coef_).double(), rtol=0, atol=2e-2)
    assert (found.predict(FEATURES) == peer.predict(x)).mean() > 0.98
    monkeypatch.setattr(linear_probe, "MAX_BYTES_IN_MEMORY", 0)  # read from the file in every iteration
    streamed = fit_linear_probe(FEATURES, LABELS, classes=3, weight_decays=(0.01,))
    torch.testing.assert_close(streamed.weight, found.weight, rtol=0, atol=1e-3)
    assert StandardisedRows(FEATURES, LABELS).stored is None


def test_the_weight_decay_is_chosen_on_held_out_training_images(tmp_path: Path) -> None:
    mask = hold_out(LABELS, 3, seed=0)
    for label in range(3):
        own = np.flatnonzero(np.equal(LABELS, label))
        assert int(mask[torch.from_numpy(own)].sum()) == round(0.2 * len(own))
    assert not hold_out(np.array([0, 1, 1]), 3, seed=0)[0]  # a class of one image stays in training
    path = tmp_path / "features.npy"
    noise = RNG.normal(size=(60, 200)).astype(np.float32)  # more columns than images: a strong decay is better
    np.save(path, noise + 0.5 * np.eye(2, 200, dtype=np.float32)[np.arange(60) % 2])
    found = fit_linear_probe(
        np.load(path, mmap_mode="r"), np.arange(60) % 2, classes=2, weight_decays=(1e-6, 1.0, 30.0)
    )
    assert found.weight_decay in (1.0, 30.0)
    assert 0 < found.held_out_accuracy < 1
