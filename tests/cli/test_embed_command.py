"""vitrail embed on the command line."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_processes import drop_engine_notes, kill_process, start_command, wait_until
from support.toy_datasets import write_image
from support.unreadable_images import add_unreadable_images

import vitrail
from vitrail.opening import open_torch_model

Run = Callable[..., Any]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("a/1.png", "a/2.png", "b/1.png")):
        write_image(tmp_path / "photos" / name, number)
    return Path("photos")


NAMES = ["photos/a/1.png", "photos/a/2.png", "photos/b/1.png"]


def rows_of(path: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


@torch.inference_mode()
def tokens(model: Path) -> Any:
    """Tokens after the final norm: (images, 1 + 2·2, width)."""
    loaded: Any = open_torch_model(model)
    return loaded.model.tokens(loaded.make_batch(NAMES)).numpy()


@pytest.mark.parametrize("features", ["class", "mean", "tokens"])
def test_rows_are_the_features_of_the_model(vitrail_: Run, model: Path, photos: Path, features: str) -> None:
    every = tokens(model)
    expected = {"class": every[:, 0], "mean": every[:, 1:].mean(1), "tokens": every}[features]
    result = vitrail_("embed", model, photos, "-o", "new/f.npy", "--features", features)
    assert (result.code, drop_engine_notes(result.err)) == (0, "")
    assert result.out.startswith("new/f.npy: 3 images, ")
    found = np.load("new/f.npy")
    assert (found.shape, found.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert [(row["file"], row["row"]) for row in rows_of("new/f.files.csv")] == [
        (name, str(number)) for number, name in enumerate(NAMES)
    ]
    assert {path.name for path in Path("new").iterdir()} == {"f.npy", "f.files.csv"}


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_default_features_are_what_the_head_reads(vitrail_: Run, photos: Path, pool: str) -> None:
    model = vitrail.create("ViT-Ti/16", image_size=32, width=8, depth=1, heads=1, classes=0, pool=pool)
    vitrail.save(model, "backbone", preprocessing=vitrail.Preprocessing(image_size=32))
    assert vitrail_("embed", "backbone", photos, "-o", "f.npy").code == 0
    with torch.inference_mode():
        np.testing.assert_allclose(np.load("f.npy"), model(vitrail.open_model("backbone").make_batch(NAMES)), atol=1e-4)
    assert vitrail_("export", "backbone", "shipped").code == 0
    assert vitrail_("embed", "shipped", photos, "-o", "shipped.npy").code == 0
    np.testing.assert_allclose(np.load("shipped.npy"), np.load("f.npy"), atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "onnx"])
def test_maps_have_an_array_per_level(vitrail_: Run, photos: Path, engine: str) -> None:
    fields = {"image_size": 32, "widths": (16, 24, 32, 40), "stages": (1, 1, 1, 1), "heads": (1, 1, 1, 1)}
    model = vitrail.create("pvt_v2_b0", classes=3, **fields).eval()
    vitrail.save(model, "pyramid", preprocessing=vitrail.Preprocessing(image_size=32))
    add_unreadable_images(photos)
    assert vitrail_("embed", "pyramid", photos, "-o", "new/m.npz", "--maps", "--engine", engine).code == 2
    with torch.inference_mode():
        expected = model.feature_maps(vitrail.open_model("pyramid").make_batch(NAMES))
    with np.load("new/m.npz") as found:
        assert found.files == [f"level{number}" for number in range(1, 5)]
        for array, level in zip(found.values(), expected, strict=True):
            assert (array.shape, array.dtype) == (level.shape, np.float32)
            np.testing.assert_allclose(array, level, atol=1e-4)
    assert [row["file"] for row in rows_of("new/m.files.csv") if row["row"]] == NAMES
    assert {path.name for path in Path("new").iterdir()} == {"m.npz", "m.files.csv"}
    maps = vitrail.Predictor("pyramid").feature_maps(NAMES[0])
    assert [each.shape for each in maps] == [tuple(level.shape[1:]) for level in expected]


def test_parquet_has_the_same_rows(vitrail_: Run, model: Path, photos: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    assert vitrail_("embed", model, photos, "-o", "f.npy").code == 0
    assert vitrail_("embed", model, photos, "-o", "f.parquet").code == 0
    rows = parquet.read_table("f.parquet").to_pylist()
    assert [(row["file"], row["error"]) for row in rows] == [(name, None) for name in NAMES]
    np.testing.assert_array_equal(np.array([row["features"] for row in rows], np.float32), np.load("f.npy"))


def test_unreadable_images_have_no_row(vitrail_: Run, model: Path, photos: Path) -> None:
    bad = add_unreadable_images(photos)
    result = vitrail_("embed", model, photos, "-o", "f.npy")
    assert result.code == 2
    assert drop_engine_notes(result.err).splitlines()[-1] == (
        f"vitrail: {len(bad)} of {len(bad) + 3} images could not be read; the results of the others are in f.npy"
    )
    rows = rows_of("f.files.csv")
    assert [row["file"] for row in rows] == sorted([*NAMES, *(f"photos/{name}" for name in bad)])
    assert [row["file"] for row in rows if row["row"]] == NAMES
    assert all(bool(row["row"]) != bool(row["error"]) for row in rows)
    assert np.load("f.npy").shape == (3, 16)


@pytest.mark.timeout(3600)
def test_job_is_complete_after_random_kills(
    vitrail_: Run, model: Path, photos: Path, tmp_path: Path, kills: int
) -> None:
    kills = max(2, kills // 2)
    for number in range(40 * kills):
        write_image(tmp_path / "many" / f"{number:05}.png", number)
    words = ["embed", model, "many", "--engine", "eager", "--batch", 2, "--streams", 1, "--threads", 1]
    chance, killed, watched = random.Random(0), 0, tmp_path / "f.npy.partial" / "features.npy"
    for _ in range(kills):
        before = watched.stat().st_size if watched.exists() else 0
        process = start_command([*words, "-o", "f.npy", "--resume"])
        wait_until(process, lambda before=before: watched.exists() and watched.stat().st_size > before)
        killed += kill_process(process, chance.uniform(0, 0.02))
    assert killed > kills / 2, "the job finished before it could be killed"
    assert vitrail_(*words, "-o", "f.npy", "--resume").code == 0
    assert vitrail_(*words, "-o", "uninterrupted.npy").code == 0
    assert Path("f.files.csv").read_bytes() == Path("uninterrupted.files.csv").read_bytes()
    assert [row["row"] for row in rows_of("f.files.csv")] == [str(n) for n in range(40 * kills)]
    np.testing.assert_allclose(np.load("f.npy"), np.load("uninterrupted.npy"), atol=1e-5)


BAD = {
    "photos": "features need a file; set -o to features.npy or features.parquet",
    "photos -o f.csv": "-o f.csv has none of the suffixes .npy, .parquet; use one of them, or set --format",
    "-o f.npy": "embed needs IMAGES.",
    "photos -o there.npy": "there.npy already exists; use --overwrite to replace it",
    "photos -o named.npy": "named.files.csv already exists; use --overwrite",
    "photos -o f.npy --features cls": "--features 'cls' is not one of",
    "photos --maps": "features need a file; set -o to maps.npz",
    "photos -o f.npy --maps": "-o f.npy has none of the suffixes .npz; use one of them",
    "photos -o f.npz --maps --format npy": "--format is npy, but --maps needs .npz, one array per level",
    "photos -o f.npz --maps --features mean": "--maps with --features mean; expected one of them",
    "photos -o f.npz --maps --fast": "--maps with --fast; expected every token, computed in float32",
    "photos -o f.npz --maps --merge 1": "--maps with --merge; expected every token, computed in float32",
    "photos -o f.npy --top 1": "Unknown option --top",
}


@pytest.mark.parametrize("words", BAD)
def test_invalid_options_are_one_line_errors(vitrail_: Run, model: Path, photos: Path, words: str) -> None:
    for name in ("there.npy", "named.files.csv"):
        Path(name).touch()
    result = vitrail_("embed", model, *words.split())
    assert (result.code, result.out, drop_engine_notes(result.err).count("\n")) == (2, "", 1), drop_engine_notes(
        result.err
    )
    assert drop_engine_notes(result.err).startswith(f"vitrail: {BAD[words]}")
