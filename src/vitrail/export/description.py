"""An exported model on disk: model.onnx, and config.json with labels and preprocessing. Read without torch."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.base.errors import CheckpointError, ConfigError, describe_error, unknown_name_error
from vitrail.base.files import check_regular_file, file_checksum, open_regular_file_descriptor, read_text, write_text
from vitrail.base.json_yaml import add_checksum, parse_json, verify_and_remove_checksum
from vitrail.data.images.preprocessing import Preprocessing

ONNX_FILE, CONFIG_FILE, TORCH_PROGRAM_FILE = "model.onnx", "config.json", "model.pt2"
ONNX_DATA_FILE = f"{ONNX_FILE}.data"  # weights that exceed the 2 GB limit of model.onnx
CTRANSLATE2_FILES = ("model.bin", "shared_vocabulary.json", "tokenizer.json")
EXPORT_FILES = (  # of any export, in the order of writing
    *(ONNX_DATA_FILE, ONNX_FILE, TORCH_PROGRAM_FILE),
    *CTRANSLATE2_FILES,
    CONFIG_FILE,
)
METADATA_KEY = "vitrail"  # the key of the same description inside the ONNX file
FORMAT_VERSION = 1  # grows only when an older vitrail can no longer use the file
PRECISIONS = ("fp32", "int8")
OutputKind = Literal["logits", "class", "mean", "tokens", "maps"]  # logits, or one kind of features
OUTPUT_KINDS: tuple[OutputKind, ...] = get_args(OutputKind)
CHECKPOINT_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # in a checkpoint, not in an export
FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
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
SHA256_PATTERN = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ExportDescription:
    """The contents of config.json."""

    precision: Literal["fp32", "int8"]
    output: OutputKind
    classes: int
    preprocessing: Preprocessing
    labels: tuple[str, ...] | None = None  # one per class, in order
    multiple: int = 0  # the image size may be any multiple of it; 0: it is fixed
    merge: int = 0  # tokens merged per layer
    agreement: Mapping[str, int] | None = None  # of int8 with fp32: images compared, and those that agree
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])
    digest: str = ""  # of the weights that were exported
    files: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)  # SHA-256 by name; in config.json

    def to_json(self) -> str:
        """The description as JSON, without `files`: a file cannot contain its own checksum."""
        about = {name: value for name, value in asdict(self).items() if name != "files"}
        return json.dumps({"format": FORMAT_VERSION, "exported": True, **about}, ensure_ascii=False, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write config.json, with checksums of the files in the folder and of itself."""
        files = {
            name: file_checksum(folder / name)
            for name in EXPORT_FILES
            if name != CONFIG_FILE and (folder / name).exists()
        }
        about = add_checksum({**json.loads(self.to_json()), "files": files})
        write_text(folder / CONFIG_FILE, json.dumps(about, ensure_ascii=False, allow_nan=False))

    @classmethod
    def from_json(cls, text: str, where: str) -> "ExportDescription":
        """Read `to_json` back. Unknown fields of a newer vitrail are ignored unless the format has changed."""
        try:
            data: Any = parse_json(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is not JSON: {error}; expected what `vitrail export` wrote") from None
        if isinstance(data, dict):
            try:
                data = verify_and_remove_checksum(data)
            except ValueError as error:
                raise CheckpointError(f"{where}: {error}") from None
        if not isinstance(data, dict) or data.get("exported") is not True:
            raise CheckpointError(f"{where} does not describe an exported model; expected what `vitrail export` wrote")
        if data.get("format") != FORMAT_VERSION:
            given = f"{where} is of format {data.get('format')!r}"
            raise CheckpointError(f"{given}; expected {FORMAT_VERSION}: update vitrail, or export the model again")
        try:
            return cls(**parse_description_fields(data))
        except (ConfigError, TypeError) as error:
            raise CheckpointError(f"{where}: {error}; expected what `vitrail export` wrote") from None


def parse_description_fields(data: dict[str, Any]) -> dict[str, Any]:
    ours = {each.name for each in fields(ExportDescription)}
    data = {name: value for name, value in data.items() if name in ours}
    for name, kind in FIELD_TYPES.items():
        if name in data and (not isinstance(data[name], kind) or isinstance(data[name], bool)):
            raise ConfigError(f"{name} is {repr(data[name])[:40]}")
        if kind is int and data.get(name, 0) < 0:
            raise ConfigError(f"{name} is {data[name]}")
    for name, known in (("precision", PRECISIONS), ("output", OUTPUT_KINDS)):
        if data.get(name) not in known:
            raise unknown_name_error(name, data.get(name), known)
    for name, checksum in data.get("files", {}).items():
        if name not in EXPORT_FILES or not isinstance(checksum, str) or not SHA256_PATTERN.fullmatch(checksum):
            raise ConfigError(f"files has {name[:40]!r}: {repr(checksum)[:40]}")
    seen = data.get("agreement")
    if seen and (set(seen) != {"pictures", "same"} or not all(type(each) is int for each in seen.values())):
        raise ConfigError(f"agreement is {repr(seen)[:40]}")
    how, labels = data.get("preprocessing"), data.get("labels")
    if not isinstance(how, dict):
        raise ConfigError(f"preprocessing is {repr(how)[:40]}")
    data["preprocessing"] = Preprocessing().with_fields(how)
    if labels is not None:
        if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
            raise ConfigError(f"labels is {repr(labels)[:40]}")
        if len(labels) != data.get("classes"):
            raise ConfigError(f"{len(labels)} labels for {data.get('classes')} classes")
        data["labels"] = tuple(labels)
    return data


def is_exported(place: str | Path) -> bool:
    """Whether a path is an ONNX file, or a folder with an export in it and no weights next to it."""
    path = Path(place)
    if path.suffix == ".onnx":
        return True
    if not path.is_dir():
        return False
    if has_export_config(path):
        return True
    there = [name for name in (ONNX_FILE, TORCH_PROGRAM_FILE, *CHECKPOINT_WEIGHT_FILES) if (path / name).exists()]
    return there in ([ONNX_FILE], [TORCH_PROGRAM_FILE], [ONNX_FILE, TORCH_PROGRAM_FILE])


def has_export_config(folder: Path) -> bool:
    try:
        with os.fdopen(open_regular_file_descriptor(folder / CONFIG_FILE), "rb") as file:  # closes the descriptor, too
            return b'"exported": true' in file.read(100)
    except OSError:
        return False


def find_onnx_file(place: str | Path) -> Path:
    """The ONNX file of an export; if it is missing, the error says what is there instead."""
    path = Path(place)
    file = path if path.suffix == ".onnx" else path / ONNX_FILE
    try:
        check_regular_file(os.stat(file))  # noqa: PTH116
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {describe_error(error)}") from None
    else:
        return file
    if (path / TORCH_PROGRAM_FILE).exists():
        raise CheckpointError(
            f"{place} contains a program for torch.export.load, {TORCH_PROGRAM_FILE}; expected {ONNX_FILE}: "
            "export the model to onnx"
        )
    if (path / CTRANSLATE2_FILES[0]).exists():
        raise CheckpointError(
            f"{place} contains a model that translates, for ctranslate2.Translator; expected {ONNX_FILE}: a model that "
            "reads images"
        )
    raise CheckpointError(f"{file} is missing; expected what `vitrail export` wrote: {ONNX_FILE} and {CONFIG_FILE}")


def read_description(place: str | Path, metadata: Mapping[str, str]) -> ExportDescription:
    """The description in config.json, which a user may have edited; without one, that in the ONNX file."""
    file = find_onnx_file(place)
    about = read_folder_description(place)
    if about is not None:
        return about
    if METADATA_KEY not in metadata:
        raise CheckpointError(
            f"{file} has no preprocessing; expected what `vitrail export` wrote, or {CONFIG_FILE} next to it"
        )
    return ExportDescription.from_json(metadata[METADATA_KEY], f"the metadata of {file}")


def read_folder_description(place: str | Path) -> ExportDescription | None:
    """The description in the folder's config.json; None if `place` is a file, or the folder has none."""
    config = Path(place) / CONFIG_FILE
    if not Path(place).is_dir() or not os.path.lexists(config):
        return None
    try:
        text = read_text(config)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config} cannot be read: {describe_error(error)}") from None
    return ExportDescription.from_json(text, str(config))
