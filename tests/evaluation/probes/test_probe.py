"""Probes of models on folders of images: rows, baselines, cache, several data sets and bad input."""

import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from support.saved_models import write_model_folder, write_run_folder
from support.toy_datasets import write_class_folders, write_image

import vitrail
from vitrail.base.array_file import ArrayFile
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.data.batch import Batch
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits
from vitrail.evaluation.probes import stored_features
from vitrail.evaluation.probes.feature_sources import FeatureSource
from vitrail.evaluation.probes.probe import is_masked_autoencoder
from vitrail.evaluation.probes.probe_results import ProbeResult
from vitrail.opening import Opened
from vitrail.predict.engine_selection import EngineOptions

FAST: dict[str, Any] = {"knn": [1, 5], "shots": [1, 2], "seeds": 2, "linear": False, "batch": 8}


def run_probe(model: Any, data: Any = None, **changes: Any) -> ProbeResult:
    return vitrail.probe(model, data, **{**FAST, **changes})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ants are dark and bees are light, so that raw pixels tell them apart."""
    for label, name in enumerate(("ants", "bees")):
        for number in range(20):
            noise = np.random.default_rng(20 * label + number).integers(0, 150, (8, 8, 3), dtype=np.uint8)
            path = tmp_path / "photos" / name / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise + np.uint8(100 * label)).save(path)
    return tmp_path / "photos"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that were run, one per batch."""
    names, inner = list[str](), stored_features.compute_checked_features

    def note(source: FeatureSource, batch: Batch, device: torch.device) -> NDArray[np.float32]:
        names.append(source.name if source.engine is None else f"{source.name} on {source.engine.name}")
        return inner(source, batch, device)

    monkeypatch.setattr(stored_features, "compute_checked_features", note)
    return names


def test_rows_and_what_a_model_adds_to_the_better_baseline(photos: Path, model: Path) -> None:
    found = run_probe(model, photos, linear=True)
    (table,) = found.tables
    assert (table.data, table.classes, table.bank_images, table.query_images) == ("photos", 2, 32, 8)
    assert [(row.name, row.kind) for row in table.rows] == [
        ("toy", "model"),
        ("raw pixels", "pixels"),
        ("untrained", "untrained"),
    ]
    mine, pixels, untrained = table.rows
    assert (mine.width, pixels.width) == (16, 3072)
    assert pixels.knn[5] == 1
    assert pixels.linear == 1
    assert [len(each) for each in mine.few_shot.values()] == [2, 2]
    assert mine.spread != untrained.spread, "the test can fail"
    gains = table.compute_gains(mine)
    for name, value in mine.accuracies.items():
        assert gains[name] == value - max(pixels.accuracies[name], untrained.accuracies[name])
    assert not table.compute_gains(pixels)
    text, report = str(found), json.loads(json.dumps(found.to_json()))
    assert text.startswith("photos: 8 images of 2 classes, classified by 32 training images; accuracy in %\n")
    for word in ("k-NN 5", "2-shot", "linear", "100.0", " ± ", "over the better baseline", " of 3072", "* best k"):
        assert word in text
    assert report["tables"][0]["rows"][0]["over_baseline"] == gains
    assert report["mean"] is None
    records = found.table.list_records()
    assert [each["features"] for each in records] == ["toy", "raw pixels", "untrained", "over the better baseline"]
    assert all(records[0][name] == value for name, value in mine.accuracies.items())
    assert records[0]["2-shot std"] == mine.deviations["2-shot"]
    assert records[-1]["linear"] == gains["linear"]
    assert found._repr_html_().startswith("<pre>photos: 8 images")  # pyright: ignore[reportPrivateUsage]
    assert any("8 of 40 images held out for validation, by seed 0" in note for note in found.notes)
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    figure = found.plot()
    assert figure.arrays["accuracy"].shape == (3, 5)
    assert list(figure.arrays["rows"]) == ["toy", "raw pixels", "untrained"]
    assert figure.draw().axes


