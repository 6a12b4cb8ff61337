"""akamaster's pytorch_resnet_cifar10: the paper's ResNets for CIFAR-10, as {"state_dict": …} of a DataParallel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.family_recognition import choose_source, get_source, recognize_source
from vitrail.checkpoint.name_table import add_name_prefix
from vitrail.checkpoint.weight_files import RawContents
from vitrail.data.images.preprocessing import Preprocessing

NAME = "akamaster"
WRAPPER_PREFIX = "module."  # added by DataParallel
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, WRAPPER_PREFIX)
    return "linear.weight" in names and recognize_source(NAME, names) is not None


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, WRAPPER_PREFIX)
    family, source = get_source(NAME, tensors, contents.path)
    head = tensors.get("linear.weight")
    cifar10 = head is not None and head.shape[:1] == (len(CIFAR10_CLASSES),)  # its code supports no other data set
    model = layout.UntranslatedModel(
        layout=NAME,
        family=family,
        source=source,
        tensors=tensors,
        known=known,
        policy="timm",
        preprocessing=make_preprocessing,
        labels=CIFAR10_CLASSES if cifar10 else None,
    )
    return layout.translate_checkpoint(contents, model)


def make_preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """The uncropped image. Its code normalises CIFAR with the mean and std of ImageNet."""
    return Preprocessing(image_size=config["image_size"], crop=1.0, **layout.IMAGENET_MEAN_STD)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    _, source = choose_source(NAME, description)
    layout.check_representable(NAME, description.config, source.supported)
    table = add_name_prefix(source.table, WRAPPER_PREFIX)
    layout.rename_and_write_tensors(NAME, tensors, table, 1, path, wrapper="state_dict")
    return source.assumed


LAYOUT = layout.Layout(name=NAME, matches=matches, read=read, write=write)
