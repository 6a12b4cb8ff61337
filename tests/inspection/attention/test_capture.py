"""Captured maps times v equal the output of the fused kernel, and capturing changes nothing else."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_models import ATTENTION_CASES, count_hooks, make_attention_model, random_image_batch
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.inspection.attention.capture import (
    AttentionCapture,
    capture_attention,
    capture_tokens,
    find_attention_layers,
    why_several_grids,
)
from vitrail.inspection.explain.explain_options import ExplainOptions
from vitrail.inspection.explain.explainer import Explainer
from vitrail.layers.attention import Attention, SelfAttention, causal_mask, merge_heads
from vitrail.layers.positions import Grid, RelativePositions, RotaryPositions

ATTENDING = list(ATTENTION_CASES)


def heard(model: nn.Module) -> dict[int, Tensor]:
    """Inputs of each attention's projection by layer, filled by the next pass; the hooks stay."""
    given = dict[int, Tensor]()

    def write(number: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        given[number] = args[0].detach()

    for number, layer in enumerate(find_attention_layers(model)):
        layer.proj.register_forward_pre_hook(partial(write, number))
    return given


def check_maps(
    model: nn.Module, captured: AttentionCapture, given: dict[int, Tensor], tokens: int, prefix: int
) -> None:
    """Check that maps times v equal the input of each projection, for the rows that the pass computed."""
    assert (captured.token_count, captured.prefix) == (tokens, prefix)
    for layer, weights in enumerate(captured.maps):
        assert weights.dtype == torch.float32
        assert not weights.requires_grad
        assert weights.shape[1:] == (find_attention_layers(model)[layer].heads, tokens, tokens)
        assert (weights.sum(-1) - 1).abs().max() <= 1e-5
        assert weights.min() >= 0
        made = merge_heads(weights.to(captured.values[layer].dtype) @ captured.values[layer])
        rows = given[layer].shape[1]
        assert (made[:, :rows] - given[layer]).abs().max() <= 1e-5
        assert given[layer].abs().max() > 0.05  # not a comparison of zeros


@pytest.mark.parametrize("case", ATTENDING)
def test_maps_times_v_equal_the_heads_outputs(case: str) -> None:
    model = make_attention_model(case)
    given = heard(model)
    with capture_attention(model, gradients=True) as captured:
        model(random_image_batch())
    prefix = model.prefix
    assert captured.patch_grid == (2, 3)
    check_maps(model, captured, given, prefix + 6, prefix)
    reads_the_first = getattr(model.config, "pool", "class" if case != "map" and prefix else "all") == "class"
    assert given[2].shape[1] == (min(prefix, 2 if "distilled" in case else 1) if reads_the_first else prefix + 6)
    with capture_attention(model, gradients=True) as captured:  # and where the last block computes all tokens
        model.tokens(random_image_batch())
    assert given[2].shape[1] == prefix + 6
    check_maps(model, captured, given, prefix + 6, prefix)


def test_maps_of_the_toy_models_are_not_uniform() -> None:
    """Otherwise the comparison above would hold for meaningless maps."""
    for case in ATTENDING:
        with capture_attention(make_attention_model(case)) as captured, torch.no_grad():
            captured.model(random_image_batch())
        for weights in captured.maps:
            assert weights.std(-1).max() > 0.01


@pytest.mark.parametrize("case", ["learned stem", "learned_2d layers", "sincos_2d shared", "relative", "rotary"])
@pytest.mark.parametrize("size", [(16, 16), (64, 16), (32, 80)])
def test_other_sizes_of_dynamic_models(case: str, size: Grid) -> None:
    check_other_size(make_attention_model(case, dynamic=True), size)


@pytest.mark.parametrize("case", ["distilled", "hybrid", "cct", "cct with neighbors", "relative with registers"])
def test_other_sizes_of_other_families(case: str) -> None:
    check_other_size(make_attention_model(case, dynamic=True), (64, 16))


def check_other_size(model: Any, size: Grid) -> None:
    given = heard(model)
    with capture_attention(model, gradients=True) as captured:
        model(random_image_batch())
        assert captured.patch_grid == (2, 3)
        model(random_image_batch(3, size))  # the last pass counts
    grid, prefix = (size[0] // 16, size[1] // 16), model.prefix
    assert captured.patch_grid == grid
    check_maps(model, captured, given, prefix + grid[0] * grid[1], prefix)
    assert len(captured.maps[0]) == 3


class Masked(nn.Module):
    """Two masked self-attentions, then class attention as in CaiT, called with and without keywords."""

    def __init__(self, mask: Tensor | None, positions: Any = None) -> None:
        super().__init__()
        self.mask, self.grid, self.cls_token = mask, (2, 3), nn.Parameter(torch.randn(1, 1, 16))
        self.first = SelfAttention(16, 2, positions=positions)
        self.second = SelfAttention(16, 2)
        self.last = Attention(16, 4, input_width=16, key_width=24, value_width=32)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.first(x, self.grid, self.mask)
        x = x + self.second(x=x, mask=self.mask)
        return self.last(x[:, :1], x)[:, 0]


def masks() -> dict[str, Tensor | None]:
    added = torch.randn(2, 7, 7)
    blind = causal_mask(7, 7)
    blind[3] = False
    return {
        "none": None,
        "causal": causal_mask(7, 7),
        "padding": torch.tensor([True] * 5 + [False] * 2)[None, None, None].expand(3, 1, 1, 7),
        "added": added,
        "added, with holes": added.masked_fill(torch.rand(2, 7, 7) < 0.3, -torch.inf),
        "a query that sees nothing": blind,
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("positions", [None, RelativePositions(8, (2, 3)), RotaryPositions(8)])
def test_masks_and_class_attention(name: str, positions: Any) -> None:
    mask = masks()[name]
    model = Masked(mask, positions)
    if positions is not None:
        nn.init.normal_(getattr(positions, "offsets", torch.empty(1)))
    given = heard(model)
    with capture_attention(model, gradients=True) as captured, torch.no_grad():
        model(torch.randn(3, 6, 16))
    assert [tuple(each.shape) for each in captured.maps] == [(3, 2, 7, 7), (3, 2, 7, 7), (3, 4, 1, 7)]
    for layer, weights in enumerate(captured.maps):
        assert (merge_heads(weights @ captured.values[layer]) - given[layer]).abs().max() <= 1e-5
        blind = name == "a query that sees nothing" and layer < 2
        expected = torch.ones(weights.shape[2])
        expected[3 if blind else slice(0)] = 0
        assert (weights.sum(-1) - expected).abs().max() <= 1e-5
        if mask is not None and layer < 2:
            hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
            assert weights[hidden.expand_as(weights)].abs().sum() == 0


def test_a_mask_of_the_queries_alone() -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.grid = SelfAttention(16, 2), (2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, mask=torch.tensor([[True] * 3 + [False] * 4, [False] * 3 + [True] * 4]), queries=2)

    model = Few()
    given = heard(model)
    with capture_attention(model, gradients=True) as captured:
        model(torch.randn(2, 7, 16))
    assert captured.maps[0].shape == (2, 2, 2, 7)
    assert (merge_heads(captured.maps[0] @ captured.values[0]) - given[0]).abs().max() <= 1e-5


def test_arguments_of_none_are_ignored() -> None:
    """A block that received none passes them on."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(16, 2), SelfAttention(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x, None, None), None, None, None)

    with capture_attention(Plain()) as captured:
        captured.model(torch.randn(2, 8, 16))
    assert captured.token_count == 8
    assert [each.shape for each in captured.maps] == [(2, 2, 8, 8)] * 2


@pytest.mark.parametrize(
    "case", ["learned stem", "relative", "distilled", "hybrid", "cct", "cct with neighbors", "map"]
)
def test_fused_kernel_is_used_and_logits_are_unchanged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pixels, calls, fused = make_attention_model(case), random_image_batch(), 0, F.scaled_dot_product_attention

    def counted(*given: Any, **named: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return fused(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    with torch.no_grad():
        plain, alone = model(pixels), calls
        assert alone == {"cct with neighbors": 0, "map": 4}.get(case, 3)
        with capture_attention(model) as captured:
            logits = model(pixels)
        assert len(captured.maps) == 3
    assert calls == 2 * alone
    assert torch.equal(plain, logits)
    with capture_attention(model, gradients=True):
        by_class = model(pixels)
    assert calls == 3 * alone
    assert torch.equal(by_class, model(pixels))


def test_layers_and_heads_can_be_selected() -> None:
    model, pixels = make_attention_model(), random_image_batch()
    with capture_attention(model) as everything, torch.no_grad():
        model(pixels)
    for layers, heads in (([1], None), ([-1, 0], [1]), ([2, 1], [-1, 0]), ([0], [1, 1]), ([], [0])):
        with capture_attention(model, layers, heads) as captured, torch.no_grad():
            model(pixels)
        assert captured.layers == tuple(layer % 3 for layer in layers)
        assert set(captured.maps_by_layer) == set(captured.layers)
        assert (captured.token_count, captured.patch_grid) == (7, (2, 3))
        for layer, weights in zip(layers, captured.maps, strict=True):
            expected = everything.maps[layer % 3]
            assert torch.equal(weights, expected if heads is None else expected[:, heads])


@pytest.mark.parametrize(
    ("layers", "heads", "says"),
    [
        ([3], None, "layer is 3; expected 0 to 2, or -1 for the last: there are 3"),
        ([0, -4], None, "layer is -4; expected 0 to 2"),
        (None, [2], "head is 2; expected 0 to 1, or -1 for the last: there are 2"),
        ([0], [0, -3], "head is -3; expected 0 to 1"),
    ],
)
def test_indices_out_of_range_leave_no_hooks(layers: list[int] | None, heads: list[int] | None, says: str) -> None:
    model = make_attention_model()
    with pytest.raises(ConfigError) as caught, capture_attention(model, layers, heads):
        raise AssertionError("not reached")
    assert str(caught.value).startswith(says)
    assert count_hooks(model) == 0


def test_a_model_without_attention() -> None:
    with (
        pytest.raises(ConfigError, match="Linear has no attention layers; expected a transformer"),
        capture_attention(nn.Linear(2, 2)),
    ):
        pass


def test_a_model_whose_attention_has_no_maps() -> None:
    vit = make_attention_model()
    vit.patch_embed.add_module("stage", SelfAttention(16, 2))
    assert len(find_attention_layers(vit)) == 3  # the stem does not matter
    vit.no_maps_reason = "all is mixed"
    others = "vit, deit or hybrid; capture_tokens works for this model"
    says = f"has no attention maps: all is mixed; expected a model whose tokens attend to each other, such as {others}"
    with pytest.raises(ConfigError, match=f"^ViT {says}$"), capture_attention(vit):
        raise AssertionError("not reached")
    assert count_hooks(vit) == 0
    linformer = vitrail.create("linformer_tiny_patch16_224", image_size=(32, 48), depth=1)
    with pytest.raises(ConfigError, match=r"^Linformer has no attention maps: its keys are mixtures of all"):
        find_attention_layers(linformer)
    with capture_tokens(linformer) as states:
        linformer.tokens(random_image_batch())
    assert [each.shape for each in states] == [(2, 7, 192)] * 3


@pytest.mark.parametrize("case", ["learned stem", "map", "cct"])
def test_hooks_are_removed(case: str) -> None:
    model = make_attention_model(case)
    with capture_attention(model, gradients=True), capture_tokens(model):
        assert count_hooks(model) > 0
        model(random_image_batch())
    assert count_hooks(model) == 0
    with pytest.raises(ConfigError, match="expected"), capture_attention(model), capture_tokens(model):
        model(random_image_batch(size=(17, 48)))
    assert count_hooks(model) == 0
    with pytest.raises(ZeroDivisionError), capture_attention(model, keep=lambda weights, _: len(weights) / 0):
        model(random_image_batch())
    assert count_hooks(model) == 0

    class Uncountable:
        def register_forward_hook(self, _: Any) -> None:
            raise RuntimeError

    model.norm = nn.Identity()
    object.__setattr__(model.norm, "register_forward_hook", Uncountable().register_forward_hook)
    with pytest.raises(RuntimeError), capture_tokens(model):
        pass
    assert count_hooks(model) == 0


def test_other_hooks_stay_and_captures_nest() -> None:
    model = make_attention_model()
    heard(model)
    with capture_attention(model) as outer, torch.no_grad():
        with capture_attention(model, [1]) as inner:
            model(random_image_batch())
        before = outer.maps[1]
        model(random_image_batch(1))
    assert torch.equal(inner.maps[0], before)
    assert len(outer.maps[1]) == 1
    assert count_hooks(model) == 3


def test_only_the_result_of_keep_is_stored() -> None:
    model, alive = make_attention_model(), list[weakref.ref[Tensor]]()

    def mean(weights: Tensor, grid: object) -> Tensor:
        alive.append(weakref.ref(weights))
        assert grid == (2, 3)
        return weights.mean((1, 2))

    with capture_attention(model, keep=mean) as captured, torch.no_grad():
        model(random_image_batch())
        gc.collect()
        assert [each() for each in alive] == [None] * 3
    assert [each.shape for each in captured.maps] == [(2, 7)] * 3
    assert not captured.values
    assert not captured.head_outputs


def held_by(captured: AttentionCapture) -> int:
    """Bytes of all tensors that a capture keeps alive."""
    tensors = [*captured.maps_by_layer.values(), *captured.values.values(), *captured.head_outputs.values()]
    return sum(each.untyped_storage().nbytes() for each in tensors)


def test_memory_of_one_layer_does_not_depend_on_depth() -> None:
    sizes = set[int]()
    for depth in (2, 9):
        model = make_attention_model(depth=depth)
        with capture_attention(model, [-1], [0]) as captured, torch.no_grad():
            model(random_image_batch())
        sizes.add(held_by(captured))
    assert sizes == {2 * 7 * 7 * 4}  # of one head, not a view of all


def test_half_precision() -> None:
    model = make_attention_model("relative").bfloat16()
    with capture_attention(model, gradients=True) as captured:
        logits = model(random_image_batch().bfloat16())
    for weights, gradient in zip(captured.maps, captured.compute_gradients(logits.sum()), strict=True):
        assert weights.dtype == gradient.dtype == torch.float32
        assert (weights.sum(-1) - 1).abs().max() <= 1e-5
    pooled = make_attention_model("map").bfloat16()
    with capture_attention(pooled) as captured, torch.no_grad():
        pooled(random_image_batch().bfloat16())
    assert captured.pool_shares is not None
    assert captured.pool_shares.dtype == torch.float32
    assert (captured.pool_shares.sum(-1) - 1).abs().max() <= 1e-5


def test_maps_are_float32_under_autocast() -> None:
    model, pixels = make_attention_model(), random_image_batch()
    layer = find_attention_layers(model)[0]
    given = list[Tensor]()
    layer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with capture_attention(model) as captured, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(pixels)
        q, k = layer.project(given[0])[:2]
    assert q.dtype == torch.bfloat16
    expected = (q.float() @ k.float().mT / 8**0.5).softmax(-1)
    assert captured.maps[0].dtype == torch.float32
    assert (captured.maps[0] - expected).abs().max() <= 1e-5


def test_inference_mode() -> None:
    model = make_attention_model()
    with capture_attention(model) as plain, torch.no_grad():
        model(random_image_batch())
    with torch.inference_mode(), capture_attention(model) as captured:
        model(random_image_batch())
    assert all(map(torch.equal, captured.maps, plain.maps))


def test_last_call_of_a_module_called_twice_is_captured() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.grid = SelfAttention(16, 2), (2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(self.attn(x, self.grid), self.grid)

    model = Twice()
    given = heard(model)
    with capture_attention(model, gradients=True) as captured:
        out = model(torch.randn(2, 6, 16))
    (weights,) = captured.maps
    assert (merge_heads(weights @ captured.values[0]) - given[0]).abs().max() <= 1e-5
    assert captured.compute_gradients(out.sum())[0].shape == weights.shape


def test_maps_without_a_forward_pass_are_an_error() -> None:
    with (
        capture_attention(make_attention_model()) as captured,
        pytest.raises(VitrailError, match="layer 0 was not captured; run a forward pass"),
    ):
        _ = captured.maps


def test_a_model_without_a_grid() -> None:
    model = nn.Sequential(SelfAttention(16, 2))
    with capture_attention(model) as captured:
        model(torch.randn(2, 5, 16))
    assert captured.maps[0].shape == (2, 2, 5, 5)
    with pytest.raises(ConfigError, match="Sequential has no grid of patches; expected an ImageModel with levels"):
        _ = captured.patch_grid


def test_how_the_grid_changes() -> None:
    """A pyramid of attention: a figure of one grid would be wrong."""
    model = make_attention_model()
    (level,) = model.levels
    model.levels = (replace(level, blocks=level.blocks[:2]), replace(level, grid=(1, 2), blocks=level.blocks[2:]))
    changes = "the grid changes from 2×3 to 1×2 between layers 1 and 2"
    assert why_several_grids(make_attention_model()) == ""
    assert why_several_grids(model) == changes
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        Explainer(model, preprocessing=Preprocessing()).resolve_options(ExplainOptions())
