"""Checks of configs and inputs, shared by all families."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from vitrail.base.errors import ConfigError, unknown_name_error
from vitrail.base.text import AMERICAN_NAMES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Size = int | tuple[int, int]  # rows, columns; one number for a square
MAY_BE_ZERO = {"from zero": True}  # metadata of a field; by default numbers are greater than 0
RATE = {"rate": True}  # from 0 to less than 1
SHARE = {"share": True}  # from 0 to 1
SEED = {"seed": True}  # from 0 to MAX_SEED, such as a date
MAX_VALUE = 2**20  # of any number in a config, so that products fit into 64 bits
MAX_PIXELS = 2**26  # of an input; larger images are not read by default
MAX_SEED = 2**31 - 1

TYPE_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "none",
    tuple[int, int]: "a pair (rows, columns)",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
}

cached_type_hints = cache(get_type_hints)  # every preset is checked, about a hundred of one class


@runtime_checkable
class ImageConfig(Protocol):
    """What the config of every model for images has."""

    @property
    def image_size(self) -> Size: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> int: ...


def find_image_config(model: object) -> ImageConfig | None:
    """The config of a model, including your own module; None if it has none with these fields."""
    config = getattr(model, "config", None)  # modules of other libraries have none
    return config if isinstance(config, ImageConfig) else None


def pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def check_count(name: str, value: object) -> None:
    """An argument that is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"`{name}` is {value!r}; expected 1 or more")


def check_fields(config: "DataclassInstance") -> None:
    """Check types, choices and ranges of all fields, first in `__post_init__`.

    Sizes become pairs, lists tuples, and whole numbers floats where the field is one.
    """
    hints, values = cached_type_hints(type(config)), dict(vars(config))
    for field in fields(config):
        hint = hints[field.name]
        value: Any = values[field.name]
        value = tuple(value) if isinstance(value, list) else value
        value = None if is_none(value) and NoneType in get_args(hint) else value
        if get_origin(hint) is Literal and value not in get_args(hint):
            value = AMERICAN_NAMES.get(value, value)
        check_type(field.name, value, hint)
        check_range(field.name, value, field.metadata)
        if type(value) is int and float in (hint, *get_args(hint)) and int not in get_args(hint):
            value = float(value)  # layer_scale=1 would make weights of int64
        if hint == Size:
            value = pair(value)
            if value[0] * value[1] > MAX_PIXELS:
                raise ConfigError(
                    f"{field.name} is {value[0]}×{value[1]}; expected at most {MAX_PIXELS:,} pixels, as of images"
                )
        object.__setattr__(config, field.name, value)


def is_none(value: Any) -> bool:
    """Whether it is None, or "none" as written in a shell or a file."""
    return value is None or value == "none"


def check_type(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise unknown_name_error(name, value, get_args(hint))
        return
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    if not any(matches_type(value, kind) for kind in kinds):
        raise ConfigError(
            f"{name} is {value!r}; expected {' or '.join(TYPE_DESCRIPTIONS.get(kind, str(kind)) for kind in kinds)}"
        )


def matches_type(value: Any, kind: Any) -> bool:
    """As isinstance, but a bool is not a number, an int is a valid float, and the items of tuples are checked."""
    if get_origin(kind) is tuple:
        fits = isinstance(value, tuple) and (... in get_args(kind) or len(value) == len(get_args(kind)))
        return fits and all(matches_type(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def check_range(name: str, value: Any, metadata: Mapping[str, object]) -> None:
    numbers: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if "rate" in metadata:
            fits, expected = 0 <= number < 1, "at least 0 and less than 1"
        elif "share" in metadata:
            fits, expected = 0 <= number <= 1, "at least 0 and at most 1"
        elif "seed" in metadata:
            fits, expected = 0 <= number <= MAX_SEED, f"from 0 to {MAX_SEED:,}"
        elif number > MAX_VALUE:
            fits, expected = False, f"at most {MAX_VALUE:,}"
        elif "from zero" in metadata:
            fits, expected = number >= 0, "at least 0"
        else:
            fits, expected = number > 0, "more than 0"
        if not fits:
            raise ConfigError(f"{name} is {repr(value)[:40]}; expected {expected}")


def check_used(name: str, value: Any, default: Any, *, used: bool, users: str) -> None:
    """Refuse a field that was set, but that the model does not use because of its other fields."""
    if not used and value != default:
        raise ConfigError(f"{name} is {value!r}, which this model does not use; expected {users}, or {name}={default}")


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        near = next(n for n in range(min(heads, width), 0, -1) if width % n == 0)
        raise ConfigError(
            f"width {width} cannot be divided by {heads} heads; expected a divisor of {width}, for example {near}"
        )


def check_patch_config(config: Any) -> None:
    """Check all fields of a config, first in `__post_init__`, then that heads share its width and patches its image."""
    check_fields(config)
    check_heads(config.width, config.heads)
    check_grid(pair(config.image_size), pair(config.patch_size))


def check_grid(
    image: tuple[int, int], patch: tuple[int, int], unit: str = "the pixels of one token"
) -> tuple[int, int]:
    """Rows and columns of tokens in an image, whose size must be a multiple of the patch (or a hybrid's stride)."""
    if image[0] % patch[0] or image[1] % patch[1] or 0 in image:
        near = tuple(max(round(i / p), 1) * p for i, p in zip(image, patch, strict=True))
        raise ConfigError(
            f"image of {image[0]}×{image[1]} pixels; expected a multiple of {patch[0]}×{patch[1]}, "
            f"{unit}: resize or crop it, for example to {near[0]}×{near[1]}"
        )
    return (image[0] // patch[0], image[1] // patch[1])


def check_images(
    images: object, channels: int, size: tuple[int, int], patch: tuple[int, int], *, dynamic: bool
) -> tuple[int, int]:
    """The token grid of a batch of images; an error if the model was not built for them."""
    from torch import Tensor  # here: checking a config must not import torch

    if not isinstance(images, Tensor) or not images.is_floating_point():
        given = f"a tensor of {images.dtype}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise ConfigError(f"input is {given}; expected a tensor of floats, (batch, {channels}, {size[0]}, {size[1]})")
    if images.ndim != 4 or images.shape[1] != channels:
        given = tuple(images.shape)
        hint = "add the batch dimension with images[None]" if len(given) == 3 else "batch, channels, rows, columns"
        if given[-1:] == (channels,) and len(given) in (3, 4):
            hint = "move the channels to the front with images.movedim(-1, -3)"
        raise ConfigError(f"input of shape {given}; expected (batch, {channels}, {size[0]}, {size[1]}): {hint}")
    given = (images.shape[2], images.shape[3])
    grid = check_grid(given, patch)
    if not dynamic and given != size:
        raise ConfigError(
            f"image of {given[0]}×{given[1]} pixels; expected {size[0]}×{size[1]}, which the model was built for: "
            f"resize it, or build the model with image_size=({given[0]}, {given[1]}) or dynamic=True"
        )
    return grid
