"""Image data sets whose labels are in lists next to the images: Pets, Flowers, Food-101, DTD, Tiny ImageNet.

Official test images are used for validation; where a data set has a validation part as well, as Flowers and DTD have,
it is used for training, as in the ViT and DeiT papers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.base.errors import DataError, describe_error
from vitrail.base.files import read_text
from vitrail.base.json_yaml import parse_json
from vitrail.base.text import format_count
from vitrail.data.images.formats.class_folders import FileDataset, list_entries
from vitrail.data.images.formats.matlab import read_matlab_arrays

Splits = tuple[FileDataset | None, FileDataset | None, list[str]]  # training, validation, notes
FLOWER_LISTS = ("imagelabels.mat", "setid.mat")
FLOWER_IMAGES = 8189


@dataclass(frozen=True)
class ListedFormat:
    """`markers` are the files and folders that tell it; `lists` are the files that it needs."""

    name: str
    markers: tuple[str, ...]
    lists: tuple[str, ...]
    read: Callable[[Path], Splits]

    def is_in(self, folder: Path) -> bool:
        return all((folder / marker).exists() for marker in self.markers)

    def open(self, folder: Path) -> Splits:
        missing = [name for name in self.lists if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} is {self.name} without {', '.join(missing)}; put the file there")
        return self.read(folder)


def read_list(path: Path, columns: int, separator: str | None = None) -> list[list[str]]:
    """The lines of a list, each with at least so many columns."""
    try:
        lines = [line for line in read_text(path).split("\n") if line.strip() and not line.startswith("#")]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; expected the published list") from None
    rows = [line.strip().split(separator) for line in lines]
    short = next((number for number, row in enumerate(rows, 1) if len(row) < columns), None)
    if short is not None or not rows:
        given = f"line {short} has fewer than {columns} columns" if rows else "it is empty"
        raise DataError(f"{path}: {given}; expected the published list")
    return rows


def make_dataset(root: Path, files: Iterable[tuple[str, str]], classes: Sequence[str]) -> FileDataset:
    """Images by (path below the root, class); all of them must be there."""
    index = {name: number for number, name in enumerate(classes)}
    listed = list(files)
    check_paths(root, (path for path, _ in listed))
    present = {
        f"{folder}/{name}"
        for folder in {path.rpartition("/")[0] for path, _ in listed}
        if (root / folder).is_dir()
        for name, _, is_folder in list_entries(root / folder)
        if not is_folder
    }
    missing = [path for path, _ in listed if path not in present]
    if missing:
        raise DataError(
            f"{root} lacks {len(missing):,} of {format_count(len(listed), 'listed image')}, for example {missing[0]}; "
            "unpack its archive again"
        )
    unknown = next((name for _, name in listed if name not in index), None)
    if unknown is not None:
        raise DataError(f"{root} lists an image of {unknown!r}, which is not among its {len(classes)} classes")
    return FileDataset([path for path, _ in listed], [index[name] for _, name in listed], classes, root=root)


def check_paths(root: Path, paths: Iterable[str]) -> None:
    """Refuse paths that leave the folder, and other spellings of a path: each could list one folder again."""
    odd = next((path for path in paths if not {"", ".", ".."}.isdisjoint(path.split("/"))), None)
    if odd is not None:
        raise DataError(f"{root} lists {odd[:80]!r}; expected a plain path below it, as in the published list")


def read_pets(root: Path) -> Splits:
    """Breeds are numbered by name without regard to case, which the list says; cats and dogs are mixed."""
    parts = [read_list(root / f"annotations/{part}.txt", 2) for part in ("trainval", "test")]
    names = dict[int, str]()
    for image, number, *_ in (row for part in parts for row in part):
        breed = image.rpartition("_")[0]
        if not number.isdecimal() or names.setdefault(int(number), breed) != breed:
            raise DataError(f"{root}/annotations: {image} is listed as class {number[:20]}, which is another breed")
    classes = [names[number] for number in sorted(names)]
    train, val = (
        make_dataset(root, [(f"images/{row[0]}.jpg", row[0].rpartition("_")[0]) for row in part], classes)
        for part in parts
    )
    return train, val, ["trained on trainval, validated on the test images"]


def read_flowers(root: Path) -> Splits:
    """Labels and image numbers count from 1. The large list, tstid, is the test set."""
    labels = read_matlab_arrays(root / FLOWER_LISTS[0], ("labels",))["labels"].ravel()
    numbers = read_matlab_arrays(root / FLOWER_LISTS[1], ("trnid", "valid", "tstid"))
    train, val, test = (numbers[name].ravel().astype(np.int64) for name in ("trnid", "valid", "tstid"))
    listed = np.concatenate([train, val, test])
    if not len(listed) or listed.min() < 1 or listed.max() > len(labels) or len(set(listed.tolist())) != len(listed):
        raise DataError(
            f"{root / FLOWER_LISTS[1]} does not fit {FLOWER_LISTS[0]}; expected different numbers from 1 to "
            f"{len(labels)}"
        )
    if len(labels) and not 1 <= labels.min() <= labels.max() <= len(FLOWER_NAMES):
        raise DataError(f"{root / FLOWER_LISTS[0]} has labels outside 1 to {len(FLOWER_NAMES)}")

    def take(chosen: Any) -> FileDataset:
        files = [
            (f"jpg/image_{number:05}.jpg", FLOWER_NAMES[int(labels[number - 1]) - 1]) for number in chosen.tolist()
        ]
        return make_dataset(root, files, FLOWER_NAMES)

    note = "trained on the official train and val images together, as in DeiT, validated on the test images"
    return take(np.concatenate([train, val])), take(test), [note]


def read_food(root: Path) -> Splits:
    parts = [read_class_lists(root / f"meta/{part}.json") for part in ("train", "test")]
    classes = sorted(parts[0])
    train, val = (
        make_dataset(root, [(f"images/{file}.jpg", name) for name in sorted(part) for file in part[name]], classes)
        for part in parts
    )
    return train, val, ["validated on the test images; the training images are not cleaned"]


def read_class_lists(path: Path) -> Mapping[str, list[str]]:
    expected = "expected lists of images by class"
    try:
        found: Any = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {describe_error(error)}; {expected}") from None
    if not isinstance(found, dict) or not all(
        isinstance(files, list) and all(isinstance(file, str) for file in files) for files in found.values()
    ):
        raise DataError(f"{path} has no lists of images; {expected}")
    return found


def read_dtd(root: Path) -> Splits:
    """The first of ten official partitions."""
    parts = {part: read_list(root / f"labels/{part}1.txt", 1) for part in ("train", "val", "test")}
    files = {part: [(f"images/{row[0]}", row[0].partition("/")[0]) for row in rows] for part, rows in parts.items()}
    classes = sorted({name for listed in files.values() for _, name in listed})
    train = make_dataset(root, [*files["train"], *files["val"]], classes)
    note = "partition 1 of 10: trained on its train and val images, validated on its test images"
    return train, make_dataset(root, files["test"], classes), [note]


def read_tiny_imagenet(root: Path) -> Splits:
    """Classes are WordNet ids in sorted order; the test images have no labels."""
    classes = sorted({row[0] for row in read_list(root / "wnids.txt", 1)})
    check_paths(root, classes)
    rows = read_list(root / "val/val_annotations.txt", 2, "\t")
    val = make_dataset(root, [(f"val/images/{row[0]}", row[1]) for row in rows], classes)
    files = [
        (f"train/{name}/images/{file}", name)
        for name in classes
        if (root / f"train/{name}/images").is_dir()
        for file, _, is_folder in list_entries(root / f"train/{name}/images")
        if not is_folder
    ]
    empty = set(classes) - {name for _, name in files}
    if empty:
        raise DataError(f"{root / 'train'} has no images of {min(empty)}; unpack its archive again")
    return make_dataset(root, files, classes), val, ["validated on val; the test images have no labels"]


LISTED_FORMATS = (
    ListedFormat("Oxford-IIIT Pet", ("annotations/trainval.txt",), ("annotations/test.txt",), read_pets),
    ListedFormat("Flowers-102", ("jpg/image_00001.jpg",), FLOWER_LISTS, read_flowers),
    ListedFormat("Food-101", ("images", "meta/train.json"), ("meta/test.json",), read_food),
    ListedFormat("DTD", ("images", "labels/train1.txt"), ("labels/val1.txt", "labels/test1.txt"), read_dtd),
    ListedFormat("Tiny ImageNet", ("train", "wnids.txt"), ("val/val_annotations.txt",), read_tiny_imagenet),
)


def find_listed_format(folder: Path) -> ListedFormat | None:
    return next((each for each in LISTED_FORMATS if each.is_in(folder)), None)


FLOWER_NAMES = tuple(  # in the order of the labels, which the files of Oxford Flowers-102 do not name
    """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon
orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle,
yellow iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily,
pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless
gentian, artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly,
ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword
lily, poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia,
wild pansy, primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow
dahlia?, cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum,
spring crocus, bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning
glory, passion flower, lotus, toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose,
tree mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove,
bougainvillea, camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily
""".replace("\n", " ")
    .strip()
    .split(", ")
)
