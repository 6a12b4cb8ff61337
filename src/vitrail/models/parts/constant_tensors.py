"""Tensors that depend on sizes alone, such as indices and masks: made once, not in every forward pass."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def remember_tensor(make: Function) -> Function:
    """Keep the last results of a function of sizes and a device; its tensors must not be changed in place.

    Tensors made while compiling or exporting are symbolic, so they are not kept.
    """
    kept = lru_cache(maxsize=32)(torch.inference_mode(mode=False)(make))  # else it could not be used in training later

    @wraps(make)
    def remembered(*args: Any) -> Any:
        return make(*args) if torch.compiler.is_compiling() else kept(*args)

    return cast("Function", remembered)
