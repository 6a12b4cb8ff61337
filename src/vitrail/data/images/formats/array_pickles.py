"""Read pickles of byte arrays and plain containers without running code; anything else is refused."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.base.errors import DataError, VitrailError, describe_error
from vitrail.base.pickle_reader import (
    BYTES_PER_STEP,
    AllowedCall,
    ForbiddenGlobalError,
    PickleError,
    StepBudget,
    evaluate_pickle,
)

MAX_DIMENSIONS = 8


def read_array_pickle(data: bytes, path: Path) -> Any:
    """The object in a pickle; if it is a dictionary, its values may be arrays of bytes."""
    try:
        contents = evaluate_pickle(BytesIO(data), make_allowed_pickle_globals(budget := StepBudget(len(data))), budget)
    except VitrailError:
        raise
    except ForbiddenGlobalError as error:
        raise DataError(f"{path} {error}; refused: expected arrays only") from None
    except PickleError as error:
        raise DataError(f"{path} {error}; expected a pickle of arrays") from None
    except Exception as error:  # the parser may raise anything on broken bytes
        raise DataError(
            f"{path} cannot be read: {describe_error(error)}; expected a complete and readable pickle"
        ) from None
    if isinstance(contents, dict):
        return {key: value.values if isinstance(value, ArrayStandIn) else value for key, value in contents.items()}
    return contents


def make_allowed_pickle_globals(budget: StepBudget) -> dict[str, object]:
    """The names that pickles of numpy arrays use, with their stand-ins."""

    def encode(text: Any, _: Any) -> bytes:
        """Read bytes that Python 3 pickled for Python 2; always latin1, since other codecs may have side effects."""
        if not isinstance(text, str):
            raise PickleError(f"encodes a {type(text).__name__}")
        budget.spend(len(text) // BYTES_PER_STEP)
        return text.encode("latin1")

    def make_array_stand_in(_class: object, _shape: object, _code: object) -> ArrayStandIn:
        return ArrayStandIn()

    core = ("numpy.core", "numpy._core")
    return {
        **{f"{each}.multiarray._reconstruct": AllowedCall(make_array_stand_in) for each in core},
        **{f"{each}.numeric._frombuffer": AllowedCall(make_filled_array_stand_in) for each in core},
        "numpy.ndarray": AllowedCall(ArrayStandIn),
        "numpy.dtype": AllowedCall(DTypeStandIn),
        "_codecs.encode": AllowedCall(encode),
    }


class DTypeStandIn:
    """Stands in for numpy.dtype; only uint8 is allowed."""

    def __init__(self, code: Any, _align: Any = None, _copy: Any = None) -> None:
        if not isinstance(code, str | bytes) or code not in ("u1", b"u1"):
            given = repr(code[:20]) if isinstance(code, str | bytes) else f"a {type(code).__name__}"
            raise PickleError(f"has an array of {given}, not of bytes")

    def set_state(self, state: Any) -> None:
        """Ignore the state: bytes have no byte order."""


class ArrayStandIn:
    """Stands in for numpy.ndarray: created empty, then filled."""

    values: NDArray[np.uint8] | None = None

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise PickleError("has an array without values")
        _, shape, _, columns_first, values = state
        self.fill(values, shape, columns_first=bool(columns_first))

    def fill(self, values: Any, shape: Any, *, columns_first: bool) -> "ArrayStandIn":
        if not isinstance(values, bytes | bytearray):
            raise PickleError("has an array without values")
        if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS or any(type(each) is not int for each in shape):
            raise PickleError("has an array without a shape")
        self.values = np.frombuffer(values, np.uint8).reshape(shape, order="F" if columns_first else "C")
        return self


def make_filled_array_stand_in(values: Any, _kind: Any, shape: Any, order: Any) -> ArrayStandIn:
    return ArrayStandIn().fill(values, shape, columns_first=isinstance(order, str) and order == "F")
