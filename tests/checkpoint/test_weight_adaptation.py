"""Load for another image size, patch size or other classes; the report covers every tensor."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.checkpoint.resample import ResamplingPolicy, resample_positions
from vitrail.checkpoint.weight_adaptation import LoadReport
from vitrail.models.catalog.external_families import load_external_family

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own_family.py")


def read_with_report(path: Path, **fields: Any) -> tuple[Any, LoadReport]:
    checkpoint = read(path, **fields)
    return checkpoint.model, checkpoint.report


def toy(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    fields = {"image_size": (64, 32), "depth": 2, "width": 16, "heads": 2, "classes": 3, **fields}
    return add_weight_noise(vitrail.create(name, **fields))


@pytest.mark.parametrize("policy", get_args(ResamplingPolicy))
def test_another_resolution_and_other_classes(policy: ResamplingPolicy, tmp_path: Path) -> None:
    model = toy(registers=2)
    vitrail.save(model, tmp_path)
    loaded, report = read_with_report(tmp_path, policy=policy, image_size=(96, 64), classes=7)
    assert loaded.config.image_size == (96, 64)
    assert torch.equal(loaded.pos_embed, resample_positions(model.pos_embed, (4, 2), (6, 4), policy))
    assert torch.equal(loaded.pos_embed[:, :3], model.pos_embed[:, :3]), "class token and registers"
    assert (loaded.head.weight == 0).all()
    assert report.resized == {"pos_embed": f"{policy} positions, 4×2 to 6×4"}
    assert report.initialized == report.ignored == ("head.weight", "head.bias")
    assert set(report.matched) == set(model.state_dict()) - {"pos_embed", "head.weight", "head.bias"}
    assert loaded(torch.randn(2, 3, 96, 64)).shape == (2, 7)
    assert loaded.head.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "fields", "resized"),
    [
        ("vit_tiny_patch16_224", {"positions": "learned_2d", "positions_at": "layers"}, {"pos_rows", "pos_columns"}),
        ("vit_tiny_patch16_224", {"positions": "relative"}, {f"blocks.{n}.attn.positions.offsets" for n in (0, 1)}),
        ("vit_tiny_patch16_224", {"positions": "sincos_2d"}, {"pos_embed"}),
        ("vit_tiny_patch16_224", {"positions": "rotary"}, set[str]()),
        ("deit_tiny_distilled_patch16_224", {}, {"pos_embed"}),
        ("vit_tiny_r_s16_p8_224", {}, {"pos_embed"}),
    ],
)
def test_all_position_tables_are_resampled(
    name: str, fields: dict[str, Any], resized: set[str], tmp_path: Path
) -> None:
    model = toy(name, **fields)
    vitrail.save(model, tmp_path)
    loaded, report = read_with_report(tmp_path, image_size=(128, 96))
    assert set(report.resized) == resized
    assert report.initialized == report.ignored == ()
    assert loaded(torch.randn(1, 3, 128, 96)).isfinite().all()


def test_another_grid_with_the_same_number_of_patches_is_resampled(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    _, report = read_with_report(tmp_path, image_size=(32, 64))
    assert report.resized == {"pos_embed": "timm positions, 4×2 to 2×4"}


def test_a_new_head_has_the_dtype_of_the_other_weights(tmp_path: Path) -> None:
    vitrail.save(toy(classes=0).bfloat16(), tmp_path)
    assert {parameter.dtype for parameter in vitrail.load(tmp_path, classes=4).parameters()} == {torch.bfloat16}


def test_tensors_that_cannot_be_adapted_are_named(tmp_path: Path) -> None:
    family = load_external_family(EXAMPLE)
    vitrail.save(vitrail.create(f"{EXAMPLE}:resmlp_tiny", image_size=32, depth=1), tmp_path, family=family)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.between\.weight cannot be adapted to shape \(16, 16\)"):
        vitrail.load(tmp_path, family=family, image_size=64)


def test_both_heads_of_a_distilled_model_are_replaced(tmp_path: Path) -> None:
    vitrail.save(toy("deit_tiny_distilled_patch16_224"), tmp_path)
    _, report = read_with_report(tmp_path, classes=5)
    assert report.initialized == ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")


def test_the_head_can_be_removed(tmp_path: Path) -> None:
    model = toy()
    vitrail.save(model, tmp_path)
    loaded, report = read_with_report(tmp_path, classes=0)
    assert report.ignored == ("head.weight", "head.bias")
    images = torch.randn(1, 3, 64, 32)
    torch.testing.assert_close(loaded.eval()(images), model.tokens(images)[:, 0], rtol=1e-5, atol=1e-6)


def test_another_patch_size(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    loaded, report = read_with_report(tmp_path, patch_size=8, image_size=(32, 16))
    assert report.resized == {"patch_embed.proj.weight": "flexivit kernel"}
    assert loaded.patch_embed.proj.weight.shape == (16, 3, 8, 8)


@pytest.mark.parametrize(
    "fields", [{"width": 32}, {"depth": 3}, {"heads": 4}, {"channels": 1}, {"pool": "map"}, {"activation": "gelu_tanh"}]
)
def test_other_fields_cannot_be_changed(fields: dict[str, Any], tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    with pytest.raises(CheckpointError, match=r" in the checkpoint, not .*: image_size, patch_size"):
        vitrail.load(tmp_path, **fields)


def test_unknown_fields_and_policies_are_refused(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    with pytest.raises(ConfigError, match=r"unknown vit field 'image_sise'"):
        vitrail.load(tmp_path, image_sise=3)
    policy: Any = "tim"
    with pytest.raises(ConfigError, match=r"unknown position policy 'tim'; did you mean 'timm'\?"):
        vitrail.load(tmp_path, policy=policy)
    assert vitrail.load(tmp_path, dropout=0.1, dynamic=True, width=16).config.dynamic


def test_the_report_is_a_short_table(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path)
    _, report = read_with_report(tmp_path, image_size=64, classes=7)
    assert [line.rstrip() for line in str(report).splitlines()[2:]] == [
        "matched           29",
        "resized            1  pos_embed (timm positions, 4×2 to 4×4)",
        "initialized        2  head.weight, head.bias",
        "ignored            2  head.weight, head.bias",
    ]
