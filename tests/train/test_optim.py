from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from test_train_fit import assert_same, create_runs, train_toy_model
from timm.optim._param_groups import param_groups_layer_decay
from timm.optim.lars import Lars as TimmLars
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Precision, Recipe
from vitrail.tasks.classification import Classification
from vitrail.train import optim
from vitrail.train.optim import (
    Lars,
    Muon,
    WeightEMA,
    create_optimizers,
    freeze_all_but_last_blocks,
    list_weights,
    make_parameter_groups,
    orthogonalize,
    orthogonalize_all,
    set_frozen_batch_norms_to_eval,
    set_scaled_lr,
)

SETTINGS = OptimizationSettings(weight_decay=0.3, layer_decay=0.5)


def tiny(name: str = "DeiT-Ti-distilled", **fields: object) -> nn.Module:
    given = {"image_size": 32, "width": 24, "depth": 3, "heads": 3, "classes": 5, **fields}
    return vitrail.create(name, **given)


def test_norms_biases_tokens_and_positions_do_not_decay() -> None:
    not_decaying = {weight.name for weight in list_weights(tiny()) if not weight.decays}
    assert {"cls_token", "dist_token", "pos_embed", "blocks.0.norm1.weight", "norm.bias", "head.bias"} <= not_decaying
    decaying = {weight.name for weight in list_weights(tiny()) if weight.decays}
    assert {"patch_embed.proj.weight", "blocks.2.mlp.fc1.weight", "blocks.0.attn.qkv.weight", "head.weight"} <= decaying


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"positions": "relative"}),
        ("vit_tiny_r_s16_p8_224", {"image_size": 128}),
        ("cct_cpu_32", {"heads": 8}),
        ("vit_tiny_patch16_224", {"positions": "learned_2d", "pool": "map", "registers": 2, "layer_scale": 1e-5}),
    ],
)
def test_only_matrices_and_kernels_decay_in_every_model(preset: str, fields: dict[str, object]) -> None:
    for weight in list_weights(tiny(preset, **fields)):
        part = any(word in weight.name for word in ("norm", "bias", "token", "pos", "gamma", "latent", "offsets"))
        assert weight.decays == (not part and weight.tensor.ndim > 1), weight.name


def test_layer_decay_matches_timm() -> None:
    model = tiny("vit_tiny_patch16_224")
    peer = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    theirs = {}
    tokens = getattr(peer, "no_weight_decay")()  # noqa: B009
    for group in param_groups_layer_decay(peer, 0.3, no_weight_decay_list=tokens, layer_decay=0.5):
        for name, tensor in peer.named_parameters():
            if any(tensor is each for each in group["params"]):
                theirs[name] = (group["lr_scale"], group["weight_decay"])
    ours = {}
    for group in make_parameter_groups(list_weights(model), 4, SETTINGS):
        for name, tensor in model.named_parameters():
            if any(tensor is each for each in group["params"]):
                ours[name] = (group["scale"], group["weight_decay"])
    assert ours.keys() == theirs.keys()
    for name in ours:
        if "norm" not in name or name.startswith("blocks"):  # timm assigns the final norm to another level
            assert ours[name][0] == pytest.approx(theirs[name][0]), name
        assert ours[name][1] == theirs[name][1], name


def test_every_weight_is_in_one_group() -> None:
    model = tiny()
    for optimizer in ("adamw", "sgd", "muon", "lars"):
        optimizers = create_optimizers(Classification(model), replace(SETTINGS, optimizer=optimizer))
        grouped = [id(tensor) for each in optimizers for group in each.param_groups for tensor in group["params"]]
        assert sorted(grouped) == sorted(id(tensor) for tensor in model.parameters())


def test_optimizers_are_those_of_torch_and_fused() -> None:
    (adam,) = create_optimizers(Classification(tiny()), replace(SETTINGS, momentum=0.8, beta2=0.95))
    assert isinstance(adam, AdamW)
    assert adam.defaults["fused"] is True
    assert adam.defaults["betas"] == (0.8, 0.95)
    (sgd,) = create_optimizers(Classification(tiny()), replace(SETTINGS, optimizer="sgd"))
    assert isinstance(sgd, SGD)
    assert sgd.defaults["momentum"] == 0.9
    model = tiny()
    rest, muon = create_optimizers(Classification(model), replace(SETTINGS, optimizer="muon"))
    assert isinstance(rest, AdamW)
    assert isinstance(muon, Muon)
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    moved = {names[id(tensor)]: group["parts"] for group in muon.param_groups for tensor in group["params"]}
    expected = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1}
    assert moved == {f"blocks.{n}.{part}.weight": parts for n in range(3) for part, parts in expected.items()}


