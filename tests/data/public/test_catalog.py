"""The table of public data sets against the published addresses, sizes and checksums."""

import re
from pathlib import Path
from typing import Any

import pytest
import torchvision.datasets as peers
import yaml

from vitrail.data.public.catalog import PUBLIC_DATASETS, find_public_dataset, list_public_names

PUBLISHED = Path(__file__).parents[3].parent / "shared/published/datasets.yaml"


def test_rows_are_complete() -> None:
    names = [each.name for each in PUBLIC_DATASETS]
    assert len(set(names)) == len(names) == 13
    assert [*list_public_names(is_text=False), *list_public_names(is_text=True)] == names
    for each in PUBLIC_DATASETS:
        assert each.page.startswith("http")
        assert len({file.name for file in each.files}) == len(each.files)
        for file in each.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256) or re.fullmatch("[0-9a-f]{32}", file.md5), file.name
            assert file.size > 0


def test_a_path_is_not_a_name() -> None:
    assert find_public_dataset("cifar10") is PUBLIC_DATASETS[0]
    assert (
        find_public_dataset("./cifar10") is find_public_dataset("CIFAR10") is find_public_dataset(Path("dtd")) is None
    )


def test_addresses_are_those_of_torchvision() -> None:
    """torchvision has no binary version of CIFAR."""
    urls = {file.url for each in PUBLIC_DATASETS for file in each.files}
    svhn: Any = peers.SVHN.split_list
    assert {svhn[part][0] for part in ("train", "test")} <= urls
    assert peers.STL10.url in urls
    food: Any = peers.Food101
    assert food._URL.replace("http:", "") in {url.replace("https:", "").replace("http:", "") for url in urls}
    flowers: Any = peers.Flowers102
    assert {f"{flowers._download_url_prefix}{name}" for name, _ in flowers._file_dict.values()} <= urls


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/published/datasets.yaml")
def test_sizes_and_checksums_are_the_published_ones() -> None:
    listed: Any = yaml.safe_load(PUBLISHED.read_text("utf-8"))["datasets"]
    published = {file.get("url"): file for each in listed.values() for file in each["files"]}
    for each in PUBLIC_DATASETS:
        for file in each.files:
            row = published[file.url]
            assert (file.size, file.sha256) == (row["bytes"], row.get("sha256", "")), file.name
            assert not file.md5 or file.md5 == row["md5"]
