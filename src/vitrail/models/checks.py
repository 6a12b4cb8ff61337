"""What a config is checked for whatever its family, before anything is built; and what a forward pass is given."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from vitrail.errors import ConfigError, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Size = int | tuple[int, int]  # rows, columns; one number for a square

RATES = ("dropout", "attention_dropout", "stochastic_depth")
MAY_BE_ZERO = (*RATES, "registers")
IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "none",
    tuple[int, int]: "a pair (rows, columns)",
    tuple[int, ...]: "a list of whole numbers",
}


def pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def check_fields(config: "DataclassInstance") -> None:
    """Types, choices and ranges of every field, called first in `__post_init__`; sizes become pairs, lists tuples."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value: Any = getattr(config, field.name)
        value = tuple(value) if isinstance(value, list) else value
        check_type(field.name, value, hints[field.name])
        check_range(field.name, value)
        object.__setattr__(config, field.name, pair(value) if hints[field.name] == Size else value)


def check_type(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise unknown(name, value, get_args(hint))
        return
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if not any(is_a(value, kind) for kind in kinds):
        raise ConfigError(f"{name} is {value!r}; expected {' or '.join(IN_WORDS[kind] for kind in kinds)}")


def is_a(value: Any, kind: Any) -> bool:
    """isinstance, but true is no number, a whole number may stand for any number, and tuples are looked into."""
    if get_origin(kind) is tuple:
        fits = isinstance(value, tuple) and (... in get_args(kind) or len(value) == len(get_args(kind)))
        return fits and all(is_a(item, int) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def check_range(name: str, value: Any) -> None:
    if name in RATES and not 0 <= value < 1:
        raise ConfigError(f"{name} is {value!r}; expected at least 0 and less than 1")
    numbers: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not (number > 0 or (number == 0 and name in MAY_BE_ZERO)):  # so said, nan is caught too
            raise ConfigError(f"{name} is {value!r}; expected {'at least' if name in MAY_BE_ZERO else 'more than'} 0")


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        near = next(n for n in range(min(heads, width), 0, -1) if width % n == 0)
        raise ConfigError(f"width {width} cannot be shared by {heads} heads; expected a divisor of {width}, say {near}")


def check_grid(image: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches in an image, which must be covered exactly."""
    if image[0] % patch[0] or image[1] % patch[1]:
        near = tuple(max(round(i / p), 1) * p for i, p in zip(image, patch, strict=True))
        raise ConfigError(
            f"image of {image[0]}×{image[1]} pixels is not a multiple of the {patch[0]}×{patch[1]} patch; "
            f"resize or crop it, say to {near[0]}×{near[1]}"
        )
    return (image[0] // patch[0], image[1] // patch[1])


def check_images(
    images: Tensor, channels: int, size: tuple[int, int], patch: tuple[int, int], *, dynamic: bool
) -> tuple[int, int]:
    """The token grid of a batch of images, which must be what the model was built for."""
    if images.ndim != 4 or images.shape[1] != channels:
        raise ConfigError(
            f"input has shape {tuple(images.shape)}; expected (batch, {channels}, {size[0]}, {size[1]})"
            + ("; add the batch dimension with images[None]" if images.ndim == 3 else "")
        )
    given = (images.shape[2], images.shape[3])
    if given != size and not dynamic:
        raise ConfigError(
            f"image of {given[0]}×{given[1]} pixels, but the model was built for {size[0]}×{size[1]}; "
            f"resize it, or build the model with image_size=({given[0]}, {given[1]}) or dynamic=True"
        )
    return check_grid(given, patch)
