"""The tensors in a file that somebody else wrote, whatever its kind; nothing in it is run, and little of it copied."""

import json
import pickletools
import zipfile
from argparse import Namespace
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.errors import CheckpointError

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # as hubs name them
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".th", ".npz")
WRAPPERS = ("teacher", "state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")
LARGEST_JSON = 2**24  # bytes; also of a pickle without its tensors
MOST_STEPS = 2**21  # of a pickle
UNPACKED = 2  # no file unpacks to more than so many times its size
ELSEWHERE = {  # first bytes of what people also try
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"version https://git-lfs": "the pointer of a Git LFS file (get the file itself: git lfs pull)",
    b"\x93NUMPY": "a single NumPy array",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page (was it a failed download?)",
}
DAMAGE = (
    SafetensorError, OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError,
    UnpicklingError, OverflowError, RecursionError, MemoryError, AssertionError, NotImplementedError,
    zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The tensors by the names they have in the file, and what stands beside them."""

    path: Path  # as it was given
    kind: Literal["safetensors", "pickle", "npz"]
    tensors: dict[str, Tensor]
    wrapper: str = ""  # the key that a pickle keeps them under
    others: tuple[str, ...] = ()  # what else a pickle holds
    header: Mapping[str, str] = field(default_factory=dict[str, str])  # of a safetensors file
    config: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] | None = None


def read_contents(path: Path) -> Contents:
    """A file, or a folder as hubs keep it: weights in one file or several, config.json, preprocessor_config.json."""
    with damage_named(path):
        if path.is_dir():
            files, folder = weights_in(path), path
        elif path.is_file():
            files, folder = [path], path.parent if path.name in WEIGHTS else None
        elif path.exists():
            raise CheckpointError(f"{path} is neither a file nor a folder; expected a checkpoint")
        else:
            raise CheckpointError(f"{path} does not exist; expected a checkpoint file or folder")
    parts = [read_file(each) for each in files]
    beside = {} if folder is None else {name: read_json(folder / name) for name in (CONFIG, PREPROCESSOR)}
    return Contents(
        path=path,
        kind=parts[0].kind,
        tensors={name: tensor for part in parts for name, tensor in part.tensors.items()},
        wrapper=parts[0].wrapper,
        others=parts[0].others,
        header=parts[0].header,
        config=beside.get(CONFIG),
        preprocessor=beside.get(PREPROCESSOR),
    )


def weights_in(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = read_json(folder / f"{name}.index.json")
        if index is not None:
            shards = index.get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(each, str) for each in shards.values()):
                raise CheckpointError(f"{folder / name}.index.json has no weight_map; expected names and their files")
            if any(Path(each).name != each for each in shards.values()):
                raise CheckpointError(f"{folder / name}.index.json names files outside its folder")
            return [folder / each for each in sorted(set(shards.values()))]
    found = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS and path.is_file())
    if len(found) == 1:
        return found
    names = ", ".join(path.name for path in found[:5]) or "none"
    raise CheckpointError(f"{folder} has {len(found)} files of weights ({names}); expected model.safetensors, or one")


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} is no file, or too large; expected a JSON object")
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}; expected a JSON object") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object")
    return data


def read_file(path: Path) -> Contents:
    """One file, known by its first bytes and not by its name."""
    with damage_named(path):
        with path.open("rb") as file:
            start = file.read(32)
        size = path.stat().st_size
        if start[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                check_archive(path, archive)
                names = archive.namelist()
                if any(name.endswith(".npy") for name in names):
                    return Contents(path=path, kind="npz", tensors=read_arrays(path, archive))
                pickled = next((name for name in names if name.endswith("/data.pkl")), None)
                if pickled is None:
                    raise CheckpointError(
                        f"{path} is a zip file without tensors; expected what torch.save or np.savez wrote"
                    )
                with archive.open(pickled) as stream:
                    check_pickle(path, stream)
            return read_pickle(path, mmap=True)
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return Contents(path=path, kind="safetensors", tensors=tensors, header=file.metadata() or {})
        if start[:1] == b"\x80":
            with path.open("rb") as file:
                wanted = check_pickle(path, file)
                if file.tell() == size:  # torch's own begins with a magic number, and more follows
                    wants = f" that wants to run {wanted[0]}" if wanted else ""
                    raise CheckpointError(f"{path} is a plain pickle{wants}; refused: expected what torch.save wrote")
                for _ in range(3):  # the version, the machine, and then what was saved
                    check_pickle(path, file)
            return read_pickle(path, mmap=False)
    found = next((what for first, what in ELSEWHERE.items() if start.startswith(first)), "no such file")
    if size == 0:
        found = "empty"
    raise CheckpointError(f"{path} is {found}; expected .safetensors, a .pth or .bin by torch.save, or .npz")


def check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > UNPACKED * path.stat().st_size + 4096:
        raise CheckpointError(
            f"{path} of {path.stat().st_size} bytes would unpack to {unpacked}; expected weights, which hardly shrink"
        )


def read_arrays(path: Path, archive: zipfile.ZipFile) -> dict[str, Tensor]:
    """The arrays of numbers; each header is checked against the bytes that are there before anything is made for it."""
    kinds: dict[str, np.dtype[Any]] = {}
    for info in archive.infolist():
        with archive.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = read[version](stream)
            if dtype.hasobject:
                raise CheckpointError(f"{path} holds pickled objects ({info.filename}), which could run code; refused")
            count = 1
            for length in shape:
                count *= length
            if count * dtype.itemsize != info.file_size - stream.tell():
                raise CheckpointError(
                    f"{path}: {info.filename} says {shape}, which is not its size; it may be truncated"
                )
        kinds[info.filename.removesuffix(".npy")] = dtype
    numbers = [name for name, kind in kinds.items() if kind.kind in "fiub" or is_bfloat16(kind)]
    with np.load(path, allow_pickle=False) as arrays:
        return {name: from_array(arrays[name]) for name in numbers}


def is_bfloat16(kind: np.dtype[Any]) -> bool:
    return kind.kind == "V" and kind.itemsize == 2 and kind.names is None  # NumPy has no name for it


def from_array(array: Any) -> Tensor:
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def check_pickle(path: Path, stream: IO[bytes]) -> list[str]:
    """What a pickle would call, from its steps without taking them; torch takes harmless ones, but one takes memory."""
    wanted, texts = list[str](), ["", ""]
    for step, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        if isinstance(argument, str):
            texts = [texts[-1], argument]
        if operation.name in ("GLOBAL", "STACK_GLOBAL"):
            wanted.append(str(argument or " ".join(texts)).replace(" ", "."))
            if wanted[-1].endswith(".bytearray"):
                raise CheckpointError(f"{path} wants to make a bytearray; expected tensors; refused")
        if step > MOST_STEPS:
            raise CheckpointError(f"{path} has more than {MOST_STEPS} steps beside its tensors; expected weights")
    return wanted


def read_pickle(path: Path, *, mmap: bool) -> Contents:
    with torch.serialization.safe_globals([Namespace]):  # of a script's arguments: holds values, runs nothing
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a dict of names and tensors")
    wrapper = next((key for key in WRAPPERS if isinstance(data.get(key), dict)), "")
    inside = data[wrapper] if wrapper else data
    tensors = {name: tensor.detach() for name, tensor in inside.items() if isinstance(tensor, Tensor)}
    if not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path} has tensors under keys that are no texts; expected names")
    odd = [name for name, tensor in tensors.items() if not is_plain(tensor)]
    if odd:
        raise CheckpointError(f"{path}: {odd[0]} is sparse, quantised or without values; expected plain tensors")
    if sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) > UNPACKED * path.stat().st_size:
        raise CheckpointError(f"{path} describes more numbers than it holds; expected weights")
    others = tuple(str(key) for key in data if key != wrapper) if wrapper else ()
    return Contents(path=path, kind="pickle", tensors=tensors, wrapper=wrapper, others=others)


def is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and not tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)


@contextmanager
def damage_named(path: Path) -> Generator[None]:
    """Whatever a damaged file makes the libraries raise is one line; one that wants to run code is refused by name."""
    try:
        yield
    except CheckpointError:
        raise
    except DAMAGE as error:
        text = str(error)
        if "weights_only" in text or "Unsupported" in text:
            wants = next(iter(named_in(text)), "something that is no tensor")
            raise CheckpointError(
                f"{path} is a pickle that wants to run {wants}; refused: expected tensors only, "
                "such as torch.save(model.state_dict(), path) writes"
            ) from None
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}; it may be truncated or damaged") from None


def named_in(text: str) -> Iterable[str]:
    """What torch refused, out of its long message: `Unsupported global: GLOBAL posix.system was not …`."""
    words = pairwise(text.replace("`", " ").split())
    return (after.rstrip(".,") for word, after in words if word in ("GLOBAL", "class", "function"))


def one_line(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:160]
