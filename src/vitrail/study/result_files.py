"""Write the results of a study: JSON and text files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.files import make_folder, write_text


def format_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_texts_to_folder(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each text to the file of its name in the folder; returns the paths."""
    make_folder(folder)
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]
