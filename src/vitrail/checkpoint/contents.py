"""The tensors in a file that somebody else wrote, whatever its kind; nothing in it is run, and little of it copied."""

import struct
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import IO, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.checkpoint.archives import UNPACKED, check_archive, check_directory, read_arrays
from vitrail.checkpoint.pickles import check_pickle, runs_code
from vitrail.errors import CheckpointError, one_line
from vitrail.files import FILES, read_text
from vitrail.parsing import parse_json

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # as hubs name them
ENDINGS = (*FILES, ".th")
WRAPPERS = ("teacher", "state_dict_ema", "model_ema", "model", "state_dict", "model_state_dict", "module")
LARGEST_JSON = 2**22  # bytes; also of the header of a safetensors file
MOST_TENSORS = 2**14  # in one file
ELSEWHERE = {  # first bytes of what people also try
    b"\x89HDF": "an HDF5 file, as Keras writes",
    b"version https://git-lfs": "the pointer of a Git LFS file (get the file itself: git lfs pull)",
    b"\x93NUMPY": "a single NumPy array",
    b"\x08": "perhaps an ONNX file",
    b"<": "a web page (was it a failed download?)",
}
DAMAGE = (
    SafetensorError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, SyntaxError,
    UnpicklingError, ArithmeticError, MemoryError, AssertionError, TokenError, struct.error, zipfile.BadZipFile,
    zlib.error,
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
            if not isinstance(shards, dict) or not shards or not all(isinstance(each, str) for each in shards.values()):
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
    """The JSON object in a small file, None where there is no such file."""
    try:
        data = parse_json(read_text(path, LARGEST_JSON))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link that leads nowhere; expected a JSON object") from None
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}; expected a JSON object") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a JSON object")
    return data


def read_file(path: Path) -> Contents:
    """One file, known by its first bytes and not by its name."""
    with damage_named(path):
        if not path.is_file():  # opening a pipe would wait for somebody to write to it
            raise CheckpointError(f"{path} is missing, or no file; expected weights")
        with path.open("rb") as file:
            start, size = file.read(32), path.stat().st_size
            if start[:2] == b"PK":
                return read_archive(path, file, size)
            if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size - 8:
                return read_safetensors(path, file)
            if start[:1] == b"\x80":
                return read_legacy(path, file, size)
    found = next((what for first, what in ELSEWHERE.items() if start.startswith(first)), "of no known kind")
    if size == 0:
        found = "empty"
    raise CheckpointError(f"{path} is {found}; expected .safetensors, a .pth or .bin by torch.save, or .npz")


def read_safetensors(path: Path, file: IO[bytes]) -> Contents:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_JSON or file.read(length).count(b"{") > MOST_TENSORS:
        raise CheckpointError(f"{path} has a header of {length} bytes, with too many tensors; expected weights")
    with safe_open(path, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return Contents(path=path, kind="safetensors", tensors=tensors, header=opened.metadata() or {})


def read_archive(path: Path, file: IO[bytes], size: int) -> Contents:
    check_directory(path, file, size)
    with zipfile.ZipFile(path) as archive:
        check_archive(path, file, size, archive)
        names = archive.namelist()
        if any(name.endswith(".npy") for name in names):
            return Contents(path=path, kind="npz", tensors=read_arrays(path, archive))
        folder = names[0].split("/")[0] if names else ""  # as torch finds it
        if f"{folder}/data.pkl" not in names:
            raise CheckpointError(f"{path} is a zip file without tensors; expected what torch.save or np.savez wrote")
        with archive.open(f"{folder}/data.pkl") as stream:
            check_pickle(path, stream, size)
    return read_pickle(path)


def read_legacy(path: Path, file: IO[bytes], size: int) -> Contents:
    """What torch.save wrote until 1.6: five pickles, the first of them a magic number, and then the numbers."""
    file.seek(0)
    wanted = check_pickle(path, file, size)
    if file.tell() == size:
        wants = f" that wants to run {wanted[0]}" if wanted else ""
        raise CheckpointError(f"{path} is a plain pickle{wants}; refused: expected what torch.save wrote")
    for _ in range(4):  # the version, the machine, what was saved, and in which order its numbers follow
        check_pickle(path, file, size)
    return read_pickle(path)


def read_pickle(path: Path) -> Contents:
    with torch.serialization.safe_globals([Namespace]):  # of a script's arguments: holds values, runs nothing
        # not mapped: torch.save writes in place, and would pull the memory from under a model that lies in the file
        data = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a dict of names and tensors")
    wrapper = wrapper_of(data)
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
    return Contents(path=path, kind="pickle", tensors=apart(tensors), wrapper=wrapper, others=others)


def wrapper_of(data: Mapping[Any, Any]) -> str:
    """The key that the tensors lie under: of two the average over training; a teacher only beside its student."""
    holding = [key for key in WRAPPERS if isinstance(data.get(key), dict) and any_tensor(data[key])]
    return next((key for key in holding if key != "teacher" or "student" in data), "")


def any_tensor(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(each, Tensor) for each in values.values())


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor in memory of its own: two that share it would be trained as one."""
    seen, own = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in seen or not tensor.is_contiguous() else tensor
        seen.add(place)
    return own


def is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return strided and not tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)


@contextmanager
def damage_named(path: Path) -> Generator[None]:
    """Whatever a damaged file makes the libraries raise is one line; one that wants to run code is refused by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes, old protocols: what matters of them is raised too
            yield
    except CheckpointError:
        raise
    except DAMAGE as error:
        text = str(error)
        if "weights_only" in text or "Unsupported" in text:
            wants = next(iter(named_in(text)), "something that is no tensor")
            raise runs_code(path, wants) from None
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}; it may be truncated or damaged") from None


def named_in(text: str) -> Iterable[str]:
    """What torch refused, out of its long message: `Unsupported global: GLOBAL posix.system was not …`."""
    words = pairwise(text.replace("`", " ").split())
    return (after.rstrip(".,") for word, after in words if word in ("GLOBAL", "class", "function"))