def test_features_are_cached_by_model_and_images(
    photos: Path, model: Path, tmp_path: Path, home: Path, computed: list[str]
) -> None:
    first = run_probe(model, photos)
    files = sorted((home / "features").iterdir())
    assert len(files) == 6  # of three rows, for training and validation images
    assert set(computed) == {"toy", "raw pixels", "untrained"}
    assert np.load(max(files, key=lambda path: path.stat().st_size)).shape == (32, 3072)
    computed.clear()
    assert run_probe(str(model), photos) == first
    assert not computed
    for damage in (b"", files[0].read_bytes()[:-90], files[0].read_bytes()[:-3] + b"xyz", b"\0" * 5000):
        files[0].write_bytes(damage)
        assert run_probe(model, photos) == first
    changed = bytearray(files[0].read_bytes())
    changed[200] ^= 1
    files[0].write_bytes(changed)
    computed.clear()
    assert run_probe(model, photos) == first
    assert len(set(computed)) == 1
    before = (photos / "ants" / "00.png").stat()
    write_image(photos / "ants" / "00.png", 5)
    computed.clear()
    run_probe(model, photos)
    assert set(computed) == {"toy", "raw pixels", "untrained"}
    os.utime(photos / "ants" / "00.png", ns=(before.st_atime_ns, before.st_mtime_ns))  # as cp -p of a file of this size
    computed.clear()
    run_probe(model, photos)
    assert set(computed) == {"toy", "raw pixels", "untrained"}
    computed.clear()
    other = write_model_folder(tmp_path / "toy", depth=1)
    run_probe(other, photos)
    assert set(computed) == {"toy", "untrained"}
    assert not [path for path in (home / "features").iterdir() if path.name.startswith(".")]


def test_without_a_cache_folder_features_are_computed_each_time(
    photos: Path, model: Path, home: Path, computed: list[str]
) -> None:
    home.write_text("a file")
    assert run_probe(model, photos).tables == run_probe(model, photos).tables
    assert len(computed) == 2 * 3 * 5  # batches
    assert home.read_text() == "a file"


