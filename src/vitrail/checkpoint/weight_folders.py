"""Folders as on a hub: weights, config.json, preprocessor_config.json, tokenizer.json; bundled ones. Needs no torch."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import WEIGHTS_FILE_SUFFIXES, make_folder, read_text, write_text
from vitrail.base.json_yaml import parse_json
from vitrail.base.text import abbreviate_list
from vitrail.models import TEXT_FAMILIES

CONFIG_FILE, PREPROCESSOR_FILE = "config.json", "preprocessor_config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # as hubs name them
WEIGHT_SUFFIXES = (*WEIGHTS_FILE_SUFFIXES, ".th")
CAPTIONER_FOLDERS = ENCODER_FOLDER, DECODER_FOLDER = "encoder", "decoder"  # a captioner has two models
INDEX_SUFFIX = ".index.json"  # lists the files of weights that are split
MAX_JSON_BYTES = 2**22  # also for the header of a safetensors file
TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 2**26


def find_weight_files(folder: Path) -> list[Path]:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return [folder / name]
        shards = list_shards(folder / f"{name}{INDEX_SUFFIX}")
        if shards is not None:
            files = [folder / shard for shard in shards]
            if missing := next((path for path in files if not path.is_file()), None):
                raise CheckpointError(f"{missing} is missing or is not a file; expected weights")
            return files
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if len(files) == 1:
        return files
    if is_captioner_folder(folder):
        raise CheckpointError(
            f"{folder} is a captioner of two models; describe images with `vitrail caption`, or open its "
            f"{folder / ENCODER_FOLDER}"
        )
    if not files:
        raise CheckpointError(f"{folder} is a folder without weights, not a model; expected model.safetensors in it")
    names = abbreviate_list([path.name for path in files], 5)
    raise CheckpointError(
        f"{folder} has {len(files)} files of weights ({names}); expected model.safetensors, or a single file"
    )


def is_captioner_folder(folder: Path) -> bool:
    """Whether a folder has the encoder and the decoder of a captioner."""
    return all((folder / name / CONFIG_FILE).is_file() for name in CAPTIONER_FOLDERS)


def read_kind(place: Path) -> str:
    """The name of a model's kind, which config.json states; in folders of earlier versions it follows from the rest."""
    folder = place if place.is_dir() else place.parent if place.name in WEIGHT_FILES else None
    about = (None if folder is None else read_json_if_exists(folder / CONFIG_FILE)) or {}
    if folder is None or ("format" in about and isinstance(about.get("kind"), str)):
        return about.get("kind", "image")
    if is_captioner_folder(folder):
        return "caption"
    return "text" if about.get("family") in TEXT_FAMILIES or about.get("tokenizer") is not None else "image"


def list_shards(index_path: Path) -> list[str] | None:
    """Names of the files that an index of weights refers to; None if there is no such index."""
    index = read_json_if_exists(index_path)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise CheckpointError(f"{index_path} has no weight_map; expected tensor names and their files")
    if any(Path(shard).name != shard for shard in shards):
        raise CheckpointError(f"{index_path} refers to files outside its folder; expected files next to it")
    return sorted(set(shards))


def read_json_if_exists(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a small file; None if the file does not exist."""
    try:
        data = parse_json(read_text(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a broken link; expected a JSON object") from None
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {describe_error(error)}; expected a JSON object") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} contains a {type(data).__name__}; expected a JSON object")
    return data


def compute_tokenizer_checksum(text: str) -> str:
    """SHA-256 of the contents of tokenizer.json."""
    return sha256(text.encode()).hexdigest()


def write_tokenizer_file(folder: Path, text: str) -> None:
    make_folder(folder)
    write_text(folder / TOKENIZER_FILE, text)


def read_tokenizer_file(place: Path, checksum: str | None) -> tuple[str, Path]:
    """The text of tokenizer.json in a folder, or next to a file of weights, once its checksum is verified; its path."""
    path = (place if place.is_dir() else place.parent) / TOKENIZER_FILE
    try:
        text = read_text(path, MAX_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        missing = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {describe_error(error)}"
        raise CheckpointError(f"{path} {missing}; expected the tokenizer that the model was trained with") from None
    if checksum is not None and compute_tokenizer_checksum(text) != checksum:
        raise CheckpointError(
            f"{path} is not the tokenizer that the model was trained with: its checksum differs; restore the file"
        )
    return text, path


BUNDLED_FOLDER = Path(__file__).with_name("bundled")


@cache
def list_bundled_models() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json")))


def find_bundled_model(name: str | Path) -> Path | None:
    """The folder of a bundled model, or None if there is none of this name. An existing path wins over a name."""
    return BUNDLED_FOLDER / name if str(name) in list_bundled_models() and not Path(name).exists() else None
