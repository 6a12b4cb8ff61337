"""An exported model on disk: model.onnx, and config.json with all that predicting takes. Read without torch."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import CheckpointError, ConfigError, one_line, unknown
from vitrail.files import check_regular, file_checksum, open_regular, read_text, write_text
from vitrail.parsing import parse_json, with_checksum, without_checksum

MODEL, CONFIG, PROGRAM = "model.onnx", "config.json", "model.pt2"
DATA = f"{MODEL}.data"  # weights that exceed the 2 GB limit of model.onnx
PARTS = (DATA, MODEL, PROGRAM, CONFIG)  # all that an export may consist of, the description last
METADATA = "vitrail"  # the key of the same description inside the ONNX file
FORMAT = 1  # grows only when an older vitrail can no longer use the file
PRECISIONS = ("fp32", "int8")
Output = Literal["logits", "class", "mean", "tokens"]  # what comes out: answers, or features
OUTPUTS: tuple[Output, ...] = get_args(Output)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a model that is no export
KINDS: dict[str, type | tuple[type, ...]] = {
    "precision": str,
    "output": str,
    "classes": int,
    "multiple": int,
    "merge": int,
    "agreement": (dict, type(None)),
    "provenance": dict,
    "digest": str,
    "files": dict,
}
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What config.json says of an exported model."""

    precision: Literal["fp32", "int8"]
    output: Output
    classes: int
    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None  # one a class, in order
    multiple: int = 0  # of which rows and columns may be any multiple; 0: they are those of the preprocessing
    merge: int = 0  # tokens that each layer merges
    agreement: Mapping[str, int] | None = None  # of int8 with fp32: pictures shown, and of how many the answer is
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    digest: str = ""  # of the weights that were exported
    files: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)  # SHA-256 by name; in config.json

    def to_json(self) -> str:
        """As JSON, without `files`: a file cannot hold its own checksum."""
        about = {name: value for name, value in asdict(self).items() if name != "files"}
        return json.dumps({"format": FORMAT, "exported": True, **about}, ensure_ascii=False, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Writes config.json with checksums of the files in the folder and of itself."""
        files = {name: file_checksum(folder / name) for name in PARTS if name != CONFIG and (folder / name).exists()}
        about = with_checksum({**json.loads(self.to_json()), "files": files})
        write_text(folder / CONFIG, json.dumps(about, ensure_ascii=False, allow_nan=False))

    @classmethod
    def from_json(cls, text: str, where: str) -> "Exported":
        """Reads back `to_json`; what a newer vitrail added is an error only where the format says so."""
        try:
            data: Any = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is not JSON: {error}; expected what `vitrail export` wrote") from None
        if isinstance(data, dict):
            try:
                data = without_checksum(data)
            except ValueError as error:
                raise CheckpointError(f"{where}: {error}") from None
        if not isinstance(data, dict) or data.get("exported") is not True:
            raise CheckpointError(f"{where} does not describe an exported model; expected what `vitrail export` wrote")
        if data.get("format") != FORMAT:
            given = f"{where} is of format {data.get('format')!r}"
            raise CheckpointError(f"{given}; expected {FORMAT}: update vitrail, or export the model again")
        try:
            return cls(**checked(data))
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{where}: {error}; expected what `vitrail export` wrote") from None


def checked(data: dict[str, Any]) -> dict[str, Any]:
    ours = {each.name for each in fields(Exported)}
    data = {name: value for name, value in data.items() if name in ours}
    for name, kind in KINDS.items():
        if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool)):
            raise ConfigError(f"{name} is {repr(data[name])[:40]}")
        if kind is int and data.get(name, 0) < 0:
            raise ConfigError(f"{name} is {data[name]}")
    for name, known in (("precision", PRECISIONS), ("output", OUTPUTS)):
        if data.get(name) not in known:
            raise unknown(name, data.get(name), known)
    for name, checksum in data.get("files", {}).items():
        if name not in PARTS or not isinstance(checksum, str) or not SHA256.fullmatch(checksum):
            raise ConfigError(f"files has {name[:40]!r}: {repr(checksum)[:40]}")
    seen = data.get("agreement")
    if seen and (set(seen) != {"pictures", "same"} or not all(type(each) is int for each in seen.values())):
        raise ConfigError(f"agreement is {repr(seen)[:40]}")
    how, labels = data.get("preprocessing"), data.get("labels")
    if not isinstance(how, dict):
        raise ConfigError(f"preprocessing is {repr(how)[:40]}")
    data["preprocessing"] = Preprocessing().changed(how)
    if labels is not None:
        if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
            raise ConfigError(f"labels is {repr(labels)[:40]}")
        if len(labels) != data.get("classes"):
            raise ConfigError(f"{len(labels)} labels for {data.get('classes')} classes")
        data["labels"] = tuple(labels)
    return data


def is_exported(place: str | Path) -> bool:
    """A folder that says so or has such a file and no weights beside it, or the ONNX file itself."""
    path = Path(place)
    if path.suffix == ".onnx" or says_exported(path):
        return True
    there = [name for name in (MODEL, PROGRAM, *WEIGHTS) if (path / name).exists()]
    return there in ([MODEL], [PROGRAM], [MODEL, PROGRAM])


def says_exported(folder: Path) -> bool:
    try:
        with os.fdopen(open_regular(folder / CONFIG), "rb") as file:  # closes the descriptor, too
            return b'"exported": true' in file.read(100)
    except OSError:
        return False


def model_file(place: str | Path) -> Path:
    """The ONNX file; where it is missing, what is there instead."""
    path = Path(place)
    file = path if path.suffix == ".onnx" else path / MODEL
    try:
        check_regular(os.stat(file))  # noqa: PTH116
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from None
    else:
        return file
    if (path / PROGRAM).exists():
        raise CheckpointError(
            f"{place} holds a program for torch.export.load, {PROGRAM}; expected {MODEL}: vitrail export --to onnx"
        )
    raise CheckpointError(f"{file} is missing; expected what `vitrail export` wrote: {MODEL} and {CONFIG}")


def description(place: str | Path, inside: Mapping[str, str]) -> Exported:
    """What config.json says, as a person may have edited it; without one what the file itself says of itself."""
    file = model_file(place)
    about = description_in(place)
    if about is not None:
        return about
    if METADATA not in inside:
        raise CheckpointError(
            f"{file} does not say how it sees pictures; expected what `vitrail export` wrote, or {CONFIG} beside it"
        )
    return Exported.from_json(inside[METADATA], f"the metadata of {file}")


def description_in(place: str | Path) -> Exported | None:
    """The description in the folder's config.json; None if `place` is a file, or the folder has none."""
    config = Path(place) / CONFIG
    if not Path(place).is_dir() or not os.path.lexists(config):
        return None
    try:
        text = read_text(config)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config} cannot be read: {one_line(error)}") from None
    return Exported.from_json(text, str(config))
