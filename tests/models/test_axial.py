"""Axial attention equals full attention masked to the row, then to the column; its maps, tables and errors."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.checkpoint import read
from vitrail.inspection.attention.capture import capture_attention, capture_tokens, find_attention_layers
from vitrail.inspection.explain.explainer import Explainer
from vitrail.layers.attention import SelfAttention, attention, attention_weights, merge_heads
from vitrail.layers.positions import resample
from vitrail.models.axial import PRESETS, Axial, AxialAttention, AxialConfig, axial_attention

TOY = AxialConfig(image_size=(64, 48), width=16, depth=2, heads=2, classes=5)
GRID = (4, 3)
VIT = {192: 5_717_416, 384: 22_050_664, 768: 86_567_656}  # parameters of a ViT of the same width with 12 blocks


def toy(**fields: Any) -> Any:
    return add_weight_noise(Axial(replace(TOY, **fields)), std=0.3)


def line_of(token: int, rows: bool) -> list[int]:
    """The tokens in the same row, or column, as a token."""
    row, column = divmod(token, GRID[1])
    if rows:
        return [row * GRID[1] + other for other in range(GRID[1])]
    return [other * GRID[1] + column for other in range(GRID[0])]


def masked(x: Tensor, attn: AxialAttention) -> Tensor:
    """Full attention with the same weights, masked to the row or column: (B, n, D)."""
    full = SelfAttention(16, 2).double()
    full.load_state_dict({name: each for name, each in attn.state_dict().items() if not name.startswith("pos_")})
    mask = torch.zeros(12, 12, dtype=torch.bool)
    places = torch.zeros(12, 16, dtype=torch.float64)
    for token in range(12):
        mask[token, line_of(token, attn.rows)] = True
        places[token] = attn.table[0, line_of(token, attn.rows).index(token)]
    return full(x + places, mask=mask)


@pytest.mark.parametrize("rows", [True, False])
def test_attention_equals_full_attention_masked_to_the_line(rows: bool) -> None:
    attn = add_weight_noise(AxialAttention(16, 2, GRID[rows], rows=rows), std=0.3).double()
    torch.nn.init.normal_(attn.table)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    torch.testing.assert_close(attn(x, GRID), masked(x, attn), rtol=0, atol=1e-12)
    torch.testing.assert_close(attn(x, GRID, queries=5), masked(x, attn)[:, :5], rtol=0, atol=1e-12)
    hidden = torch.rand(12, 12) < 0.5
    hidden.fill_diagonal_(False)
    q, k, v, mask = attn.project(x, GRID, ~hidden)
    assert mask is not None
    assert all(set(mask[t].nonzero()[:, 0].tolist()) <= set(line_of(t, rows)) for t in range(12))
    expected = attn.proj(merge_heads(attention_weights(q, k, mask) @ v))
    torch.testing.assert_close(attn(x, GRID, ~hidden), expected, rtol=0, atol=1e-12)
    assert (attn(x, GRID) - expected).abs().max() > 0.01


def test_block_is_rows_then_columns_then_mlp() -> None:
    block: Any = toy().blocks[0].double()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    expected = x + masked(block.norm1(x), block.attn_rows)
    expected = expected + masked(block.norm2(expected), block.attn_columns)
    expected = expected + block.mlp(block.norm3(expected))
    assert (block.attn_rows.rows, block.attn_columns.rows) == (True, False)
    torch.testing.assert_close(block(x, GRID), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [True, False])
def test_axial_attention_equals_loops(rows: bool) -> None:
    q, k, v = (torch.randn(2, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    result = axial_attention(q, k, v, GRID, rows=rows)
    for token in range(12):
        line = line_of(token, rows)
        expected = attention(q[:, :, [token]], k[:, :, line], v[:, :, line])
        torch.testing.assert_close(result[:, :, [token]], expected, rtol=0, atol=1e-12)


def test_no_memory_for_all_pairs_of_tokens() -> None:
    """With 64×64 tokens, no tensor in the forward pass is as large as the number of pairs."""
    from torch.utils._python_dispatch import TorchDispatchMode  # intercepts the output of every operator

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for each in made if isinstance(made, tuple | list) else [made]:
                self.numbers = max(self.numbers, each.numel() if isinstance(each, Tensor) else 0)
            return made

    model = toy(image_size=64, patch_size=1, channels=1, depth=1)
    with torch.no_grad(), Largest() as captured:
        model(torch.randn(1, 1, 64, 64))
    assert captured.numbers <= 4096 * 64  # the size of the MLP's


@pytest.mark.parametrize("name", PRESETS)
def test_parameters(name: str) -> None:
    config = PRESETS[name]
    with torch.device("meta"):
        model = Axial(config)
    d, (h, w), patch = config.width, model.grid, math.prod(model.patch_embed.patch)
    block = 2 * (4 * d * d + 4 * d) + (8 * d * d + 5 * d) + 3 * 2 * d + (h + w) * d
    expected = 3 * patch * d + d + 9 * block + 2 * d + 1000 * d + 1000
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert "patch16" not in name or expected == pytest.approx(VIT[d], rel=0.003)


def test_macs() -> None:
    with torch.device("meta"):
        result = vitrail.summarize(vitrail.create("axial_tiny_patch8_224")).macs
    n, d, line = 784, 192, 28
    block = 2 * (4 * n * d * d + 2 * n * line * d) + 8 * n * d * d  # 2·n·√n·d instead of 2·n²·d
    assert result == 3 * 64 * n * d + 9 * block + 1000 * d


def test_output_shape_and_gradients_of_every_weight() -> None:
    model, images = toy(), torch.randn(2, 3, 64, 48)
    assert model.tokens(images).shape == (2, 12, 16)
    torch.testing.assert_close(model(images), model.logits(model.tokens(images)))
    torch.testing.assert_close(model.logits(model.tokens(images)), model.head(model.tokens(images).mean(1)))
    gradients = list[list[Tensor]]()
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        model.train().zero_grad()
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for (name, _), gradient, again in zip(model.named_parameters(), *gradients, strict=True):
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, again), name


def test_tables_are_the_only_source_of_positions() -> None:
    model, images = toy(), torch.randn(1, 3, 64, 48)
    mirrored = images.unflatten(3, (3, 16)).flip(3).flatten(3)  # the columns of patches reversed
    assert (model(images) - model(mirrored)).abs().max() > 0.01
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn_rows.pos_columns)
    torch.testing.assert_close(model(images), model(mirrored))


def test_wrong_grids_are_refused() -> None:
    model = toy()
    attn = model.blocks[0].attn_rows
    with pytest.raises(
        ConfigError, match=r"^13 tokens and a grid of 4×3; expected .* of 13 tokens, for example 1×13: .*class token"
    ):
        attn(torch.randn(1, 13, 16), GRID)
    with pytest.raises(
        ConfigError, match=r"^12 tokens and no grid; expected \(rows, columns\) of 12 tokens, for example 3×4: "
    ):
        attn(torch.randn(1, 12, 16))
    with pytest.raises(ConfigError, match=r"^11 tokens and a grid of 4×3; "):
        axial_attention(*(torch.randn(1, 2, 11, 8) for _ in range(3)), GRID, rows=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ConfigError, match=r"64×64 pixels; expected 64×48, which the model was built for"):
        model(torch.randn(1, 3, 64, 64))
    with pytest.raises(ConfigError, match=r"60×48 pixels; expected a multiple of 16×16, .* to 64×48"):
        vitrail.create("axial_tiny_patch16_224", image_size=(60, 48))


def test_dynamic_equals_loading_at_another_size(tmp_path: Path) -> None:
    model = toy(dynamic=True)
    vitrail.save(model, tmp_path / "ours")
    same, images = vitrail.load(tmp_path / "ours"), torch.randn(2, 3, 64, 48)
    assert torch.equal(same.eval()(images), model(images))
    result, images = read(tmp_path / "ours", image_size=(64, 96), dynamic=False), torch.randn(2, 3, 64, 96)
    loaded: Any = result.model
    torch.testing.assert_close(loaded.eval()(images), model(images))
    tables = [f"blocks.{n}.attn_rows.pos_columns" for n in range(2)]
    assert result.report.resized == dict.fromkeys(tables, "timm positions, 3×1 to 6×1")
    assert torch.equal(loaded.state_dict()[tables[0]], resample(model.blocks[0].attn_rows.table, (3, 1), (6, 1)))


def test_captured_maps_and_gradients_are_those_of_the_forward_pass() -> None:
    model, images = toy(), torch.randn(2, 3, 64, 48)
    with capture_attention(model, gradients=True) as captured:
        logits = model(images)
    assert (len(captured.maps), captured.patch_grid, captured.prefix) == (4, GRID, 0)
    for layer, weights in enumerate(captured.maps):
        assert weights.shape == (2, 2, 12, 12)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 12))
        outside = torch.ones(12, 12, dtype=torch.bool)
        for token in range(12):
            outside[token, line_of(token, rows=layer % 2 == 0)] = False
        assert not weights[..., outside].any()
        torch.testing.assert_close(
            merge_heads(weights @ captured.values[layer]), captured.head_outputs[layer], rtol=0, atol=1e-5
        )
    gradients = captured.compute_gradients(logits[:, 1].sum())
    layer, (head, token, other) = 3, (1, 7, 4)  # one weight of the column attention of the last block
    attn, before = find_attention_layers(model)[layer], captured.head_outputs[layer].detach()
    v = captured.values[layer]
    for image in range(2):
        nudged = before.clone()
        nudged[image, token, head * 8 : (head + 1) * 8] += 1e-2 * v[image, head, other]
        change = answer_from(model, images, attn, nudged)[image, 1] - answer_from(model, images, attn, before)[image, 1]
        torch.testing.assert_close(gradients[layer][image, head, token, other], change / 1e-2, rtol=0.05, atol=1e-4)


@torch.no_grad()
def answer_from(model: Any, images: Tensor, attn: Any, made: Tensor) -> Tensor:
    """The logits if the heads of this layer return these values."""
    with attn.proj.register_forward_pre_hook(lambda *_: made):  # pyright: ignore[reportUnknownLambdaType]
        return model(images)


def test_every_inspection_works() -> None:
    model = toy()
    preprocessing = vitrail.Preprocessing(image_size=(64, 48))
    explainer = Explainer(model, preprocessing=preprocessing)
    image = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    for method in ("rollout", "grad-rollout"):
        assert explainer.explain(image, method).map.sum() == pytest.approx(1)
    captured = explainer.explain(image, "attention", layer=0, head=0, token="2,1").map
    assert captured[2].sum() == pytest.approx(1)  # only the row of the query patch
    norms = explainer.explain(image, "norms", layer="all").maps[:, 0]
    assert norms.shape == (4, *GRID)
    with torch.no_grad(), capture_tokens(model) as states:
        model.tokens(explainer.loaded.make_batch([image]))
    for layer in range(4):  # after the block that contains the layer
        expected = states[layer // 2 + 1].norm(dim=-1).reshape(GRID)
        torch.testing.assert_close(torch.from_numpy(norms[layer]), expected)
    plates = {plate.name for plate in vitrail.look(explainer, [image] * 3).figures}
    assert {"attention_distance", "token_norms", "occlusion", "filters", "position_similarity"} <= plates
    table, block = model.tables(GRID)[0], model.blocks[0]
    for token in range(12):
        row, column = divmod(token, 3)
        places = (block.attn_rows.pos_columns[0, column], block.attn_columns.pos_rows[0, row])
        assert torch.equal(table[token], torch.cat(places))
