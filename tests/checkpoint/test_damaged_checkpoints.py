"""Randomly damaged files of all layouts are loaded or refused in one line, and nothing worse happens.

A mutation depends only on the name of its source and its number, so that it can be repeated after a failure. Our own
folders get as many mutations as all others together: 2,000, or 10,000 in `make fuzz`. The damaged file stays in the
test's folder, also after a crash.
"""

import json
import random
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.google_vit_reference import random_weights
from support.noisy_weights import add_weight_noise
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import vitrail
from vitrail.base.errors import VitrailError
from vitrail.checkpoint import read

TOY: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
LENGTHS = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 10**9, 10**18, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = (
    "",
    "gelu",
    "\n",
    0,
    -1,
    1.5,
    10**30,
    1e308,
    float("nan"),
    float("-inf"),
    True,
    None,
    [],
    [[]],
    {},
    {"0": 1},
    [0, 0],
    [1, 2, 3],
)
MARKS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"\x93NUMPY")  # followed by headers


def timm_model(**changes: Any) -> Any:
    return add_weight_noise(timm.create_model("vit_tiny_patch16_224", **{**TOY, **changes}))


def vitrail_folder(place: Path) -> None:
    fields: dict[str, Any] = {"image_size": 16, "patch_size": 8, "depth": 1, "width": 16, "heads": 2, "classes": 3}
    model = add_weight_noise(vitrail.create("deit_tiny_distilled_patch16_224", **fields))
    vitrail.save(model, place, preprocessing=vitrail.Preprocessing(image_size=16), labels=["a", "b", "c"])


def timm_safetensors(place: Path) -> None:
    save_file(timm_model().state_dict(), place / "weights.safetensors", {"format": "pt"})


def deit_pth(place: Path) -> None:
    tensors = {
        name.replace("ls1.gamma", "gamma_1"): each for name, each in timm_model(init_values=0.1).state_dict().items()
    }
    tensors = {name.replace("ls2.gamma", "gamma_2"): each for name, each in tensors.items()}
    torch.save({"model": tensors, "epoch": 3, "args": Namespace(lr=0.1)}, place / "weights.pth")


def legacy_pth(place: Path) -> None:
    torch.save(timm_model().state_dict(), place / "weights.pth", _use_new_zipfile_serialization=False)


def hf_folder(place: Path) -> None:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8
    )
    add_weight_noise(ViTForImageClassification(config)).save_pretrained(place)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(place)


def torchvision_pth(place: Path) -> None:
    model = TorchvisionViT(16, 8, 1, 2, 16, 64, num_classes=3)
    torch.save(add_weight_noise(model).state_dict(), place / "weights.pth")


def akamaster_th(place: Path) -> None:
    model = add_weight_noise(vitrail.create("resnet20_cifar", stages=(1, 1, 1)))
    vitrail.save(model, place / "weights.th", to="akamaster")


def t2t_pth(place: Path) -> None:
    fields: dict[str, Any] = {"image_size": 16, "stage_width": 4, "width": 16, "depth": 1, "heads": 2, "classes": 3}
    vitrail.save(add_weight_noise(vitrail.create("t2t_vit_7", **fields)), place / "weights.pth", to="t2t")


def google_npz(place: Path) -> None:
    weights: Any = random_weights(layout="original", width=16, heads=2, depth=1, image=(16, 16), classes=3)
    np.savez(place / "weights.npz", **weights)


def deflated_npz(place: Path) -> None:
    weights: Any = random_weights(
        layout="big_vision", scan=True, pool="map", width=16, heads=2, depth=1, image=(16, 16), classes=3
    )
    np.savez_compressed(place / "weights.npz", **weights)


SOURCES: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        vitrail_folder,
        timm_safetensors,
        deit_pth,
        legacy_pth,
        hf_folder,
        torchvision_pth,
        akamaster_th,
        t2t_pth,
        google_npz,
        deflated_npz,
    )
}