def test_learning_rate_is_scaled_by_level() -> None:
    model = tiny("vit_tiny_patch16_224")
    optimizers = create_optimizers(Classification(model), SETTINGS)
    set_scaled_lr(optimizers, 1.0)
    rates = {id(t): group["lr"] for group in optimizers[0].param_groups for t in group["params"]}
    named = {name: rates[id(tensor)] for name, tensor in model.named_parameters()}
    assert named["head.weight"] == named["norm.weight"] == 1
    assert named["blocks.2.attn.proj.weight"] == 0.5
    assert named["blocks.0.attn.proj.weight"] == 0.125
    assert named["patch_embed.proj.weight"] == named["pos_embed"] == 0.0625


@pytest.mark.parametrize(
    ("blocks", "trained"),
    [(0, {"head", "head_dist"}), (1, {"head", "head_dist", "norm", "blocks.2"}), (None, None)],
)
def test_freezing_keeps_the_head_and_the_last_blocks_trainable(blocks: int | None, trained: set[str] | None) -> None:
    model = tiny()
    freeze_all_but_last_blocks(Classification(model), blocks)
    moving = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    parts = {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in moving}
    assert parts == (trained if trained is not None else parts)
    assert trained is not None or len(moving) == len(list(model.parameters()))
    assert create_optimizers(Classification(model), SETTINGS)


def test_freezing_too_many_blocks_or_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_blocks is 4; expected less than 4"):
        freeze_all_but_last_blocks(Classification(tiny()), 4)
    with pytest.raises(ConfigError, match="no head"):
        freeze_all_but_last_blocks(Classification(tiny("vit_tiny_patch16_224", classes=0)), 0)


def test_ema_matches_its_definition_with_a_faster_start() -> None:
    model, copy = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(copy.weight)
    average = WeightEMA(model, copy, 0.9)
    expected = 0.0
    for step in range(1, 200):
        nn.init.constant_(model.weight, step)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert copy.weight.item() == pytest.approx(expected)
    assert not copy.weight.requires_grad
    assert torch.equal(model.weight, torch.full((1, 1), 199.0))


def test_blocks_in_the_stem_of_a_hybrid_are_level_0() -> None:
    levels = {weight.name: weight.level for weight in list_weights(tiny("vit_small_r26_s32_224", image_size=64))}
    assert {level for name, level in levels.items() if name.startswith("patch_embed")} == {0}
    assert levels["blocks.0.attn.qkv.weight"] == 1
    assert levels["head.weight"] == 4


