"""What a step of decoding does to be fast: it changes no output."""

import random

import pytest
import torch
import torch.nn.functional as F
from support.text_models import TEXT_CASES, build_text_model, draw_sentences, pad_rows, read_source
from support.uncached_text_model import UncachedTextModel

from vitrail.models.text.decoder import find_moved, list_sentences, take_rows
from vitrail.models.text.token_embedding import MAX_ROWS, multiply_rows


@pytest.mark.parametrize("shape", [(40, 24), (520, 260)], ids=["small", "large"])
@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS, MAX_ROWS + 1])
def test_the_product_of_few_rows_is_the_usual_one(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(size).double() for size in (shape, shape[:1], (rows, shape[1])))
    for given in (bias, None):
        with torch.inference_mode():
            product = multiply_rows(x, weight, given)
        torch.testing.assert_close(product, F.linear(x, weight, given))
        assert product.is_contiguous()


def test_the_product_of_few_rows_has_gradients() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    multiply_rows(torch.ones(2, 4), weight, torch.ones(3)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(2).all()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 3], [1, 0, 3, 2], [2, 2, 2], [0, 0, 1, 1, 2, 3]])
def test_rows_are_taken_in_place_unless_there_are_more(order: list[int]) -> None:
    tensor, rows = torch.arange(24.0).view(3, 4, 2), torch.tensor(order)
    expected = tensor[:, order]
    taken = take_rows(tensor, rows, find_moved(order, rows.device), dim=1)
    assert torch.equal(taken, expected)
    assert (taken.data_ptr() == tensor.data_ptr()) == (len(order) <= 4)


def test_beams_of_a_sentence_read_its_memory_once() -> None:
    assert list_sentences([0, 0, 1, 1]) == [0, 1]
    assert list_sentences([2, 0, 1]) == [2, 0, 1]
    assert list_sentences([1, 1, 1]) == [1]
    assert list_sentences([0, 0, 1]) == [0, 0, 1]
    assert list_sentences([0, 0, 1, 1, 0, 0]) == [0, 1, 0]


@pytest.mark.parametrize("case", TEXT_CASES)
@torch.inference_mode()
def test_any_order_of_rows_gives_the_logits_of_the_whole_text(case: str) -> None:
    """Rows leave, are repeated and change places at random, as often as there are tokens."""
    model, generator = build_text_model(case), random.Random(0)
    source = pad_rows(draw_sentences(6, 8), [8, 3, 5, 1, 8, 2])
    memory = read_source(model, source)
    uncached = UncachedTextModel(model)
    state, whole = model.start(memory, 10), uncached.start(memory, 10)
    rows = 6
    for step in range(10):
        tokens = draw_sentences(rows, 1, seed=step)[:, 0]
        logits, state = model.step(tokens, state)
        expected, whole = uncached.step(tokens, whole)
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
        order = torch.tensor([generator.randrange(rows) for _ in range(generator.randint(1, 2 * rows))])[:16]
        order = order.sort().values if step % 2 else order
        rows, state, whole = len(order), state.reorder(order), whole.reorder(order)