def find_sensitive_ranges(content: bytes) -> list[range]:
    """Ranges where a changed byte matters most: headers, directories, opcodes of a pickle, a complete text."""
    if content[:1] == b"{":
        return [range(len(content))]
    if content[8:9] == b"{":
        return [range(8), range(8, 8 + int.from_bytes(content[:8], "little"))]
    if content[:2] != b"PK":
        return [range(len(content) // 4)]  # a pickle, then values
    places = [at for mark in MARKS for at in find_all(content, mark)]
    pickled = content.find(b"\x80\x02")
    steps = (
        [] if pickled < 0 else [range(pickled, content.find(b"PK", pickled))] * len(places)
    )  # as often as the others
    return [range(at, min(at + 100, len(content))) for at in places] + steps


def find_all(content: bytes, mark: bytes) -> Iterator[int]:
    at = content.find(mark)
    while at >= 0:
        yield at
        at = content.find(mark, at + 1)


def mutate(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """Damage a file in one of many ways; `other` is a file to splice with."""
    data, regions = bytearray(content), find_sensitive_ranges(content)

    def place() -> int:
        return draw.randrange(len(content)) if draw.random() < 0.1 else draw.choice(draw.choice(regions))

    def block() -> slice:
        start = place()
        return slice(start, start + draw.choice((1, 2, 8, 64, 512, 4096)))

    kind = draw.choices(("bytes", "bits", "length", "cut", "swap", "insert", "repeat", "splice", "value"), k=1)[0]
    if kind == "bytes":
        for _ in range(draw.randint(1, 4)):
            data[place()] = draw.randrange(256)
    elif kind == "bits":
        for _ in range(draw.randint(1, 3)):
            data[place()] ^= 1 << draw.randrange(8)
    elif kind == "length":
        size, at = draw.choice((1, 2, 4, 8)), place()
        data[at : at + size] = (draw.choice(LENGTHS) % 256**size).to_bytes(size, draw.choice(("little", "big")))
    elif kind == "cut":
        del data[draw.randrange(len(data)) if draw.random() < 0.5 else place() :]
    elif kind == "swap":
        one, two = block(), block()
        data[one], data[two] = data[two], data[one]
    elif kind == "insert":
        at = place()
        data[at:at] = draw.randbytes(draw.choice((1, 2, 8, 64)))
    elif kind == "repeat":
        part = block()
        data[part.stop : part.stop] = data[part] * draw.choice((1, 2, 50))
    elif kind == "splice":
        data[place() :] = other[draw.randrange(len(other)) :]
    elif content[:1] == b"{":
        return mutate_json_value(content, draw)
    else:
        del data[block()]
    return bytes(data)


def mutate_json_value(content: bytes, draw: random.Random) -> bytes:
    """Replace or delete a random value; the text is still JSON."""
    data: Any = json.loads(content)
    inside = data
    while True:
        key = draw.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not isinstance(inside[key], dict | list) or not inside[key] or draw.random() < 0.3:
            break
        inside = inside[key]
    if draw.random() < 0.2:
        del inside[key]
    else:
        inside[key] = draw.choice(VALUES)
    return json.dumps(data).encode()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    places = {name: tmp_path_factory.mktemp(name) for name in SOURCES}
    for name, place in places.items():
        SOURCES[name](place)
    return places


@pytest.mark.parametrize("source", SOURCES)
def test_damaged_files_load_or_are_refused_in_one_line(
    source: str, originals: dict[str, Path], tmp_path: Path, mutations: int
) -> None:
    place = tmp_path / source
    shutil.copytree(originals[source], place)
    files = {path: path.read_bytes() for path in sorted(place.iterdir())}
    target = place if len(files) > 1 else next(iter(files))
    others = [path.read_bytes() for folder in originals.values() for path in sorted(folder.iterdir())]
    fields: dict[str, Any] = {} if source in ("vitrail_folder", "hf_folder", "akamaster_th") else {"heads": 2}
    assert read(target, **fields).model.config.width == 16  # undamaged, it loads
    refused, share = 0, mutations if source == "vitrail_folder" else mutations // (len(SOURCES) - 1)
    for number in range(share):
        draw = random.Random(f"{source} {number}")
        path = draw.choice(list(files))
        path.write_bytes(mutate(files[path], draw.choice(others), draw))
        message = ""
        try:
            read(target, **fields)
        except VitrailError as error:
            message = str(error)
        except BaseException as error:
            error.add_note(f"mutation {number} of {source}, in {path}")
            raise
        assert len(message.splitlines()) <= 1, f"mutation {number} of {source}"
        refused += bool(message)
        path.write_bytes(files[path])
    assert share // 4 < refused <= share, "some damage is detected; some is harmless, if the files have no checksums"
