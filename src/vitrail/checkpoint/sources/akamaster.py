"""akamaster's pytorch_resnet_cifar10: the ResNets of the paper for CIFAR-10, {"state_dict": …} of a DataParallel."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.checkpoint.contents import Contents
from vitrail.checkpoint.convnets import RESNET
from vitrail.checkpoint.description import Description
from vitrail.checkpoint.layout import IMAGENET, Found, Layout, found, holds, stripped, write_table
from vitrail.checkpoint.names import entry
from vitrail.data.preprocessing import Preprocessing

PREFIX = "module."  # as DataParallel names what it holds
OTHERWISE = ("layer#.#.downsample", "fc")  # its shortcuts have no weights, and its head has another name
SAME = tuple(name for name in RESNET if not name.startswith(OTHERWISE))
TABLE = (*map(entry, SAME, SAME), entry("linear.*", "fc.*"))
WRAPPED = tuple(entry(f"{PREFIX}{row.theirs[0]}", row.ours) for row in TABLE)
ONLY = {
    "block": ("basic",),
    "stem": ("cifar",),
    "shortcut": ("padding",),
    "channels": (3,),
    "classes": (10,),
    "width": (16,),
    "number of stages": (3,),
}
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def matches(contents: Contents) -> bool:
    names = stripped(contents.tensors, PREFIX)
    return "linear.weight" in names and "layer1.0.conv1.weight" in names


def read(contents: Contents, known: Mapping[str, Any]) -> Found:
    tensors = stripped(contents.tensors, PREFIX)
    head = tensors.get("linear.weight")
    return found(
        contents,
        tensors,
        TABLE,
        layout="akamaster",
        family="resnet",
        known=known,
        policy="timm",
        preprocessing=preprocessing,
        labels=CIFAR10 if head is not None and len(head) == len(CIFAR10) else None,  # its code knows no other data
    )


def preprocessing(config: Mapping[str, Any]) -> Preprocessing:
    """The whole picture; its code normalises CIFAR by ImageNet's numbers."""
    return Preprocessing(image_size=config["image_size"], crop=1.0, **IMAGENET)


def write(tensors: Mapping[str, Tensor], description: Description, path: Path) -> Mapping[str, Any]:
    config = description.config
    holds("akamaster", {**config, "number of stages": len(config["stages"])}, ONLY)
    write_table("akamaster", tensors, WRAPPED, 1, path, wrapper="state_dict")
    return {}


LAYOUT = Layout(name="akamaster", matches=matches, read=read, write=write, families=("resnet",))
