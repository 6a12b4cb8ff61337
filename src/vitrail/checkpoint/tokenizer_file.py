"""tokenizer.json next to the weights of a text model; config.json has its checksum. torch is not imported."""

from hashlib import sha256
from pathlib import Path

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.base.files import make_folder, read_text, write_text

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 2**26


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
