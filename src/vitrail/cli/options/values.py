"""Parse the values of options: FIELD=VALUE, sizes, lists with commas, files of labels, paths that must exist."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from cyclopts import Token, convert

from vitrail.base.errors import ConfigError, describe_error
from vitrail.base.files import read_text, suggest_sibling
from vitrail.base.json_yaml import parse_yaml
from vitrail.data.images.class_names import IMAGENET, list_imagenet_labels

MAX_NUMBER = 2**31 - 1  # of any option that is a whole number
MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))  # or threads
MAX_BATCH = 2**20
MAX_SEEDS = 1000
MAXIMA = {
    "batch": MAX_BATCH,
    "top": MAX_BATCH,
    "seeds": MAX_SEEDS,
    **dict.fromkeys(("streams", "threads", "workers"), MAX_PROCESSES),
}


def convert_dtype(hint: Any, tokens: Sequence[Token]) -> Any:
    """A dtype by its name in torch, or a short one: bf16."""
    from vitrail.recipes.recipe import DTYPE_ALIASES

    return convert(hint, [tokens[0].evolve(value=DTYPE_ALIASES.get(tokens[0].value, tokens[0].value))])


def check_model_exists(_: object, name: str | None) -> None:
    """Refuse a model that does not exist before torch is imported."""
    from vitrail.checkpoint.model_location import check_model_exists

    check_model_exists(name or "")


def check_preset_exists(_: object, name: str | None) -> None:
    from vitrail.models.catalog.pretrained import check_preset_exists

    check_preset_exists(name or "")


def check_data_exists(_: object, given: str | Sequence[str] | None) -> None:
    from vitrail.data.images.datasets import check_data_exists
    from vitrail.recipes.recipe import BUILT_IN_PAIR_NAMES, GENERATED_CAPTIONS

    for name in [given] if isinstance(given, str) else given or ():
        check_data_exists(name, (*BUILT_IN_PAIR_NAMES, GENERATED_CAPTIONS))


def parse_size(text: str, option: str = "--image-size") -> tuple[int, int]:
    """Rows and columns: 384, or 384x256."""
    parts = text.replace("×", "x").split("x")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"{option} {text!r}; expected pixels such as 384, or rows x columns such as 384x256")
    return (int(parts[0]), int(parts[-1]))


def parse_field(text: str, option: str = "--set") -> tuple[str, Any]:
    """FIELD=VALUE. A value is read as YAML, except that 1e-5 is a number and 32x128 a size."""
    name, equals, value = text.partition("=")
    if name and equals:
        if re.fullmatch(r"\d{1,9}[x×]\d{1,9}", value):
            return name.replace("-", "_"), parse_size(value)
        with suppress(ValueError):
            return name.replace("-", "_"), float(value) if set(value) & set(".eE") else int(value)
        with suppress(ValueError):
            return name.replace("-", "_"), parse_yaml(value)
    raise ConfigError(f"{option} {text[:60]!r}; expected FIELD=VALUE, such as pool=mean or stages=[3,4,9]")


def parse_fields(items: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """The values of an option that is given once per field."""
    return dict(parse_field(item, option) for item in items or ())


def parse_model_fields(fields: Iterable[str] | None, image_size: str | None) -> dict[str, Any]:
    """The config fields of --set and --image-size."""
    given = parse_fields(fields)
    return given if image_size is None else {**given, "image_size": parse_size(image_size)}


def split_commas(text: str, option: str) -> tuple[str, ...]:
    """The parts between commas, without repetitions, in the order given."""
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",")))
    if not all(found):
        raise ConfigError(f"{option} {text!r}; expected names or numbers separated by commas")
    return found


def parse_integers(text: str, option: str) -> tuple[int, ...]:
    found = split_commas(text, option)
    if not all(each.isdecimal() and len(each) < 7 and int(each) for each in found):
        raise ConfigError(f"{option} {text!r}; expected whole numbers of at least 1, with at most six digits")
    numbers = tuple(map(int, found))
    check_maximum(max(numbers), MAXIMA.get(option.removeprefix("--"), MAX_NUMBER), option)
    return numbers


def check_numbers(_: object, value: object) -> None:
    """Refuse numbers that no option expects before anything is opened: of an option, or of a class of options."""
    if is_dataclass(value):
        for name, each in vars(value).items():
            option = f"--{name.replace('_', '-')}"
            check_maximum(each, MAXIMA.get(name, MAX_NUMBER), option)
    else:
        check_maximum(value, MAX_NUMBER)


def at_most(maximum: int) -> Callable[[object, object], None]:
    """A validator of one option."""
    return lambda _, value: check_maximum(value, maximum)


def check_maximum(value: object, maximum: int, option: str | None = None) -> None:
    """Without the option, the message is completed by usage_errors."""
    if isinstance(value, int) and abs(value) > maximum:
        expected = f"expected at most {maximum:,}" if value > 0 else "expected at least 0"
        raise ValueError(expected) if option is None else ConfigError(f"{option} {value}; {expected}")


def check_minimum(option: str, value: float, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{option} {value}; expected at least {minimum}")


def read_labels(path: Path | None) -> tuple[str, ...] | None:
    """The class names in a text file, one per line, or for `imagenet` those of ImageNet-1k; None keeps the model's."""
    if path is None:
        return None
    if str(path) == IMAGENET and not path.exists():
        return list_imagenet_labels()
    try:
        return tuple(read_text(path).splitlines())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--labels {path} cannot be read: {describe_error(error)}; expected imagenet or a file, a name per line"
            f"{suggest_sibling(path)}"
        ) from None
