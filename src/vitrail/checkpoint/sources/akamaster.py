"""akamaster's pytorch_resnet_cifar10: the paper's ResNets for CIFAR-10, as {"state_dict": …} of a DataParallel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint import layout
from vitrail.checkpoint.convnet_tensors import RESNET_NAMES
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.files.raw_contents import RawContents
from vitrail.checkpoint.name_table import make_entry
from vitrail.data.preprocessing import Preprocessing

WRAPPER_PREFIX = "module."  # added by DataParallel
RENAMED_PREFIXES = ("layer#.#.downsample", "fc")  # shortcuts have no weights, and the head has another name
SHARED_NAMES = tuple(name for name in RESNET_NAMES if not name.startswith(RENAMED_PREFIXES))
NAME_TABLE = (*map(make_entry, SHARED_NAMES, SHARED_NAMES), make_entry("linear.*", "fc.*"))
WRAPPED_NAME_TABLE = tuple(make_entry(f"{WRAPPER_PREFIX}{row.theirs[0]}", row.ours) for row in NAME_TABLE)
SUPPORTED_VALUES = {
    "block": ("basic",),
    "stem": ("cifar",),
    "shortcut": ("padding",),
    "channels": (3,),
    "classes": (10,),
    "width": (16,),
    "number of stages": (3,),
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def matches(contents: RawContents) -> bool:
    names = layout.strip_common_prefixes(contents.tensors, WRAPPER_PREFIX)
    return "linear.weight" in names and "layer1.0.conv1.weight" in names


def read(contents: RawContents, known: Mapping[str, Any]) -> layout.TranslatedCheckpoint:
    tensors = layout.strip_common_prefixes(contents.tensors, WRAPPER_PREFIX)
    head = tensors.get("linear.weight")
    cifar10 = head is not None and len(head) == len(CIFAR10_CLASSES)  # its code supports no other data set
    model = layout.UntranslatedModel(
        layout="akamaster",
        family="resnet",
        tensors=tensors,
        table=NAME_TABLE,
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
    config = description.config
    layout.check_representable("akamaster", {**config, "number of stages": len(config["stages"])}, SUPPORTED_VALUES)
    layout.rename_and_write_tensors("akamaster", tensors, WRAPPED_NAME_TABLE, 1, path, wrapper="state_dict")
    return {}


LAYOUT = layout.Layout(name="akamaster", matches=matches, read=read, write=write, families=("resnet",))