@pytest.mark.parametrize("limit", [64, 128 + 32 * 17 * 4 - 80])  # while the file is created, and while rows are added
def test_features_are_computed_without_the_cache_if_its_disk_is_full(
    limit: int, photos: Path, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk: it is lifted for the temporary folder."""
    expected = run_probe(model, photos, untrained=False)
    shutil.rmtree(home)
    write = ArrayFile.write

    def write_within_limit(file: ArrayFile, indices: Any, values: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if home in file.path.parents else before[1], before[1]))
        try:
            write(file, indices, values)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(ArrayFile, "write", write_within_limit)
    found = run_probe(model, photos, untrained=False)
    assert found.tables == expected.tables
    assert [note for note in found.notes if "features are not cached: cannot write " in note and "too large" in note]
    assert not [*(home / "features").iterdir()]


def test_an_interrupted_pass_continues_where_it_was(
    photos: Path, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_probe(model, photos)
    shutil.rmtree(home)
    shown, compute = list[int](), stored_features.compute_checked_features

    def stop_at_the_third_batch(source: FeatureSource, batch: Batch, device: torch.device) -> NDArray[np.float32]:
        if source.kind == "model":
            shown.append(batch.size)
            if len(shown) == 3:
                raise KeyboardInterrupt
        return compute(source, batch, device)

    monkeypatch.setattr(stored_features, "compute_checked_features", stop_at_the_third_batch)
    with pytest.raises(KeyboardInterrupt):
        run_probe(model, photos)
    assert [path for path in (home / "features").iterdir() if not path.name.endswith(".npy")] == []
    assert run_probe(model, photos) == expected
    assert shown == [8, 8, 8, 8, 8, 8], "16 of 40 images before, 24 after"


def test_engines_compute_the_features_that_are_missing(photos: Path, model: Path, computed: list[str]) -> None:
    expected = run_probe(model, photos)
    assert run_probe(model, photos, options=EngineOptions(engine="eager", streams=2)) == expected
    assert not any(" on " in each for each in computed), "all are stored"
    found = run_probe(model, photos, options=EngineOptions(engine="bfloat16", batch=8))
    assert set(computed[-10:]) == {"toy on bfloat16", "untrained on bfloat16"}
    assert found.tables[0].rows[0].spread == pytest.approx(expected.tables[0].rows[0].spread, rel=0.05)
    assert found.tables[0].rows[0].spread != expected.tables[0].rows[0].spread, "features in bfloat16 have a file"
    before = len(computed)
    assert run_probe(model, photos, layer=0, options=EngineOptions(engine="eager")) == run_probe(model, photos, layer=0)
    assert not any(" on " in each for each in computed[before:]), "no engine returns what a block does"


def test_an_exported_engine_computes_the_same_features(photos: Path, model: Path, home: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    expected = run_probe(model, photos, untrained=False)
    shutil.rmtree(home / "features")
    found = run_probe(model, photos, untrained=False, options=EngineOptions(engine="onnx", streams=2))
    assert found.tables[0].rows[0].knn == expected.tables[0].rows[0].knn
    assert found.tables[0].rows[0].spread == pytest.approx(expected.tables[0].rows[0].spread, rel=1e-4)


def test_unreadable_images_are_skipped_and_counted(photos: Path, model: Path) -> None:
    (photos / "ants" / "03.png").write_bytes(b"not an image")
    found = run_probe(model, photos)
    assert len(found.skipped) == 1
    assert found.tables[0].bank_images + found.tables[0].query_images == 39
    assert "1 unreadable, skipped:" in str(found)
    assert run_probe(model, photos) == found, "the features are those of the cache"
    with pytest.raises(DataError, match=r"03\.png' is not an image"):
        run_probe(model, photos, strict=True, layer=0)


def test_the_last_table_of_several_data_sets_is_their_mean(photos: Path, model: Path, tmp_path: Path) -> None:
    other = write_class_folders(tmp_path / "other", cats=12, dogs=12, eels=12)
    found = run_probe(model, [photos, other], examples=20)
    assert [table.bank_images for table in found.tables] == [20, 20]
    for place, row in enumerate(found.mean.rows):
        for name, value in row.accuracies.items():
            assert value == pytest.approx(sum(table.rows[place].accuracies[name] for table in found.tables) / 2)
    assert "mean of 2 data sets" in str(found)
    names = [each["data"] for each in found.table.list_records()]
    assert list(dict.fromkeys(names)) == ["photos", "other", "mean of 2 data sets"]
    assert found.to_json()["mean"]["rows"][0]["name"] == "toy"
    assert any("20 of 32 training images, by seed 0" in note for note in found.notes)


def test_models_share_equal_baselines(photos: Path, model: Path, tmp_path: Path) -> None:
    deeper = write_model_folder(tmp_path / "deeper", depth=3)
    same = write_run_folder(tmp_path / "run", photos)
    found = run_probe([model, deeper, same], photos)
    (table,) = found.tables
    assert [row.name for row in table.rows] == [
        *("toy", "deeper", "run", "raw pixels", "untrained toy", "untrained deeper"),
    ]
    assert [row.baselines for row in table.models] == [(3, 4), (3, 5), (3, 4)]
    assert table.bank_images == 20  # split as in the training of the run
    assert "deeper over baseline" in str(found)


def test_data_sets_of_objects(model: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 2
    arrays = ArrayDataset(images, labels, ("a", "b"))
    splits = DatasetSplits(name="arrays", train=arrays, val=arrays, classes=("a", "b"))
    loaded = vitrail.open_model(model)
    found = run_probe(loaded, splits, knn=[1], pixels=False, untrained=False)
    assert found.tables[0].rows[0].knn == {1: 1.0}  # each image is its own neighbor
    assert not found.tables[0].compute_gains(found.tables[0].rows[0])
    pairs = [(Image.fromarray(image), int(label)) for image, label in zip(images, labels, strict=True)]
    assert run_probe(loaded, pairs_as_dataset(pairs)).tables[0].query_images == 8


def pairs_as_dataset(pairs: list[Any]) -> Any:
    return torch.utils.data.Subset(pairs, range(len(pairs)))  # pyright: ignore[reportArgumentType]


def test_a_masked_autoencoder_is_judged_by_fine_tuning(photos: Path, tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", photos)
    assert not any("autoencoder" in note for note in run_probe(run).notes)
    assert any("`val_share` 0.4 is not used" in note for note in run_probe(run, val_share=0.4).notes)
    plan = json.loads((run / "run.json").read_text())
    plan["recipe"]["task"] = {"name": "mae"}
    (run / "run.json").write_text(json.dumps(plan))
    (note,) = (note for note in run_probe(run).notes if "autoencoder" in note)
    assert note.startswith("run is a masked autoencoder")
    assert "11%" in note
    model, how = torch.nn.Identity(), vitrail.Preprocessing()
    for layout, classes, expected in (("mae", 0, True), ("mae", 10, False), ("timm", 0, False)):  # with a head: tuned
        file: Any = SimpleNamespace(layout=layout)
        loaded = Opened(source="file", model=model, preprocessing=how, classes=classes, checkpoint=file)
        assert is_masked_autoencoder(loaded) == expected


def test_usual_settings_are_reduced_to_what_the_data_has(photos: Path, model: Path) -> None:
    found = vitrail.probe(model, photos, linear=False, seeds=1)
    row = found.tables[0].rows[0]
    assert (tuple(row.knn), tuple(row.few_shot)) == ((10, 20), (1, 5, 10))
    assert any("32 training images, so k-NN uses k 10, 20 only" in note for note in found.notes)
    assert any("ants has 16" in note and "shots 25" in note for note in found.notes)


def test_bad_input_is_refused_before_anything_is_computed(
    photos: Path, model: Path, tmp_path: Path, computed: list[str]
) -> None:
    flat = tmp_path / "flat"
    write_image(flat / "1.png")
    one = write_class_folders(tmp_path / "one", ants=4)
    validation = write_class_folders(tmp_path / "validation" / "val", ants=4, bees=4).parent
    single = write_class_folders(tmp_path / "single", ants=30, bees=5)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (flat, {}, r"flat has 1 image but no class folders"),
        (one, {}, r"one has one class, ants; a probe needs labels of at least two"),
        (validation, {}, r"validation has no training images"),
        (single, {"shots": [10]}, r"`shots` 10 for single, but bees has 4 training images; .* use 4 or less"),
        (photos, {"knn": [33]}, r"`knn` 33 for photos, which has 32 training images; use 32 or less"),
        (photos, {"knn": [20], "examples": 10}, r"`knn` 20 for photos, which has 10 training images"),
        (photos, {"layer": 7}, r"`layer` is 7; .* 2 blocks of toy, from 0 to 1"),
        (photos, {"seeds": 0}, r"seeds"),
        (photos, {"examples": 0}, r"examples"),
        (photos, {"val_share": 2.0}, r"val_share is 2"),
        (None, {}, r"no `data`; expected fashion"),
        ([], {}, r"no `data`; expected fashion"),
    ]
    for data, settings, message in bad:
        with pytest.raises(VitrailError, match=message):
            run_probe(model, data, **{"knn": [1], "shots": [1], **settings})
    with pytest.raises(ConfigError, match="no models were given"):
        vitrail.probe([], photos)
    assert not computed


def test_features_that_are_not_finite_are_an_error(photos: Path, model: Path) -> None:
    loaded = vitrail.open_model(model)
    with torch.no_grad():
        next(loaded.module.parameters()).fill_(torch.nan)
    with pytest.raises(VitrailError, match=r"features of .* are NaN or infinite"):
        run_probe(loaded, photos)
