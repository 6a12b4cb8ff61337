"""vitrail data: list the public data sets that --data NAME uses, or download some."""

import json
from typing import Any

from vitrail.base.errors import ConfigError, find_nearest_name
from vitrail.base.files import get_cache_folder
from vitrail.base.text import format_bytes, format_table
from vitrail.cli.options import model_flags as flags
from vitrail.cli.output.progress import progress_bar
from vitrail.data.public.catalog import (
    PUBLIC_DATASETS,
    PublicDataset,
    find_dataset_folder,
    find_public_dataset,
    is_downloaded,
)


def data(*names: str, as_json: flags.Json = False) -> None:
    """List the public data sets that --data NAME uses, or download some of them.

    Every command with --data takes these names, and downloads a data set once into the cache: --data cifar10 is the
    public data set, --data ./cifar10 the folder of this name. A download is resumed after an interruption and checked
    by its published checksum. Without a network, get the files in another way and put them into the folder that
    is shown.

    Examples::

        vitrail data
        vitrail data cifar10 pets
        vitrail data --json

    Parameters
    ----------
    names
        Data sets to download now. [default: list all]
    """
    from vitrail.data.public.download import fetch_dataset

    chosen = [find_dataset(name) for name in names]
    for each in chosen:
        folder = find_dataset_folder(each)
        if not is_downloaded(each):
            with progress_bar(each.size, f"downloading {each.name}, {format_bytes(each.size)}") as advance:
                fetch_dataset(each, advance)
        if not as_json:
            print(f"{each.name}: {folder}; {each.parts}; license: {each.license}")
    if as_json:
        print(json.dumps([describe_dataset(each) for each in chosen or PUBLIC_DATASETS], indent=2))
    elif not chosen:
        print("\n".join(list_lines()))


def find_dataset(name: str) -> PublicDataset:
    found = find_public_dataset(name)
    if found is None:
        nearest = find_nearest_name(name, [each.name for each in PUBLIC_DATASETS])
        hint = f"did you mean {nearest!r}?" if nearest else "`vitrail data` lists them"
        raise ConfigError(f"{name!r} is not a public data set; {hint}")
    return found


def list_lines() -> list[str]:
    cells = [
        (
            each.name,
            str(each.classes or "–"),
            format_bytes(each.size),
            "downloaded" if is_downloaded(each) else "",
            each.license,
            each.title,
        )
        for each in PUBLIC_DATASETS
    ]
    table = format_table(("name", "classes", "download", "state", "license", "data set"), cells, "lrrlll")
    return [*table, "", f"Data sets are kept in {get_cache_folder() / 'data'}; files that you put there are used."]


def describe_dataset(dataset: PublicDataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "title": dataset.title,
        "page": dataset.page,
        "classes": dataset.classes,
        "bytes": dataset.size,
        "parts": dataset.parts,
        "license": dataset.license,
        "downloaded": is_downloaded(dataset),
        "folder": str(find_dataset_folder(dataset)),
        "files": [{"url": file.url, "bytes": file.size, "sha256": file.sha256 or None} for file in dataset.files],
    }
