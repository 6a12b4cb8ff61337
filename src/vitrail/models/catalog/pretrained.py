"""Public weights of the presets, by the names that timm gives them: `preset.tag`. torch is not imported.

pretrained.csv has one row per preset and tag; the first row of a preset is its default. Repositories, licenses and
preprocessing are those of timm's `pretrained_cfg`, top-1 accuracies those of its results on ImageNet's validation set.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Literal

from vitrail.base.errors import CheckpointError, ConfigError, find_nearest_name, unknown_name_error
from vitrail.models.catalog.preset_costs import list_presets, resolve_alias

TABLE_FILE = Path(__file__).with_name("pretrained.csv")
PUBLISHED_STEM = re.compile(r"(.+)-[0-9a-f]{8}")  # facebook's file names, as torch.hub expects them
BUCKET_ENDING = ".npz"
BUCKET_ADDRESSES = ("gs://vit_models/", "https://storage.googleapis.com/vit_models/")  # of Google's own files


@dataclass(frozen=True, kw_only=True)
class PretrainedWeights:
    """One row of the table: where the weights are, under which license, and how images are prepared for them."""

    preset: str
    tag: str
    repository: str  # on the Hugging Face hub
    file: str
    license: str
    trained_on: str
    classes: int  # 0: features only
    image_size: int
    crop: float
    fit: Literal["short_side", "squash"]
    interpolation: Literal["bilinear", "bicubic"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    top1: float | None  # per cent on ImageNet's validation set
    top1_size: int | None  # image size at which it was measured, which for some convnets is not `image_size`
    bucket_file: str  # name of the same weights in Google's bucket; empty if they are not Google's

    @property
    def name(self) -> str:
        return f"{self.preset}.{self.tag}"

    @property
    def has_imagenet_classes(self) -> bool:
        return self.classes == 1000 and self.trained_on.endswith("ImageNet-1k")


@cache
def read_table_file() -> Mapping[str, tuple[Mapping[str, str], ...]]:
    """The rows of each preset that has weights, as text: parsing all of them takes longer than finding one."""
    table = dict[str, tuple[Mapping[str, str], ...]]()
    with TABLE_FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table[row["preset"]] = (*table.get(row["preset"], ()), row)
    return table


@cache
def list_weights_of_preset(preset: str) -> tuple[PretrainedWeights, ...]:
    """The default first; () if it has none."""
    return tuple(map(parse_table_row, read_table_file().get(preset, ())))


def read_pretrained_table() -> Mapping[str, tuple[PretrainedWeights, ...]]:
    """The weights of each preset that has some, the default first."""
    return {preset: list_weights_of_preset(preset) for preset in read_table_file()}


def parse_table_row(row: Mapping[str, str]) -> PretrainedWeights:
    return PretrainedWeights(
        **{name: row[name] for name in ("preset", "tag", "repository", "file", "license", "trained_on", "bucket_file")},
        classes=int(row["classes"]),
        image_size=int(row["image_size"]),
        crop=float(row["crop"]),
        fit="squash" if row["fit"] == "squash" else "short_side",
        interpolation="bilinear" if row["interpolation"] == "bilinear" else "bicubic",
        mean=tuple(map(float, row["mean"].split())),
        std=tuple(map(float, row["std"].split())),
        top1=float(row["top1"]) if row["top1"] else None,
        top1_size=int(row["top1_size"]) if row["top1_size"] else None,
    )


def list_pretrained_weights() -> Iterator[PretrainedWeights]:
    """All rows of the table."""
    return (each for rows in read_pretrained_table().values() for each in rows)


def find_pretrained_weights(name: str) -> PretrainedWeights | None:
    """The weights of `preset`, `preset.tag`, an alias with or without a tag, or a file of Google's bucket.

    None if there is no preset of this name. A preset without weights, an unknown tag or an unknown file of the bucket
    is an error.
    """
    address = next((each for each in BUCKET_ADDRESSES if name.startswith(each)), "")
    if name.endswith(BUCKET_ENDING) and (found := find_weights_by_cell("bucket_file", name.removeprefix(address))):
        return found
    if address:
        raise CheckpointError(f"{name} is not among the weights that have a name; download it and use the file")
    given, _, tag = name.partition(".")
    preset = resolve_alias(given)
    if preset is None:
        return None
    by_tag = {each.tag: each for each in list_weights_of_preset(preset)}
    if not by_tag:
        nearest = find_nearest_preset_with_weights(preset)
        hint = (
            "only models that read images have some"
            if nearest is None
            else f"the nearest preset that has some is {nearest}"
        )
        raise CheckpointError(
            f"{name} has no public weights; {hint}. vitrail.create({given!r}) builds an untrained model"
        )
    if tag and tag not in by_tag:
        raise CheckpointError(f"{given}: {unknown_name_error('tag', tag, by_tag)}")
    return by_tag[tag or next(iter(by_tag))]


def find_weights_by_repository(repository: str) -> PretrainedWeights | None:
    return find_weights_by_cell("repository", repository)


def find_weights_by_cell(column: str, text: str) -> PretrainedWeights | None:
    """The first row with this text in a column."""
    rows = (row for rows in read_table_file().values() for row in rows)
    return next((parse_table_row(row) for row in rows if row[column] == text), None)


def find_weights_by_file_name(path: Path) -> PretrainedWeights | None:
    """The weights that a file or folder is named after: PRESET.TAG, PRESET.TAG.safetensors, PRESET-a1311bcf.pth."""
    published = PUBLISHED_STEM.fullmatch(path.stem)
    preset = published[1] if published else path.name.partition(".")[0]
    if preset not in list_presets():  # most names: the table is not read
        return None
    if published:
        return next((each for each in list_weights_of_preset(preset) if each.has_imagenet_classes), None)
    return next((each for each in list_weights_of_preset(preset) if each.name in (path.name, path.stem)), None)


def find_nearest_preset_with_weights(preset: str) -> str | None:
    """Of the same family if possible, with classes, and with the most similar number of parameters.

    None for a preset that reads text: only image models have public weights.
    """
    known, table = list_presets(), read_pretrained_table()
    given, size = known[preset], known[preset]["image_size"]
    if size is None:
        return None

    def distance(name: str) -> tuple[bool, bool, float, int, bool]:
        entry = known[name]
        return (
            entry["family"] != given["family"],
            not table[name][0].has_imagenet_classes,
            abs(log(entry["parameters"] / given["parameters"])),
            abs((entry["image_size"] or size)[0] - size[0]),
            name != preset,  # of a sibling with as many weights
        )

    return min(table, key=distance)


def list_model_names() -> list[str]:
    """Presets with public weights, then the others, then all aliases: the order in which names are suggested."""
    known, table = list_presets(), read_table_file()
    aliases = [alias for entry in known.values() for alias in entry["aliases"]]
    return [*sorted(known, key=lambda name: name not in table), *aliases]


def check_preset_exists(name: str) -> None:
    """Refuse an unknown model, unless it is one from outside the package: file.py:preset."""
    if name and ":" not in name and resolve_alias(name) is None:
        raise unknown_model_error(name)


def unknown_model_error(given: str) -> ConfigError:
    """Error that suggests the nearest name; there are too many names to list them."""
    nearest = find_nearest_name(given, list_model_names())
    hint = f"did you mean {nearest!r}?" if nearest else "`vitrail models` lists all names"
    return ConfigError(f"unknown model {given!r}; {hint}")
