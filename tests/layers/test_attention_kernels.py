"""Two products and a softmax equal the fused kernel, with its gradients, and are used only where they are faster."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.base import machine
from vitrail.layers import attention as kernels
from vitrail.layers.attention import SelfAttention, attend_by_products, attention, causal_mask, choose_products
from vitrail.layers.positions import RelativePositions, RotaryPositions

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def list_masks() -> dict[str, Tensor | None]:
    boolean = torch.rand(4, 1, 5, 7) > 0.4
    boolean[..., 0] = True
    blind = torch.zeros(5, 7).double()
    blind[2] = -math.inf
    return {
        "none": None,
        "boolean": boolean,
        "of the keys": boolean[:, :, :1],
        "additive": torch.randn(5, 7).double(),
        "of each head": torch.randn(1, 3, 5, 7).double(),
        "of each image": torch.randn(4, 3, 5, 7).double(),
        "causal": causal_mask(5, 7),
        "boolean, one query sees nothing": torch.arange(5)[:, None] != torch.full((1, 7), 2),
        "additive, one query sees nothing": blind,
    }


def run_with_gradients(kernel: Callable[..., Tensor], dtype: torch.dtype, mask: Tensor | None) -> list[Tensor]:
    """The output and the gradients of q, k, v and of an additive mask."""
    torch.manual_seed(1)
    inputs = [torch.randn(4, 3, n, width, dtype=torch.float64) for n, width in ((5, 8), (7, 8), (7, 4))]
    inputs = [each.to(dtype).requires_grad_() for each in inputs]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype).requires_grad_()
        inputs.append(mask)
    output = kernel(*inputs[:3], mask)
    weights = torch.randn(output.shape, dtype=torch.float64).to(dtype)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("piece", [kernels.PIECE, 3 * 5 * 7, 2 * 5 * 7])  # in one, by image, by head
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", list_masks())
def test_output_and_gradients_equal_those_of_the_fused_kernel(
    kind: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PIECE", piece)
    torch.manual_seed(0)
    mask, tolerance = list_masks()[kind], TOLERANCES[dtype]
    expected = run_with_gradients(torch.nn.functional.scaled_dot_product_attention, torch.float64, mask)
    found = run_with_gradients(attend_by_products, dtype, mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * other.abs().max().item())


def test_the_scale_may_be_another() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind()
    expected = attention(q, k, v, scale=0.3)
    torch.testing.assert_close(attend_by_products(q, k, v, scale=0.3), expected, rtol=1e-5, atol=1e-6)


def test_dropout_has_the_same_distribution_and_depends_on_the_seed() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    torch.manual_seed(0)
    one = attend_by_products(q, k, v, dropout=0.3)
    torch.manual_seed(0)
    assert torch.equal(one, attend_by_products(q, k, v, dropout=0.3))
    assert not torch.equal(one, attend_by_products(q, k, v, dropout=0.3))
    many = [each.expand(4000, -1, -1, -1) for each in (q, k, v)]
    for kernel in (attend_by_products, attention):
        mean = kernel(*many, dropout=0.3).mean(0)
        torch.testing.assert_close(mean, attention(q, k, v)[0], rtol=0, atol=0.06)


@pytest.fixture
def fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "read_instructions", lambda: "avx512_bf16")


@pytest.mark.usefixtures("fast_bfloat16")
def test_products_are_chosen_in_bfloat16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 3, 5, 8)
    half = q.bfloat16()
    assert not choose_products(q, q, q)
    assert choose_products(half, half, half)
    with torch.autocast("cpu", torch.bfloat16):
        assert choose_products(q, q, q)
        assert not choose_products(q.double(), q.double(), q.double())
    assert not choose_products(half.to("meta"), half.to("meta"), half.to("meta"))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "MOST", 2 * 3 * 5 * 5 - 1)
        assert not choose_products(half, half, half), "the scores would take too much memory"
    monkeypatch.setattr(kernels, "read_instructions", lambda: "amx_bf16")
    assert not choose_products(half, half, half), "the fused forward pass uses AMX"
    assert choose_products(half.requires_grad_(), half, half)
    with torch.no_grad():
        assert not choose_products(half, half, half)
    monkeypatch.setattr(kernels, "read_instructions", str)
    assert not choose_products(half, half, half)


@pytest.mark.usefixtures("fast_bfloat16")
@pytest.mark.parametrize("positions", ["none", "relative", "rotary"])
@pytest.mark.parametrize("queries", [None, 2])
def test_self_attention_under_autocast(positions: str, queries: int | None) -> None:
    kinds = {"none": None, "relative": RelativePositions(8, (2, 3)), "rotary": RotaryPositions(8)}
    layer = SelfAttention(16, 2, positions=kinds[positions])
    x, mask = torch.randn(2, 8, 16), None if queries else causal_mask(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, (2, 3), mask, queries)
    torch.testing.assert_close(found.float(), layer(x, (2, 3), mask, queries), rtol=0.03, atol=0.03)


@pytest.mark.usefixtures("fast_bfloat16")
@pytest.mark.parametrize("trained", [False, True])
def test_a_compiled_layer(trained: bool) -> None:
    layer, x, mask = SelfAttention(16, 2).bfloat16(), torch.randn(2, 8, 16).bfloat16(), causal_mask(8, 8)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(trained):
        torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


@pytest.mark.usefixtures("fast_bfloat16")
def test_an_export_in_bfloat16_has_the_fused_kernel() -> None:
    layer = SelfAttention(16, 2).bfloat16()
    program = torch.export.export(layer, (torch.randn(2, 8, 16).bfloat16(),))
    assert "scaled_dot_product_attention" in str(program.graph)


def test_instructions_that_torch_may_not_use_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    find = machine.find_bfloat16_instructions.__wrapped__
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": False}, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert find() == "avx512_bf16"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # ATEN_CPU_CAPABILITY=avx2
    assert find() == ""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert find() == ""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    assert find() == "bf16"


def test_instructions_are_read_from_linux_if_torch_does_not_list_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "CPU_INFO_FILE", tmp_path / "cpuinfo")
    assert machine.find_bfloat16_instructions.__wrapped__() == ""
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n")
    assert machine.find_bfloat16_instructions.__wrapped__() == "amx_bf16"