def test_block_has_one_learning_rate_with_every_optimizer() -> None:
    model = tiny("vit_tiny_patch16_224")
    optimizers = create_optimizers(Classification(model), replace(SETTINGS, optimizer="muon"))
    set_scaled_lr(optimizers, 1.0)
    rates = {id(t): group["lr"] for each in optimizers for group in each.param_groups for t in group["params"]}
    named = {name: rates[id(tensor)] for name, tensor in model.named_parameters()}
    assert named["blocks.1.attn.qkv.weight"] == named["blocks.1.mlp.fc1.weight"] == named["blocks.1.norm1.bias"] == 0.25
    freeze_all_but_last_blocks(Classification(model), 1)
    maps = {
        id(t)
        for each in create_optimizers(Classification(model), replace(SETTINGS, optimizer="muon"))[1:]
        for group in each.param_groups
        for t in group["params"]
    }
    names = {name for name, tensor in model.named_parameters() if id(tensor) in maps}
    assert names == {f"blocks.2.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}


CONVNETS: dict[str, dict[str, Any]] = {
    "resnet18": {"layers": (1, 2, 1, 1)},
    "regnety_040": {"depth": 6, "w0": 16, "wa": 16.0, "wm": 2.0, "group_size": 8},
}


def small_convnet(name: str, **fields: object) -> nn.Module:
    small = {"stages": (1, 2, 1, 1)} if name == "resnet18" else {"stages": (1, 1, 3, 1), "widths": (16, 32, 64, 128)}
    group = {} if name == "resnet18" else {"group_width": 8}
    return vitrail.create(name, **{"classes": 5, **small, **group, **fields})


@pytest.mark.parametrize("name", CONVNETS)
def test_layer_decay_of_a_convnet_matches_timm(name: str) -> None:
    model, theirs = small_convnet(name), dict[str, tuple[float, float]]()
    options: Any = CONVNETS[name]
    peer = timm.create_model(name, num_classes=5, **options)
    names = {id(tensor): key for key, tensor in peer.named_parameters()}
    for group in param_groups_layer_decay(peer, 0.3, layer_decay=0.5):
        theirs |= {names[id(each)]: (group["lr_scale"], group["weight_decay"]) for each in group["params"]}
    levels = list_weights(model)
    for weight in levels:
        (group,) = make_parameter_groups([weight], max(each.level for each in levels), SETTINGS)
        assert (group["scale"], group["weight_decay"]) == theirs[weight.name], weight.name


@pytest.mark.parametrize("name", CONVNETS)
def test_convnet_is_frozen_by_block_and_trained_by_muon(name: str) -> None:
    model = small_convnet(name)
    assert len(create_optimizers(Classification(model), replace(SETTINGS, optimizer="muon"))) == 2
    blocks = 5 if name == "resnet18" else 6
    with pytest.raises(ConfigError, match=f"train_blocks is {blocks + 1}; expected less than {blocks + 1}"):
        freeze_all_but_last_blocks(Classification(model), blocks + 1)
    freeze_all_but_last_blocks(Classification(model), 1)
    moving = {name.split(".")[0] for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert moving == ({"layer4", "fc"} if name == "resnet18" else {"s4", "head"})
    with pytest.raises(ConfigError, match="the model has no head"):
        freeze_all_but_last_blocks(Classification(small_convnet(name, classes=0)), 0)


def test_frozen_batch_norms_keep_their_statistics() -> None:
    model = small_convnet("resnet18")
    freeze_all_but_last_blocks(Classification(model), 1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    set_frozen_batch_norms_to_eval(model.train())
    model(torch.randn(4, 3, 64, 64))
    changed = {name.split(".")[0] for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"layer4"}
    set_frozen_batch_norms_to_eval(other := small_convnet("resnet18").train())
    assert all(module.training for module in other.modules())


SHAPES = ((6, 4), (6,), (3, 2, 3, 3))


def make_weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def take_steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int = 4) -> list[Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 10.0 / (step + 1)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_update_matches_timm_without_weight_decay() -> None:
    """timm adapts the learning rate of biases as well, if at all, so they are in a group of their own."""
    ours, theirs, start = make_weights(), make_weights(), make_weights()
    mine = take_steps(Lars([{"params": ours}], 10.0, momentum=0.8), ours)
    groups = [
        {"params": [each for each in theirs if each.ndim > 1], "always_adapt": True},
        {"params": [each for each in theirs if each.ndim == 1]},
    ]
    its = take_steps(cast(Any, TimmLars)(groups, lr=10.0, momentum=0.8), theirs)
    for one, other, before in zip(mine, its, start, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert (one - before).norm() > 1e-2


def test_update_follows_the_formula_with_weight_decay() -> None:
    """w ← w - lr · v; v ← m · v + η |w| / |g + λw| · (g + λw); a bias has v ← m · v + g, whatever its group says."""
    trained, expected = make_weights(), [each.detach().double() for each in make_weights()]
    found = take_steps(Lars([{"params": trained, "weight_decay": 0.3}], 10.0, momentum=0.8, trust=0.01), trained)
    velocity = [torch.zeros_like(each) for each in expected]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for weight, each in zip(expected, velocity, strict=True):
            gradient = torch.randn(weight.shape, generator=generator).double()
            if weight.ndim > 1:
                gradient += 0.3 * weight
                gradient *= 0.01 * weight.norm() / gradient.norm()
            each.mul_(0.8).add_(gradient)
            weight.sub_(10.0 / (step + 1) * each)
    for weight, reference in zip(found, expected, strict=True):
        assert torch.allclose(weight.double(), reference, atol=1e-5)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 1.0), (1.0, 0.0)])
def test_zero_weight_or_gradient_has_the_ratio_one(weight: float, gradient: float) -> None:
    zero = nn.Parameter(torch.full((2, 2), weight))
    zero.grad = torch.full((2, 2), gradient)
    untouched = nn.Parameter(torch.ones(2, 2))
    Lars([{"params": [zero, untouched]}], lr=0.5).step()
    assert torch.equal(zero, torch.full((2, 2), weight - 0.5 * gradient))
    assert torch.equal(untouched, torch.ones(2, 2)), "it has no gradient"


def test_run_learns_and_resumes_bit_identically(tmp_path: Path) -> None:
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer="lars", lr=0.1, weight_decay=1e-4, warmup=0.5, layer_decay=0.9),
        loop=LoopSettings(epochs=4, batch=8, save_every=3),
    )
    uninterrupted, stopped = create_runs(tmp_path)
    result = train_toy_model(recipe, uninterrupted)
    assert result.evaluation is not None
    assert result.evaluation.top1 >= 0.5, "of four classes"
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=8)
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_orthogonalize_brings_singular_values_near_one_and_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalize(matrix) @ v.T
    assert found.diagonal().min() > 0.6
    assert found.diagonal().max() < 1.3
    assert (found - found.diagonal().diag()).abs().max() < 1e-4


