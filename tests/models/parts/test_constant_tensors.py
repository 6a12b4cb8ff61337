"""Constant tensors are made once per size, can be used in training afterwards, and are not kept while compiling."""

import pytest
import torch
from torch import Tensor

from vitrail.models.parts.constant_tensors import remember_tensor

MADE = list[int]()


@remember_tensor
def make_places(size: int) -> Tensor:
    MADE.append(size)
    return torch.arange(size)


def test_a_tensor_is_made_once_per_size() -> None:
    MADE.clear()
    assert make_places(3) is make_places(3)
    assert make_places(4).shape == (4,)
    assert MADE == [3, 4]


def test_a_tensor_made_in_inference_mode_can_be_used_in_training() -> None:
    with torch.inference_mode():
        make_places(5)
    table = torch.ones(2, 6, requires_grad=True)
    table.index_select(1, make_places(5)).sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == 10


def test_nothing_is_kept_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    with monkeypatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert make_places(7) is not make_places(7)
    assert make_places(7) is make_places(7)
    assert MADE == [7, 7, 7]
