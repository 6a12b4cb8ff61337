"""The ViT: every kind of positions at every place, any size, what the last block computes, and errors."""

from dataclasses import asdict, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.noisy_weights import add_weight_noise
from torch import Tensor

from vitrail.base.errors import ConfigError
from vitrail.layers.positions import sinusoid_2d
from vitrail.models.parts.encoder import FIXED_TABLES
from vitrail.models.vit import ViT, ViTConfig

TOY = ViTConfig(image_size=(8, 12), patch_size=4, width=16, depth=2, heads=2, classes=5)
HINTS = get_type_hints(ViTConfig)
ADDITIVE = ("learned", "learned_2d", "sincos", "sincos_2d", "sincos_simple")
KINDS = [(kind, "stem") for kind in get_args(HINTS["positions"])] + [
    (kind, place) for kind in ADDITIVE for place in ("layers", "shared")
]


def toy(**fields: Any) -> ViT:
    return add_weight_noise(ViT(replace(TOY, **fields)))


def images(batch: int = 2, size: tuple[int, int] = (8, 12)) -> Tensor:
    return torch.randn(batch, 3, *size)


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_every_kind_of_positions_trains(kind: Any, place: Any) -> None:
    pool = "mean" if kind == "relative" else "class"  # the class token has no offset
    model = ViT(replace(TOY, positions=kind, positions_at=place, registers=2, pool=pool)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    batch, labels, losses = images(8), torch.arange(8) % 5, list[float]()
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, f"{name} should change if it is trained"
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert fixed == ({"pos_embed"} if kind.startswith("sincos") else set())


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_equal_patches_differ_only_by_positions(kind: Any, place: Any) -> None:
    model = toy(positions=kind, positions_at=place)
    same = torch.randn(1, 3, 4, 4).repeat(1, 1, 2, 3)
    tokens = model.tokens(same)[0, 1:]
    spread = (tokens - tokens[0]).abs().max()
    assert spread < 1e-5 if kind == "none" else spread > 1e-4


def test_number_of_position_tables() -> None:
    shared, layers = toy(positions_at="shared"), toy(positions_at="layers")
    assert layers.state_dict()["pos_embed"].shape == (2, 7, 16)
    state = shared.state_dict()
    state["pos_embed"] = state["pos_embed"].expand(2, -1, -1)
    layers.load_state_dict(state)
    batch = images()
    assert torch.equal(shared(batch), layers(batch))
    stem = toy()
    stem.load_state_dict(shared.state_dict())
    assert not torch.allclose(stem(batch), shared(batch))


def test_sinusoidal_tables_equal_the_formula_and_are_zero_for_the_prefix() -> None:
    model = ViT(replace(TOY, positions="sincos_2d", registers=1))
    assert model.pos_embed is not None
    assert torch.equal(model.pos_embed[0, 2:], sinusoid_2d((2, 3), 16))
    assert (model.pos_embed[0, :2] == 0).all()


def test_output_without_positions_ignores_the_order_of_patches() -> None:
    model, patches = toy(positions="none"), torch.randn(1, 6, 3, 4, 4)
    order = torch.randperm(6)

    def tile(patches: Tensor) -> Tensor:
        return patches.reshape(1, 2, 3, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(1, 3, 8, 12)

    torch.testing.assert_close(model(tile(patches)), model(tile(patches[:, order])), rtol=1e-4, atol=1e-5)


fields = st.fixed_dictionaries(
    {
        "grid": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "patch_size": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "channels": st.integers(1, 4),
        "classes": st.integers(0, 7),
        "heads": st.sampled_from((1, 2, 4)),
        "depth": st.integers(1, 3),
        "registers": st.integers(0, 2),
        "class_token": st.booleans(),
        "qkv_bias": st.booleans(),
        "prefix_positions": st.booleans(),
        "layer_scale": st.sampled_from((None, 0.1)),
        "mlp_width": st.sampled_from((None, 24)),
        "kind": st.sampled_from(KINDS),
        **{name: st.sampled_from(get_args(HINTS[name])) for name in ("activation", "pool", "head")},
    }
)


@settings(max_examples=120, deadline=None)
@given(drawn=fields)
def test_shapes_for_any_config(drawn: dict[str, Any]) -> None:
    grid, (kind, place) = drawn.pop("grid"), drawn.pop("kind")
    size = tuple(n * p for n, p in zip(grid, drawn["patch_size"], strict=True))
    drawn["class_token"] = drawn["class_token"] or drawn["pool"] == "class"
    has_table = kind in ("learned", *FIXED_TABLES) and (drawn["class_token"] or drawn["registers"])
    drawn["prefix_positions"] = drawn["prefix_positions"] or not has_table
    config = ViTConfig(**drawn, image_size=size, width=16, positions=kind, positions_at=place)
    assert ViTConfig(**asdict(config)) == config
    model = add_weight_noise(ViT(config))
    batch = torch.randn(2, config.channels, *size)
    tokens, out = model.tokens(batch), model(batch)
    assert tokens.shape == (2, config.class_token + config.registers + grid[0] * grid[1], 16)
    assert out.shape == (2, config.classes or 16)
    assert out.isfinite().all()
    torch.testing.assert_close(
        out, model.logits(tokens), rtol=1e-4, atol=1e-5
    )  # the shortcut in the last block is exact


@pytest.mark.parametrize(("kind", "place"), KINDS)
@pytest.mark.parametrize("pool", ["class", "mean", "map"])
def test_dynamic_model_takes_any_multiple_of_the_patch(kind: Any, place: Any, pool: Any) -> None:
    model = toy(positions=kind, positions_at=place, pool=pool, dynamic=True, registers=1)
    assert model(images(size=(16, 8))).shape == (2, 5)
    fixed = toy(positions=kind, positions_at=place, pool=pool, registers=1)
    fixed.load_state_dict(model.state_dict())
    batch = images()
    assert torch.equal(model(batch), fixed(batch))


@pytest.mark.parametrize("kind", ["none", "rotary"])
def test_positions_without_table_are_exact_at_any_size(kind: Any) -> None:
    model, larger = toy(positions=kind, dynamic=True), toy(positions=kind, image_size=(16, 8))
    larger.load_state_dict(model.state_dict())
    batch = images(size=(16, 8))
    assert torch.equal(model(batch), larger(batch))


def test_last_block_computes_only_the_class_token() -> None:
    model = toy()
    shapes: list[tuple[int, ...]] = []

    def record_shape(_: object, __: object, output: Tensor) -> None:
        shapes.append(tuple(output.shape))

    for block in model.blocks:
        block.register_forward_hook(record_shape)
    model(images())
    model.tokens(images())
    assert shapes == [(2, 7, 16), (2, 1, 16), (2, 7, 16), (2, 7, 16)]


def test_attention_maps_of_the_last_block_are_complete() -> None:
    """Even if the last block computes only the class token, a hook gets all tokens and so all weights."""
    model, maps = toy(), list[Tensor]()
    last = model.blocks[-1]

    def read(attn: Any, inputs: tuple[Any, ...]) -> None:
        maps.append(attn.weights(*inputs))

    last.get_submodule("attn").register_forward_pre_hook(read)
    batch = images()
    model(batch)
    model.tokens(batch)
    assert maps[0].shape == (2, 2, 7, 7)
    assert torch.equal(maps[0], maps[1])


def test_heads() -> None:
    batch = images()
    features = toy(classes=0)
    torch.testing.assert_close(features(batch), features.tokens(batch)[:, 0], rtol=1e-5, atol=1e-6)
    mlp = toy(head="mlp")
    assert mlp.pre_logits is not None
    hidden = mlp.pre_logits(mlp.tokens(batch)[:, 0]).tanh()
    torch.testing.assert_close(mlp(batch), mlp.head(hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "stochastic_depth"])
def test_every_rate_acts_only_in_training(rate: str) -> None:
    model, batch = toy(**{rate: 0.5}), images(batch=16)
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.equal(model(batch), model(batch))


def test_stochastic_depth_grows_with_the_layers() -> None:
    model = ViT(replace(TOY, depth=3, stochastic_depth=0.4))
    assert [block.get_submodule("drop_path").rate for block in model.blocks] == [0.0, 0.2, 0.4]


def test_half_precision() -> None:
    model = toy().bfloat16()
    assert model(images().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            torch.zeros(3, 8, 12),
            r"shape \(3, 8, 12\); expected \(batch, 3, 8, 12\): add the batch dimension with images\[None\]",
        ),
        (torch.zeros(1, 1, 8, 12), r"shape \(1, 1, 8, 12\); expected \(batch, 3, 8, 12\): batch, channels, rows"),
        (torch.zeros(8, 12), r"shape \(8, 12\); expected \(batch, 3, 8, 12\): batch, channels, rows, columns"),
        (torch.zeros(1, 1, 3, 8, 12), r"shape \(1, 1, 3, 8, 12\); expected \(batch, 3, 8, 12\): batch, channels"),
        (torch.zeros(8, 12, 3), r"expected \(batch, 3, 8, 12\): move the channels to the front with images\.movedim"),
        (torch.zeros(1, 8, 12, 3), r"expected \(batch, 3, 8, 12\): move the channels to the front"),
        (torch.zeros(1, 3, 12, 8), r"image of 12×8 pixels; expected 8×12, .* image_size=\(12, 8\) or dynamic=True"),
    ],
)
def test_wrong_inputs_are_refused(given: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy()(given)


def test_dynamic_model_refuses_partial_patches() -> None:
    with pytest.raises(
        ConfigError, match=r"9×12 pixels; expected a multiple of 4×4, the pixels of one token: .* to 8×12"
    ):
        toy(dynamic=True)(torch.zeros(1, 3, 9, 12))


def test_input_dropout_acts_once_for_any_positions() -> None:
    calls = 0

    def note(*_: object) -> None:
        nonlocal calls
        calls += 1

    for kind, place in KINDS:
        model = toy(positions=kind, positions_at=place)
        model.pos_drop.register_forward_hook(note)
        model(images())
    assert calls == len(KINDS)
