"""The transfer suite: every public data set with classes that is on this machine, and what papers print for them."""

from collections.abc import Sequence

from vitrail.base.errors import ConfigError
from vitrail.base.table import Table
from vitrail.data.public.catalog import PUBLIC_DATASETS, is_downloaded
from vitrail.study.published_tables import find_published_table

EXAMPLES = 1000  # training images of each, as in VTAB-1k
LEFT_OUT = ("imagenet-v2",)  # has no training images
PUBLISHED_TABLE = "vit.table9"  # VTAB-1k: fine-tuned, not probed
PUBLISHED_COLUMNS = {
    "cifar100": "CIFAR-100",
    "dtd": "DTD",
    "eurosat": "EuroSAT",
    "flowers": "Flowers102",
    "pets": "Pets",
    "svhn": "SVHN",
}


def list_suite() -> list[str]:
    """The names of the data sets that are downloaded."""
    known = [each for each in PUBLIC_DATASETS if each.classes and each.name not in LEFT_OUT]
    found = [each.name for each in known if is_downloaded(each)]
    if not found:
        names = " ".join(each.name for each in known)
        raise ConfigError(f"no data set of the suite is downloaded; expected some of them: vitrail data {names}")
    return found


def select_published_columns(names: Sequence[str]) -> Table | None:
    """The published results of ViT on these data sets; None if there are none."""
    published = find_published_table(PUBLISHED_TABLE)
    wanted = [PUBLISHED_COLUMNS[name] for name in names if name in PUBLISHED_COLUMNS]
    places = [0, *(place for place, column in enumerate(published.columns) if column.name in wanted)]
    if len(places) == 1:
        return None
    return Table(
        columns=tuple(published.columns[place] for place in places),
        rows=[tuple(row[place] for place in places) for row in published.rows],
        title=f"Published, fine-tuned on {EXAMPLES:,} images of each ({published.source})",
    )
