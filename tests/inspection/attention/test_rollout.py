"""Rollout matches closed forms and an independent reference."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.attention_models import make_attention_model, random_image_batch

from vitrail.base.errors import ConfigError
from vitrail.inspection.attention.capture import capture_attention, compute_classifier_token_weights
from vitrail.inspection.attention.rollout import (
    HEAD_FUSIONS,
    Merger,
    attention_rollout,
    discard_smallest,
    fill_missing_queries,
    fuse_heads,
    gradient_rollout,
    multiply_row,
    normalize_rows,
    patch_map_from_row,
    token_gradient_rollout,
    token_rollout,
)

LAYERS, HEADS, TOKENS = 4, 3, 7
EYE, EVEN = np.eye(TOKENS), np.full((TOKENS, TOKENS), 1 / TOKENS)


def random_maps(*shape: int, seed: int = 0) -> Any:
    """Random maps with rows that sum to 1: (…, N, N)."""
    return np.random.default_rng(seed).dirichlet(np.full(TOKENS, 0.5), (*shape, TOKENS))


def from_token(made_of: Any, token: Any, grid: tuple[int, int]) -> Any:
    return patch_map_from_row(multiply_row(token, made_of), grid)


def by_hand(maps: Any, fuse: str, residual: float, discard: float) -> Any:
    """Reference rollout of one image with loops: (L, H, N, N) → (N, N)."""
    result = np.eye(TOKENS)
    for layer in maps:
        mixed = np.zeros((TOKENS, TOKENS))
        for query in range(TOKENS):
            row = [{"mean": np.mean, "max": np.max, "min": np.min}[fuse](layer[:, query, key]) for key in range(TOKENS)]
            for key in sorted(range(TOKENS), key=row.__getitem__)[: int(discard * TOKENS)]:
                row[key] = 0.0
            mixed[query] = (1 - residual) * np.array(row) / sum(row)
            mixed[query, query] += residual
        result = np.einsum("ij,jk->ik", mixed, result)
    return result


@pytest.mark.parametrize("fuse", HEAD_FUSIONS)
@pytest.mark.parametrize("residual", [0.0, 0.3, 0.5])
def test_identity_stays_identity(fuse: Any, residual: float) -> None:
    maps = np.broadcast_to(EYE, (LAYERS, HEADS, TOKENS, TOKENS))
    np.testing.assert_allclose(attention_rollout(list(maps), fuse, residual), EYE, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_uniform_attention(depth: int) -> None:
    maps = [np.broadcast_to(EVEN, (HEADS, TOKENS, TOKENS))] * depth
    np.testing.assert_allclose(attention_rollout(maps, residual=0), EVEN, atol=1e-12)
    np.testing.assert_allclose(attention_rollout(maps), np.linalg.matrix_power(EYE / 2 + EVEN / 2, depth), atol=1e-12)
    np.testing.assert_allclose(attention_rollout(maps), 2.0**-depth * EYE + (1 - 2.0**-depth) * EVEN, atol=1e-12)


@pytest.mark.parametrize("fuse", HEAD_FUSIONS)
@pytest.mark.parametrize("residual", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("discard", [0.0, 0.1, 0.3, 0.5, 0.9])
def test_matches_the_reference(fuse: Any, residual: float, discard: float) -> None:
    maps = random_maps(LAYERS, HEADS)
    found = attention_rollout(list(maps), fuse, residual, discard)
    np.testing.assert_allclose(found, by_hand(maps, fuse, residual, discard), atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-12)
    assert found.min() >= 0


def test_order_of_layers() -> None:
    """A token receives what the last layer attends to, as it is after the layer before."""
    first, last = np.zeros((2, TOKENS, TOKENS))
    first[:, 4] = last[:, 2] = 1  # all attend to token 4, then all to token 2
    first[2] = np.eye(TOKENS)[5]  # which attends to token 5
    found = attention_rollout([first[None], last[None]], residual=0)
    assert (found == np.eye(TOKENS)[5]).all()


def test_batches_equal_single_images() -> None:
    maps, gradients = random_maps(LAYERS, 5, 2, HEADS), random_maps(LAYERS, 5, 2, HEADS, seed=1) - 0.1
    together = attention_rollout(list(maps), "max", 0.4, 0.3)
    by_class = gradient_rollout(list(maps), list(gradients))
    assert together.shape == by_class.shape == (5, 2, TOKENS, TOKENS)
    for image in np.ndindex(5, 2):
        one = [layer[image] for layer in maps]
        np.testing.assert_allclose(together[image], attention_rollout(one, "max", 0.4, 0.3), atol=1e-12)
        np.testing.assert_allclose(
            by_class[image], gradient_rollout(one, [each[image] for each in gradients]), atol=1e-12
        )


def test_float32_stays_float32() -> None:
    maps = list(random_maps(LAYERS, HEADS).astype(np.float32))
    for result in (attention_rollout(maps, discard=0.3), gradient_rollout(maps, maps)):
        assert result.dtype == np.float32
    np.testing.assert_allclose(attention_rollout(maps), by_hand(maps, "mean", 0.5, 0), atol=1e-6)


def test_class_attention_does_not_change_patches() -> None:
    maps, last = random_maps(2, HEADS), random_maps(HEADS)[:, :1]
    for residual in (0.0, 0.5):
        before, after = (
            attention_rollout(list(maps), residual=residual),
            attention_rollout([*maps, last], residual=residual),
        )
        expected = residual * before[0] + (1 - residual) * last.mean(0)[0] @ before
        np.testing.assert_allclose(after[0], expected, atol=1e-12)
        np.testing.assert_allclose(after[1:], before[1:], atol=1e-12)
    gradients = random_maps(3, HEADS, seed=1) - 0.1
    before = gradient_rollout(list(maps), list(gradients[:2]))
    after = gradient_rollout([*maps, last], [*gradients[:2], gradients[2][:, :1]])
    relevant = np.maximum(gradients[2][:, :1] * last, 0).mean(0)
    np.testing.assert_allclose(after[0], before[0] + relevant[0] @ before, atol=1e-12)
    np.testing.assert_allclose(after[1:], before[1:], atol=1e-12)
    assert gradient_rollout([last], [gradients[2][:, :1]]).shape == (TOKENS, TOKENS)
    assert fill_missing_queries(np.stack([last.mean(0)] * 2)).shape == (2, TOKENS, TOKENS)


def test_gradient_rollout_matches_a_loop() -> None:
    maps, gradients = random_maps(LAYERS, HEADS), np.random.default_rng(2).normal(size=(LAYERS, HEADS, TOKENS, TOKENS))
    expected = np.eye(TOKENS)
    for layer in range(LAYERS):
        relevant = np.zeros((TOKENS, TOKENS))
        for head, query, key in np.ndindex(HEADS, TOKENS, TOKENS):
            speaks = maps[layer, head, query, key] * gradients[layer, head, query, key]
            relevant[query, key] += speaks / HEADS if speaks > 0 else 0
        expected = expected + np.einsum("ij,jk->ik", relevant, expected)
    np.testing.assert_allclose(gradient_rollout(list(maps), list(gradients)), expected, atol=1e-12)
    against = gradient_rollout(list(maps), [-np.abs(each) for each in gradients])
    np.testing.assert_array_equal(against, EYE)  # nothing supports the class


def test_a_merger_is_a_factor_without_the_identity() -> None:
    """Two layers of all tokens, then two of the three tokens that they are merged into."""
    random = np.random.default_rng(3)
    early, late = list(random_maps(2, HEADS)), list(random.dirichlet(np.ones(3), (2, HEADS, 3)))
    weights, token = random.dirichlet(np.ones(TOKENS), 3), np.array([0.2, 0.3, 0.5])
    merger, maps = Merger(2, weights), [*early, *late]
    expected = token @ attention_rollout(late) @ weights @ attention_rollout(early)
    np.testing.assert_allclose(token_rollout(token, maps, merger=merger), expected, atol=1e-12)
    assert expected.sum() == pytest.approx(1)
    np.testing.assert_allclose(
        token_rollout(EYE[0], early, merger=merger), attention_rollout(early)[0], atol=1e-12
    )  # up to a layer before it
    gradients = [random.normal(size=each.shape) for each in maps]
    relevance = gradient_rollout(late, gradients[2:]) @ weights @ gradient_rollout(early, gradients[:2]) - weights
    found = token_gradient_rollout(token, maps, gradients, merger)
    np.testing.assert_allclose(found, token @ relevance, atol=1e-12)


def test_discard() -> None:
    row = np.array([[0.4, 0.1, 0.2, 0.3]])
    for share, expected in ((0, row[0]), (0.24, row[0]), (0.25, [0.4, 0, 0.2, 0.3]), (0.75, [0.4, 0, 0, 0])):
        assert discard_smallest(row, share)[0].tolist() == list(expected)
    assert row.tolist() == [[0.4, 0.1, 0.2, 0.3]]  # the input is not changed


@given(st.integers(1, 200), st.integers(0, 99))
@example(100, 29)
def test_number_of_discarded_entries(tokens: int, percent: int) -> None:
    row = np.random.default_rng(tokens).permutation(tokens)[None] + 1.0
    kept = discard_smallest(row, percent / 100)
    assert (kept == 0).sum() == percent * tokens // 100
    assert sorted(kept[kept > 0]) == sorted(row[0])[percent * tokens // 100 :]


def test_fused_heads_and_rows_of_zeros() -> None:
    apart = np.array([[[1.0, 0], [0.5, 0.5]], [[0, 1.0], [0.5, 0.5]]])
    assert fuse_heads(apart, "min").tolist() == [[0, 0], [0.5, 0.5]]
    assert fuse_heads(apart, "max").tolist() == [[1, 1], [0.5, 0.5]]
    assert normalize_rows(fuse_heads(apart, "min")).tolist() == [[0, 0], [0.5, 0.5]]
    found = attention_rollout([apart], "min")
    assert found.tolist() == [[0.5, 0], [0.25, 0.75]]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"fuse": "median"}, "fuse is 'median'; expected one of mean, max, min"),
        ({"residual": 1}, "residual is 1; expected 0 or more, and less than 1"),
        ({"residual": -0.1}, r"residual is -0\.1"),
        ({"discard": 1.0}, r"discard is 1\.0; expected 0 or more"),
        ({"discard": float("nan")}, "discard is nan"),
        ({"maps": []}, "no attention maps"),
    ],
)
def test_invalid_arguments(changed: dict[str, Any], says: str) -> None:
    named = {name: value for name, value in changed.items() if name != "maps"}
    with pytest.raises(ConfigError, match=says):
        attention_rollout(changed.get("maps", list(random_maps(2, HEADS))), **named)


def test_gradient_rollout_without_maps_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no attention maps"):
        gradient_rollout([], [])


@pytest.mark.parametrize("fuse", HEAD_FUSIONS)
@pytest.mark.parametrize(("residual", "discard"), [(0.5, 0.0), (0.0, 0.0), (0.3, 0.6)])
def test_token_rollout_is_a_row_of_the_rollout(fuse: Any, residual: float, discard: float) -> None:
    """A row multiplied from the last layer to the first equals that row of the product."""
    maps = list(random_maps(LAYERS, 2, HEADS))
    class_attention = random_maps(2, HEADS, seed=1)[..., :1, :]
    shares = np.random.default_rng(2).dirichlet(np.ones(TOKENS), 2)
    for layers in (maps, [*maps, class_attention]):
        whole = attention_rollout(layers, fuse, residual, discard)
        row = token_rollout(shares, layers, fuse, residual, discard)
        np.testing.assert_allclose(row, np.einsum("bi,bij->bj", shares, whole), atol=1e-12)
        gradients = [np.random.default_rng(3).normal(size=each.shape) for each in layers]
        by_class = gradient_rollout(layers, gradients) - EYE
        row = token_gradient_rollout(shares, layers, gradients)
        np.testing.assert_allclose(row, np.einsum("bi,bij->bj", shares, by_class), atol=1e-12)
    with pytest.raises(ConfigError, match="no attention maps"):
        token_rollout(EYE[0], [])


def test_map_of_a_token() -> None:
    made_of = random_maps()
    for token in range(TOKENS):
        found = from_token(made_of, EYE[token], (2, 3))
        np.testing.assert_allclose(found, (made_of[token, 1:] / made_of[token, 1:].sum()).reshape(2, 3), atol=1e-12)
        assert found.sum() == pytest.approx(1)
    several = from_token(random_maps(4, 2), EYE[:1], (3, 2))
    assert several.shape == (4, 2, 3, 2)
    np.testing.assert_allclose(several.sum((-1, -2)), 1)
    each_its_own = from_token(random_maps(3), EYE[[0, 2, 6]], (2, 3))
    for image, token in enumerate((0, 2, 6)):
        np.testing.assert_allclose(each_its_own[image], from_token(random_maps(3)[image], EYE[token], (2, 3)))
    assert from_token(EYE, EYE[0], (2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]  # no patch contributes


@pytest.mark.parametrize("case", ["learned with registers", "mean", "map with class token and registers", "cct"])
def test_map_of_the_tokens_that_the_head_reads(case: str) -> None:
    """By definition, the rows of the tokens that the head reads, weighted by how it reads them."""
    model = make_attention_model(case)
    with capture_attention(model) as captured, torch.no_grad():
        model(random_image_batch())
    made_of = attention_rollout([each.double().numpy() for each in captured.maps])
    found = from_token(made_of, compute_classifier_token_weights(captured).numpy(), captured.patch_grid)
    assert found.shape == (2, 2, 3)
    np.testing.assert_allclose(found.sum((-1, -2)), 1, atol=1e-6)
    for image in range(2):
        rows = made_of[image, :, captured.prefix :]
        if case == "mean":
            expected = rows[captured.prefix :].mean(0)
        elif captured.pool_shares is not None:
            expected = np.sum(
                [share * row for share, row in zip(captured.pool_shares[image].tolist(), rows, strict=True)], axis=0
            )
        else:
            expected = rows[0]
        np.testing.assert_allclose(found[image].ravel(), expected / expected.sum(), atol=1e-6)
