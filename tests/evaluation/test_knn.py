"""k-NN against scikit-learn, and a bank that is read in parts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitrail.evaluation import feature_rows, knn
from vitrail.evaluation.feature_rows import FeatureRows
from vitrail.evaluation.knn import classify_by_neighbours, find_neighbours

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(4, (300,), generator=GENERATOR)
BANK = torch.randn(300, 12, generator=GENERATOR) + 2 * torch.eye(4, 12)[LABELS]
QUERIES = torch.randn(90, 12, generator=GENERATOR)
COUNTS = (20, 1, 7, 100)


def test_votes_are_those_of_scikit_learn() -> None:
    neighbors: Any = pytest.importorskip("sklearn.neighbors", reason="needs scikit-learn")

    def vote(distances: NDArray[Any]) -> NDArray[Any]:
        return np.exp((1 - distances) / 0.07)

    found = classify_by_neighbours(BANK, LABELS, QUERIES, counts=COUNTS)
    assert tuple(found) == COUNTS
    for count in COUNTS:
        peer = neighbors.KNeighborsClassifier(count, metric="cosine", algorithm="brute", weights=vote)
        assert (found[count].numpy() == peer.fit(BANK.numpy(), LABELS.numpy()).predict(QUERIES.numpy())).all()
    assert not torch.equal(found[1], found[100]), "the test can fail"


@pytest.mark.parametrize("rows_at_once", [1, 7, 128, 300])
def test_a_bank_on_disk_is_read_in_parts(rows_at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "bank.npy", BANK.numpy())
    bank = np.load(tmp_path / "bank.npy", mmap_mode="r")
    monkeypatch.setattr(knn, "QUERIES_AT_ONCE", 40)
    read = list[int]()
    inner = feature_rows.read_rows

    def note(rows: FeatureRows, start: int, stop: int) -> torch.Tensor:
        part = inner(rows, start, stop)
        read.append(len(part))
        return part

    monkeypatch.setattr(feature_rows, "read_rows", note)
    similarities, places = find_neighbours(bank, QUERIES, 20, rows_at_once)
    assert sum(read) == 300
    assert max(read) == rows_at_once
    expected, order = (torch.nn.functional.normalize(QUERIES) @ torch.nn.functional.normalize(BANK).T).sort(
        descending=True
    )
    torch.testing.assert_close(similarities, expected[:, :20], rtol=0, atol=1e-6)
    assert torch.equal(places, order[:, :20])
    once = classify_by_neighbours(BANK, LABELS, QUERIES, counts=COUNTS)
    for count, votes in classify_by_neighbours(bank, LABELS, QUERIES, counts=COUNTS, rows_at_once=rows_at_once).items():
        assert torch.equal(votes, once[count])


def test_more_neighbours_than_rows_are_all_rows() -> None:
    found = classify_by_neighbours(BANK[:5], LABELS[:5], QUERIES, counts=(5, 50))
    assert torch.equal(found[5], found[50])


def test_wide_rows_are_read_in_smaller_parts() -> None:
    assert feature_rows.count_rows_at_once(384) == 65536
    assert feature_rows.count_rows_at_once(3072) * 3072 * 4 <= 2**27
    assert feature_rows.count_rows_at_once(2**40) == 1
