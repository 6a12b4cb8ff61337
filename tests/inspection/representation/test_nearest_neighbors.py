"""Nearest neighbors: those of a direct sort, in chunks or not, from images or stored features."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.toy_datasets import write_image

import vitrail
from vitrail.base.errors import ConfigError, DataError
from vitrail.base.style import PALETTE, RED
from vitrail.inspection.representation.nearest_neighbors import MostSimilar, NeighborSearch, scale_to_unit_length

pytest.importorskip("matplotlib", reason="needs the extra `plot`")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number in range(9):
        write_image(folder / ("ants" if number % 2 else "bees") / f"{number}.png", number)
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    made = vitrail.create("vit_tiny_patch16_224", image_size=32, patch_size=8, width=16, heads=2, depth=1, classes=0)
    return vitrail.open_model(made, preprocessing=vitrail.Preprocessing(image_size=32))


def store(model: Any, photos: Path, path: Path, **kind: Any) -> list[Path]:
    """Features in the form of `vitrail embed`."""
    paths = sorted(photos.rglob("*.png"))
    np.save(path, vitrail.Predictor(model).features_all(paths, **kind))
    lines = ["file,row,error", *(f"{each},{row}," for row, each in enumerate(paths))]
    path.with_suffix(".files.csv").write_text("\n".join(lines) + "\n")
    return paths


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_most_similar_equal_a_direct_sort(chunk: int) -> None:
    rng = np.random.default_rng(0)
    queries, bank = (scale_to_unit_length(rng.normal(size=(rows, 6)).astype(np.float32)) for rows in (4, 50))
    bank[7] = bank[3]  # a tie
    found = MostSimilar(queries, 5)
    for start in range(0, len(bank), chunk):
        found.add(np.arange(start, min(start + chunk, len(bank))), bank[start : start + chunk])
    similarities = queries @ bank.T
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found.indices, order)
    np.testing.assert_allclose(found.similarities, np.take_along_axis(similarities, order, 1), rtol=1e-5)


def names(search: NeighborSearch) -> list[list[str]]:
    return [[each.image.name for each in row] for row in search.neighbors]


def test_neighbors_of_images(model: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, progress = store(model, photos, tmp_path / "features.npy"), list[int]()
    search = vitrail.find_neighbors(model, [paths[0], "example:cat"], photos, k=3, batch=2, progress=progress.append)
    features = scale_to_unit_length(vitrail.Predictor(model).features_all([*paths, "example:cat"]))
    others = np.argsort(-(features[0] @ features[:-1].T), kind="stable")
    assert others[0] == 0, "the image itself, which is left out"
    assert names(search)[0] == [str(paths[n]) for n in others[1:4]]
    assert names(search)[1] == [str(paths[n]) for n in np.argsort(-(features[-1] @ features[:-1].T))[:3]]
    assert [each.label for each in search.queries] == ["ants", None]
    assert search.bank_size == len(progress) == 9
    monkeypatch.setattr("vitrail.inspection.representation.nearest_neighbors.ROWS_AT_ONCE", 2)
    assert names(vitrail.find_neighbors(model, [paths[0], "example:cat"], photos, k=3)) == names(search)
    stored = vitrail.find_neighbors(model, [paths[0], "example:cat"], tmp_path / "features.npy", k=3)
    assert names(stored) == names(search)
    assert [each.image.label for each in stored.neighbors[0]] == [each.image.label for each in search.neighbors[0]]
    figure = search.figures[0]
    known = [each.image.label == "ants" for each in search.neighbors[0]]
    assert f"{sum(known)} of 3 are of the query's class" in figure.caption
    frames: list[Any] = [patch.get_edgecolor()[:3] for patch in figure.draw().axes[0].patches]
    expected = [PALETTE[2] if same else RED for same in known]
    for frame, color in zip(frames[1:4], expected, strict=True):
        np.testing.assert_allclose(frame, [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])


def test_kind_of_stored_features_is_found(model: Any, photos: Path, tmp_path: Path) -> None:
    paths = store(model, photos, tmp_path / "mean.npy", kind="mean")
    found = vitrail.find_neighbors(model, [paths[2]], tmp_path / "mean.npy", k=1)
    features = scale_to_unit_length(vitrail.Predictor(model).features_all(paths, "mean"))
    assert names(found)[0] == [str(paths[np.argsort(-(features[2] @ features.T))[1]])]
    np.save(tmp_path / "mean.npy", -np.load(tmp_path / "mean.npy"))
    with pytest.raises(DataError, match=r"holds other features of .* than this model computes"):
        vitrail.find_neighbors(model, [paths[2]], tmp_path / "mean.npy", k=1)
    np.save(tmp_path / "mean.npy", np.zeros((9, 5), np.float32))
    with pytest.raises(DataError, match="width 5, but this model's have 16"):
        vitrail.find_neighbors(model, [paths[2]], tmp_path / "mean.npy", k=1)
    np.save(tmp_path / "mean.npy", np.zeros((8, 16), np.float32))
    with pytest.raises(DataError, match="one row for each of 8 features"):
        vitrail.find_neighbors(model, [paths[2]], tmp_path / "mean.npy", k=1)


def test_unreadable_images_are_left_out(model: Any, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tmp_path / "copy")
    (tmp_path / "copy" / "ants" / "broken.png").write_bytes(b"not an image")
    found = vitrail.find_neighbors(model, ["example:cat", "nowhere.png"], tmp_path / "copy", k=2)
    assert (found.bank_size, len(found.skipped), len(found.failed), len(found.queries)) == (9, 1, 1, 1)
    with pytest.raises(DataError, match="nowhere"):
        vitrail.find_neighbors(model, ["nowhere.png"], photos)


def test_bad_input(model: Any, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`k` is 10, but photos has 9 images"):
        vitrail.find_neighbors(model, ["example:cat"], photos, k=10)
    with pytest.raises(ConfigError, match="`k` is 9, but photos has 8 images"):
        vitrail.find_neighbors(model, [next(photos.rglob("*.png"))], photos, k=9)
    with pytest.raises(ConfigError, match="`k` is 0"):
        vitrail.find_neighbors(model, ["example:cat"], photos, k=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no images"):
        vitrail.find_neighbors(model, ["example:cat"], tmp_path / "empty")
    with pytest.raises(DataError, match=r"features.npy cannot be read: No such file"):
        vitrail.find_neighbors(model, ["example:cat"], tmp_path / "features.npy")
    with pytest.raises(ConfigError, match="images is one str"):
        vitrail.find_neighbors(model, "example:cat", photos)
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "number.npy", np.float32(1))
    for name in ("empty.npy", "number.npy"):
        with pytest.raises(DataError, match=f"{name} cannot be read: .*; expected a file that `vitrail embed` wrote"):
            vitrail.find_neighbors(model, ["example:cat"], tmp_path / name)
