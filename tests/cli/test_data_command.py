"""vitrail data: the list, and its names as --data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.data.public import download
from vitrail.data.public.catalog import PUBLIC_DATASETS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/data"


def write_cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / name).write_bytes(np.random.default_rng(0).integers(0, 10, 64 * 3073, np.uint8).tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))


def test_the_list(vitrail_: Callable[..., Any], cache: Path) -> None:
    write_cifar(cache / "cifar10/cifar-10-batches-bin")
    lines = vitrail_("data").out.splitlines()
    assert [line.split()[0] for line in lines[2:15]] == [each.name for each in PUBLIC_DATASETS]
    assert next(line for line in lines if "downloaded" in line).split()[:5] == [
        "cifar10",
        "10",
        "170.1",
        "MB",
        "downloaded",
    ]
    assert lines[-1] == f"Data sets are kept in {cache}; files that you put there are used."
    found = json.loads(vitrail_("data", "--json").out)
    assert [each["name"] for each in found if each["downloaded"]] == ["cifar10"]
    assert found[0]["files"][0]["url"].startswith("https://www.cs.toronto.edu/")
    assert vitrail_("data", "cifar10").out.startswith(f"cifar10: {cache}/cifar10; 50,000 images for training")


def test_a_name_is_the_public_data_set_and_a_path_the_folder(vitrail_: Callable[..., Any], cache: Path) -> None:
    write_cifar(cache / "cifar10/cifar-10-batches-bin")
    Path("cifar10").mkdir()
    found = vitrail_("train", "--data", "cifar10", "--recipe", "cifar10-cpu", "--dry-run")
    assert found.code in (0, None)
    assert "data   cifar10: 64 training images, 64 validation images, 10 classes" in found.out
    assert "cifar10 is the public data set; pass ./cifar10 for the folder in the current directory" in found.out
    found = vitrail_("train", "--data", "./cifar10", "--recipe", "cifar10-cpu", "--dry-run")
    assert (found.code, "has no images" in found.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "cifar11"), "'cifar11' is not a public data set; did you mean 'cifar10'?"),
        (("data", "x"), "'x' is not a public data set; `vitrail data` lists them"),
        (("train", "--data", "multi30k", "--recipe", "scratch"), "multi30k has sentence pairs; expected images"),
        (
            ("eval", "vit_fashion", "--data", "pets"),
            "pets is not in the cache and cannot be downloaded (www.robots.ox.ac.uk: no network; thor.robots.ox.ac.uk: "
            "no network); try again, or get https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz in another",
        ),
    ],
)
def test_wrong_names_and_no_network(
    vitrail_: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    def fail(*_: object) -> None:
        raise download.DownloadError("no network")

    monkeypatch.setattr(download, "download_file", fail)
    found = vitrail_(*words)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1
