"""Small trained models inside the package, opened by name. See README.md."""

from functools import cache
from pathlib import Path

BUNDLED_FOLDER = Path(__file__).parent


@cache
def list_bundled_models() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json")))


def find_bundled_model(name: str | Path) -> Path | None:
    """The folder of a bundled model, or None if there is none of this name. An existing path wins over a name."""
    return BUNDLED_FOLDER / name if str(name) in list_bundled_models() and not Path(name).exists() else None
