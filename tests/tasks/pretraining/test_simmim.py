"""SimMIM: the loss of transformers, masks of squares, figures, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from support.toy_task import RECIPE, make_backbone, make_data
from transformers import ViTConfig, ViTForMaskedImageModeling

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read
from vitrail.data.rng import make_view_keys
from vitrail.distributed import Ranks
from vitrail.recipes.task_settings import SimMimSettings
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.parts.masked_prediction import take_patches
from vitrail.tasks.pretraining.simmim import SimMim, hide_squares

SETTINGS = SimMimSettings(mask_size=4)


def make_task(settings: SimMimSettings = SETTINGS, **fields: Any) -> SimMim:
    torch.manual_seed(0)
    return SimMim(make_backbone(**fields), settings)


def test_loss_and_predictions_are_those_of_transformers(tmp_path: Any) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        encoder_stride=4,
        initializer_range=0.3,
    )
    theirs: Any = ViTForMaskedImageModeling(config).eval()
    torch.nn.init.normal_(theirs.vit.embeddings.mask_token)
    theirs.save_pretrained(tmp_path)
    task = SimMim(read(tmp_path, classes=0).model, SimMimSettings(mask_size=8, mask_ratio=0.7)).eval()
    assert task.load_parts(theirs.state_dict()) == "mask_token, decoder.0.weight, decoder.0.bias"
    assert task.load_parts(task.backbone.state_dict()) == ""

    images = torch.randn(3, 3, 16, 16)
    hidden = hide_squares(make_view_keys(0, 0, np.arange(3), 0), (16, 16), (4, 4), task.settings)
    mask = torch.zeros(3, 16, dtype=torch.bool).scatter_(1, hidden, value=True)
    expected = theirs(images, bool_masked_pos=mask)
    _, predictions = task.predict(images, hidden)
    assert task.compute_loss(images, predictions, hidden).item() == pytest.approx(expected.loss.item(), abs=1e-6)
    cells = torch.nn.functional.unfold(expected.reconstruction, 4, stride=4).transpose(1, 2)  # channel, row, column
    torch.testing.assert_close(predictions, take_patches(cells, hidden), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "ratio", "squares"), [(192, 0.6, 22), (224, 0.6, 30), (224, 0.02, 1)])
def test_a_fixed_number_of_squares_is_hidden(size: int, ratio: float, squares: int) -> None:
    keys = make_view_keys(0, 0, np.arange(4), 0)
    hidden = hide_squares(keys, (size, size), (16, 16), SimMimSettings(mask_ratio=ratio))
    assert hidden.shape == (4, 4 * squares), "squares of 32 pixels have four patches"
    side = size // 16
    mask = torch.zeros(4, side * side).scatter_(1, hidden, 1.0).reshape(4, side // 2, 2, side // 2, 2)
    assert (mask.mean((2, 4)).flatten(1).sum(1) == squares).all()
    assert set(mask.mean((2, 4)).unique().tolist()) <= {0.0, 1.0}, "complete squares"
    assert not torch.equal(hidden[0], hidden[1])
    assert torch.equal(hide_squares(keys[2:], (size, size), (16, 16), SimMimSettings(mask_ratio=ratio)), hidden[2:])


def test_head_of_a_base_model_has_591_360_parameters() -> None:
    with torch.device("meta"):
        task = SimMim(vitrail.create("ViT-B/16", classes=0))
    own = {name: weight.numel() for name, weight in task.named_parameters() if not name.startswith("backbone.")}
    assert own.keys() == {"mask_token", "decoder.0.weight", "decoder.0.bias"}
    assert sum(own.values()) == 591_360
    assert 0.015 < make_task(width=96).mask_token.abs().max().item() <= 0.02


def test_gradients_come_from_hidden_squares_only() -> None:
    task, images = make_task(), torch.randn(2, 3, 8, 8)
    hidden = torch.tensor([[0], [3]])
    _, predictions = task.predict(images, hidden)
    loss = task.compute_loss(images, predictions, hidden)
    images[0, :, 4:], images[1, :, :4] = 9.0, -9.0  # visible pixels
    assert task.compute_loss(images, predictions, hidden).item() == loss.item()
    _, others = task.predict(images, hidden)
    assert not torch.equal(predictions, others), "but predictions depend on them"


@pytest.mark.parametrize("fields", [{"positions": "relative"}, {"positions": "rotary", "width": 16}, {"channels": 1}])
def test_other_positions_and_channels(fields: dict[str, Any]) -> None:
    task = make_task(patch_size=(4, 2), **fields)
    _, predictions = task.predict(torch.randn(2, task.backbone.config.channels, 8, 8), torch.tensor([[0, 1], [2, 5]]))
    assert predictions.shape == (2, 2, 8 * task.backbone.config.channels)


def test_figure_shows_the_prediction_in_hidden_squares_only() -> None:
    task, device = make_task(), torch.device("cpu")
    source = open_image_source(task, make_data(), RECIPE)
    task.setup(source, RECIPE)
    (figure,) = task.draw_figures(source, device)
    assert figure.arrays.keys() == {"images", "masked", "predicted", "errors"}
    assert len(figure.arrays["images"]) == 8
    mask = (figure.arrays["masked"] == 0.5).all(-1)
    assert mask.mean() == 0.75, "3 of 4 squares"
    changed = (figure.arrays["predicted"] != figure.arrays["images"]).any(-1)
    assert (changed == mask).mean() > 0.99
    assert task.training
    assert figure.to_png().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        (SimMimSettings(mask_size=6), r"`mask_size` is 6 for patches of 4×4 pixels; .* example 8$"),
        (SimMimSettings(mask_size=16), r"`mask_size` is 16 for images of 8×8 pixels; .* example 8$"),
        (SimMimSettings(mask_size=8), r"`mask_ratio` is 0.6 and `mask_size` 8, which hides 1 of 1 squares"),
        (SimMimSettings(mask_size=4, mask_ratio=0), "hides 0 of 4 squares"),
        (SimMimSettings(mask_size=4, mask_ratio=0.8), "hides 4 of 4 squares"),
    ],
)
def test_squares_that_do_not_fit_are_refused(settings: SimMimSettings, numbers: str) -> None:
    task = make_task(settings)
    with pytest.raises(ConfigError, match=numbers) as error:
        task.check(open_image_source(task, make_data(), RECIPE), RECIPE, Ranks())
    assert "mask_size" in error.value.fields or "mask_ratio" in error.value.fields


def test_parts_of_a_run_are_loaded() -> None:
    task, other = make_task(), make_task(width=24)
    saved = {f"task.{name}": torch.full_like(weight, 3) for name, weight in task.named_parameters()}
    assert "decoder.0.bias" in task.load_parts(saved)
    assert (task.mask_token == 3).all()
    with pytest.raises(CheckpointError, match=r"mask_token .* \(1, 1, 12\); expected \(1, 1, 24\)"):
        other.load_parts(saved)


def test_models_that_mix_or_pool_patches_are_refused() -> None:
    pooled = make_task(pool="mean_norm")
    with pytest.raises(ConfigError, match="'mean_norm'"):
        pooled.check(open_image_source(pooled, make_data(), RECIPE), RECIPE, Ranks())
    task = SimMim(vitrail.create("cct_cpu_32", image_size=16, classes=0), SETTINGS)
    with pytest.raises(ConfigError, match=r"SimMIM needs patches that can be masked; .* convolutions mix patches"):
        task.check(open_image_source(task, make_data(), RECIPE), RECIPE, Ranks())