def test_update_matches_torch() -> None:
    """Within the rounding of bfloat16, which torch uses."""
    mine, its = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
    its.load_state_dict(mine.state_dict())
    start = mine.weight.detach().clone()
    ours = Muon([{"params": [mine.weight]}], lr=0.02, momentum=0.9, weight_decay=0.1)
    theirs = torch.optim.Muon(
        [its.weight], lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        mine.weight.grad, its.weight.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    moved = (its.weight - start).norm()
    assert (mine.weight - its.weight).norm() < 0.02 * moved
    assert moved > 0.1


def test_parts_are_updated_separately_and_kernels_as_matrices() -> None:
    gradient = torch.randn(12, 2, 3, 3)
    stacked, first = nn.Parameter(torch.zeros(12, 2, 3, 3)), nn.Parameter(torch.zeros(4, 2, 3, 3))
    stacked.grad, first.grad = gradient.clone(), gradient[:4].clone()
    Muon([{"params": [stacked], "parts": 3}], lr=1.0).step()
    Muon([{"params": [first]}], lr=1.0).step()
    assert torch.allclose(stacked[:4], first, atol=1e-5)
    rms = first.square().mean().sqrt()
    assert 0.1 < rms < 0.3, "of the size of AdamW's updates"


def test_bfloat16_moves_every_matrix_almost_as_float32_and_keeps_momenta_exact() -> None:
    """Two of one shape, which are orthogonalized at once, one transposed, one of several maps."""

    def move(dtype: torch.dtype) -> tuple[list[nn.Parameter], Muon]:
        random = torch.Generator().manual_seed(0)
        weights = [nn.Parameter(torch.zeros(shape)) for shape in ((16, 16), (32, 16), (16, 16), (48, 16))]
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random)
        muon = Muon([{"params": weights[:3]}, {"params": weights[3:], "parts": 3}], lr=1.0)
        muon.orthogonalize_in = dtype
        muon.step()
        return weights, muon

    exact, precise = move(torch.float32)
    rounded, muon = move(torch.bfloat16)
    for mine, its in zip(rounded, exact, strict=True):
        assert mine.dtype == torch.float32
        assert 0 < (mine - its).norm() < 0.03 * its.norm()
        momenta = (muon.state[mine]["momentum_buffer"], precise.state[its]["momentum_buffer"])
        assert torch.equal(*momenta)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_muon_runs_in_the_precision_of_the_run_and_resumes_bit_identically(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set[torch.dtype]()

    def record(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        used.add(dtype)
        return orthogonalize_all(matrices, dtype)

    monkeypatch.setattr(optim, "orthogonalize_all", record)
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer="muon", lr=1e-3),
        loop=LoopSettings(epochs=2, batch=8, save_every=3, precision=precision),
    )
    uninterrupted, stopped = create_runs(tmp_path)
    train_toy_model(recipe, uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=5)
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)
    assert used == {getattr(torch, precision)}


def test_weight_without_gradient_does_not_change() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    Muon([{"params": [weight]}], lr=1.0).step()
    assert torch.equal(weight, torch.ones(2, 2))
