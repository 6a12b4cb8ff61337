"""SimpleViT: logits of big_vision's code, its fixed table, counts, and files without positions."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.layout_round_trip import assert_same_tensors, read_tensors, write_checkpoint
from support.noisy_weights import add_weight_noise
from support.reference_logits import read_reference

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.models.parts.encoder import sinusoid_simple

TOY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "classes": 5}
NO_SIZE = r"google cannot store image_size=\(32, 32\), and its readers use \(224, 224\)"


def test_table_is_that_of_the_paper() -> None:
    """[sin x, cos x, sin y, cos y], each with the rates 10000^(−i/(D/4−1))."""
    table = sinusoid_simple((2, 3), 16)
    for row in range(2):
        for column in range(3):
            rates = [10_000 ** (-i / 3) for i in range(4)]
            expected = [f(place * rate) for place in (column, row) for f in (math.sin, math.cos) for rate in rates]
            torch.testing.assert_close(table[row * 3 + column], torch.tensor(expected))


@pytest.mark.parametrize("name", ["simple_vit_mlp_head", "simple_vit_linear_head"])
@torch.no_grad()
def test_logits_are_those_of_big_vision_and_its_file_comes_back(
    name: str, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = read_reference(shared, name)
    np.savez(tmp_path / "theirs.npz", allow_pickle=False, **{k: t.numpy() for k, t in reference.tensors.items()})
    found = read(tmp_path / "theirs.npz", trained_size=32)
    config = found.model.config
    assert found.layout == "google"
    assert (config.positions, config.pool, config.class_token) == ("sincos_simple", "mean", False)
    assert (config.activation, config.head) == ("gelu_tanh", "mlp" if reference.config["rep_size"] else "linear")
    assert not found.report.assumed
    assert (found.model(reference.images) - reference.logits).abs().max() < 2e-5
    write_checkpoint(found, tmp_path / "own", "vitrail")
    with pytest.warns(UserWarning, match=NO_SIZE):
        write_checkpoint(read(tmp_path / "own"), tmp_path / "back.npz", "google")
    assert_same_tensors(read_tensors(tmp_path / "back.npz"), reference.tensors)


@pytest.mark.parametrize(
    ("name", "mlp", "linear"),
    [
        ("SimpleViT-Ti/16", 5_716_456, 5_679_400),
        ("SimpleViT-S/16", 22_122_472, 21_974_632),
        ("SimpleViT-S/32", 23_007_208, 22_859_368),
        ("SimpleViT-B/16", 87_006_184, 86_415_592),
        ("SimpleViT-L/16", 305_173_480, 304_123_880),
    ],
)
def test_parameters_of_big_vision(name: str, mlp: int, linear: int) -> None:
    """The table is not trained, and does not count."""
    for head, count in (("mlp", mlp), ("linear", linear)):
        with torch.device("meta"):
            model = vitrail.create(name, head=head)
        assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == count


def test_initial_table_is_fixed_and_the_head_zero() -> None:
    model = vitrail.create("SimpleViT-S/16", **{**TOY, "image_size": (32, 48)})
    assert torch.equal(model.pos_embed[0], sinusoid_simple((4, 6), 48))
    assert not model.pos_embed.requires_grad
    assert not model.head.weight.any()
    assert {block.mlp.act.approximate for block in model.blocks} == {"tanh"}


def test_positions_are_computed_for_the_size_that_is_read(tmp_path: Path) -> None:
    """big_vision computes them for each size, so that nothing is resampled."""
    model = add_weight_noise(vitrail.create("SimpleViT-S/16", **TOY))
    with torch.no_grad():
        model.pos_embed.copy_(sinusoid_simple((4, 4), 48))
    with pytest.warns(UserWarning, match=NO_SIZE):
        write(model, tmp_path / "ours.npz", "google")
    assert not [name for name in read_tensors(tmp_path / "ours.npz") if "pos" in name]
    found = read(tmp_path / "ours.npz", image_size=(32, 48))
    assert not found.report.resized
    assert torch.equal(found.model.pos_embed[0], sinusoid_simple((4, 6), 48))
    assert read(tmp_path / "ours.npz").model.config.image_size == (224, 224)
    back = read(tmp_path / "ours.npz", trained_size=32)
    assert_same_tensors(back.model.state_dict(), model.state_dict())


def test_a_resampled_table_is_not_written_without_it(tmp_path: Path) -> None:
    model = vitrail.create("SimpleViT-S/16", **TOY)
    write(model, tmp_path / "own")
    larger = read(tmp_path / "own", image_size=64).model
    with pytest.raises(CheckpointError, match="positions were resampled to 8×8 patches"):
        write(larger, tmp_path / "ours.npz", "google")


def test_invalid_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="width 18; expected a multiple of 4 for positions 'sincos_simple'"):
        vitrail.create("SimpleViT-S/16", **{**TOY, "width": 18, "heads": 2})
