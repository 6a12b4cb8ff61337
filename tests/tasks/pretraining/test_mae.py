"""MAE against transformers' ViTMAE with the same weights and masks, its sizes, its masks and what it refuses."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before transformers
from support.toy_task import RECIPE, make_backbone, make_data

# isort: split
import transformers
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.checkpoint.family_recognition import make_sincos_table
from vitrail.cli.convert import convert
from vitrail.data.batch import Batch
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.data.rng import make_view_keys
from vitrail.models import FAMILIES
from vitrail.models.catalog.families import load_family
from vitrail.recipes.recipe import open_recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import MaeSettings
from vitrail.tasks import find_task
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.mae import MaskedAutoencoder, make_position_table
from vitrail.tasks.pretraining.parts.masked_prediction import (
    draw_mask,
    draw_noise,
    join_patches,
    split_by_noise,
    split_into_patches,
)
from vitrail.tasks.task import BuildContext, check_task
from vitrail.train.fit import fit

CLOCK = Clock(step=0, steps=10, steps_per_epoch=5)
MASKED_FAMILIES = ("vit", "deit", "cait", "parallel_vit", "deepvit")  # whose patches can be dropped
TEXT_FAMILIES = ("transformer", "seq2seq")
SETTINGS = MaeSettings(mask_ratio=0.75, decoder_width=16, decoder_depth=2, decoder_heads=4)
FIELDS = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 2, "heads": 3, "positions": "sincos_2d"}


def make_task(settings: MaeSettings = SETTINGS, **fields: Any) -> MaskedAutoencoder:
    task = MaskedAutoencoder(make_backbone(**{**FIELDS, **fields}), settings)
    task.preprocessing = Preprocessing(image_size=16, crop=1.0)
    return task


def make_batch(count: int = 4) -> Batch:
    images = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch({"images": images}, {"images": make_view_keys(0, 0, np.arange(count), 0)}, count)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The authors' model, as transformers has it, with random weights and norms that are not the identity."""
    torch.manual_seed(0)
    config: Any = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "image_size": 16,
        "patch_size": 4,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
        "layer_norm_eps": 1e-6,
        "norm_pix_loss": True,
    }
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**config)).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3) if weight.requires_grad else None
    return model


def build_from(init: Path, **settings: Any) -> tuple[MaskedAutoencoder, list[str]]:
    """The task of `vitrail train --init` on toy images, and what is reported."""
    lines = list[str]()
    recipe = open_recipe("mae-cpu").with_settings({"batch": 8, "task": settings})
    recipe = replace(recipe, model=None, fields={"heads": 3})
    data = init.parent / "images"
    if not data.exists():
        write_toy_images(data)
    setup = find_task("mae").build(
        Request(data=str(data), recipe=recipe, init=str(init)), BuildContext(report=lines.append)
    )
    task = setup.task
    assert isinstance(task, MaskedAutoencoder)
    task.setup(setup.source, recipe)
    return task, lines


def write_toy_images(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(24):
        place = folder / f"{number}.png"
        place.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(place)


@pytest.mark.filterwarnings("ignore::vitrail.base.errors.CheckpointWarning")  # about what a file does not specify
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_predictions_and_masks_are_those_of_transformers(theirs: Any, tmp_path: Path, *, normalized: bool) -> None:
    theirs.save_pretrained(tmp_path / "theirs")
    task, _ = build_from(tmp_path / "theirs", normalize_pixels=normalized, decoder_width=16, decoder_heads=4)
    theirs.config.norm_pix_loss = normalized
    batch = make_batch()
    noise = torch.from_numpy(draw_noise(batch.keys["images"], 16))
    images = task.normalize(batch["images"])
    with torch.no_grad():
        its = theirs(images, noise=noise)
        kept, hidden = task.draw_masks(batch.keys["images"], images.device)
        predicted = task.decoder(task.encode(images, kept), kept, hidden)
        loss, metrics = task(batch, CLOCK)
    mask = torch.zeros(4, 16).scatter_(1, hidden, 1.0)
    assert torch.equal(mask, its.mask)
    logits = its.logits.gather(1, hidden[..., None].expand_as(predicted))
    torch.testing.assert_close(predicted, logits, atol=1e-6, rtol=1e-6)
    assert loss.item() == pytest.approx(its.loss.item(), rel=1e-6)
    assert metrics["relative_loss"] == pytest.approx(loss.item() / metrics["baseline_loss"].item())


def test_zero_prediction_costs_the_baseline() -> None:
    task = make_task()
    for weight in (task.decoder.decoder_pred.weight, task.decoder.decoder_pred.bias):
        nn.init.zeros_(weight)
    loss, metrics = task(make_batch(), CLOCK)
    assert loss.item() == pytest.approx(47 / 48, abs=1e-5)  # 4×4 patches of 3 channels
    assert metrics["relative_loss"].item() == pytest.approx(1, abs=1e-6)
    raw = make_task(replace(SETTINGS, normalize_pixels=False))
    _, metrics = raw(make_batch(), CLOCK)
    images = raw.normalize(make_batch()["images"])
    _, hidden = raw.draw_masks(make_batch().keys["images"], images.device)
    assert metrics["baseline_loss"].item() == pytest.approx(
        raw.make_targets(images, hidden).flatten(0, 1).var(0, correction=0).mean().item(), rel=1e-5
    )


@pytest.mark.parametrize(
    ("preset", "total", "trainable"),
    [
        ("vit_base_patch16_224", 111_907_840, 111_655_680),
        ("vit_large_patch16_224", 329_541_888, 329_239_296),
        ("vit_huge_patch14_224", 657_074_508, 656_613_964),
    ],
)
def test_parameter_counts_are_those_of_the_authors(preset: str, total: int, trainable: int) -> None:
    with torch.device("meta"):
        task = MaskedAutoencoder(vitrail.create(preset, classes=0, positions="sincos_2d"))
    weights = list(task.parameters())
    assert sum(each.numel() for each in weights) == total
    assert sum(each.numel() for each in weights if each.requires_grad) == trainable


def test_position_table_has_the_order_of_the_authors() -> None:
    torch.testing.assert_close(make_position_table((3, 3), 8), make_sincos_table(3, 8, columns_first=True)[0, 1:])
    assert make_position_table((2, 3), 8).shape == (6, 8)


def test_patches_are_rows_of_pixels_and_are_joined_again() -> None:
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    pixels = split_into_patches(images, (2, 3))
    assert pixels[1, 3].tolist() == images[1, :, 2:4, 3:6].permute(1, 2, 0).flatten().tolist()
    assert torch.equal(join_patches(pixels, (2, 3), (2, 2)), images)


def test_masks_depend_on_the_key_alone() -> None:
    keys = make_view_keys(0, 0, np.arange(6), 0)
    kept, hidden = split_by_noise(draw_noise(keys, 16), 4)
    assert torch.equal(torch.cat([kept, hidden], dim=1).sort().values, torch.arange(16).expand(6, -1))
    some, _ = split_by_noise(draw_noise(keys[3:5], 16), 4)
    assert torch.equal(some, kept[3:5])
    assert len({tuple(row) for row in kept.sort().values.tolist()}) == 6
    mask = draw_mask(keys, 16, 10)
    assert mask.sum(1).tolist() == [10] * 6
    assert not torch.equal(mask[0], draw_mask(make_view_keys(0, 1, [0], 0), 16, 10)[0])  # another epoch


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {"mask_ratio": 0.95}, r"`mask_ratio` is 0.95, which keeps none of 16 patches; expected at most 0.937\b"),
        ({}, {"mask_ratio": 0.0}, r"`mask_ratio` is 0, which hides none of 16 patches"),
        ({"pool": "mean_norm"}, {}, "final norm.*use `pool` mean"),
        ({"pool": "map"}, {}, "pool 'map'; use `pool` mean"),
        ({"positions": "rotary", "heads": 1}, {}, "patches that can be dropped.*'rotary'"),
        ({"classes": 3}, {}, "3 classes; expected 0"),
        ({"channels": 1}, {}, "3 means for a model of 1 channels"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields: Any, settings: Any, expected: str) -> None:
    task = make_task(replace(SETTINGS, **settings), **fields)
    source = open_image_source(task, make_data(), RECIPE, Preprocessing(image_size=16))
    with pytest.raises(ConfigError, match=expected):
        check_task(task, source, RECIPE, task.ranks)


def test_decoder_width_fits_its_heads() -> None:
    with pytest.raises(ConfigError, match=r"`decoder_width` is 20; expected a multiple .*`decoder_heads`, 8"):
        MaeSettings(decoder_width=20, decoder_heads=8)


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("vit_tiny_patch16_224", {"class_token": False, "pool": "mean"}),
        ("vit_tiny_patch16_224", {"registers": 2, "positions": "learned_2d"}),
        ("vit_tiny_patch16_224", {"positions": "none"}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("cait_xxs24_224", {}),
        ("vit_small_patch16_18x2_224", {}),
        ("deepvit_patch16_224_re_attn_16b", {}),
    ],
)
def test_other_models_are_trained(preset: str, fields: Any) -> None:
    """Every weight gets a gradient, which two processes need."""
    toy = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 2, "heads": 3, "classes": 0}
    task = MaskedAutoencoder(vitrail.create(preset, **{**toy, **fields}), SETTINGS)
    task.preprocessing = Preprocessing(image_size=16)
    task(make_batch(), CLOCK)[0].backward()
    assert not [name for name, each in task.named_parameters() if each.requires_grad and each.grad is None]


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in (*MASKED_FAMILIES, *TEXT_FAMILIES)])
def test_other_families_are_refused_with_the_reason(family: str) -> None:
    found = load_family(family)
    with torch.device("meta"):
        model: Any = found.build(found.configure(next(iter(found.presets.values())), classes=0))
        task = MaskedAutoencoder(model)
    source = open_image_source(task, make_data(), RECIPE)
    with pytest.raises(ConfigError, match=r"^MAE needs patches that can be dropped; this \w+ has none, since .*; use"):
        check_task(task, source, RECIPE, task.ranks)


def name_as_authors(task: MaskedAutoencoder) -> dict[str, Tensor]:
    return {**task.backbone.state_dict(), **task.decoder.state_dict()}


@pytest.mark.filterwarnings("ignore::vitrail.base.errors.CheckpointWarning")
def test_file_of_the_authors_continues_with_its_decoder(tmp_path: Path) -> None:
    """The width and depth of the decoder are those of the file, not of the recipe."""
    task = make_task()
    torch.save({"model": name_as_authors(task), "epoch": 3}, tmp_path / "full.pth")
    found, lines = build_from(tmp_path / "full.pth", decoder_width=16, decoder_heads=4, decoder_depth=7)
    assert [each for each in lines if "2 blocks of width 16 with 4 heads" in each]
    for name, tensor in name_as_authors(task).items():
        assert torch.equal(tensor, name_as_authors(found)[name]), name
    torch.save({"model": task.backbone.state_dict()}, tmp_path / "encoder.pth")
    found, lines = build_from(tmp_path / "encoder.pth", decoder_width=32, decoder_depth=1)
    assert [each for each in lines if "only the backbone of" in each and "encoder.pth" in each]
    assert found.settings.decoder_width == 32


def test_decoder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    task = make_task()
    tensors = name_as_authors(task)
    with pytest.raises(CheckpointError, match=r"^decoder_pred.weight .* is \(12, 16\); expected \(48, 16\)"):
        task.load_parts({**tensors, "decoder_pred.weight": torch.zeros(12, 16)})
    with pytest.raises(CheckpointError, match=r"^decoder_norm.bias of the decoder is missing; expected \(16,\)"):
        task.load_parts({name: each for name, each in tensors.items() if name != "decoder_norm.bias"})


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_encoder_of_a_scratch_run_is_written_for_the_authors_code(tmp_path: Path, pool: str) -> None:
    """The order of the table's columns differs, but the file contains the table."""
    model, images = make_task(pool=pool).backbone, torch.randn(2, 3, 16, 16)
    with pytest.warns(UserWarning, match="pool='mean'") if pool == "mean" else nullcontext():
        write(model, tmp_path / "encoder.pth", "mae")
    back = read(tmp_path / "encoder.pth", heads=3, classes=0, pool=pool).model
    assert torch.equal(back(images), model(images))


@pytest.mark.filterwarnings("ignore:mae cannot store")
def test_run_is_continued_with_its_decoder_and_has_a_figure(tmp_path: Path) -> None:
    """Through the loop and the folder of a run: reconstructions, and a new task that starts from it."""
    task = make_task()
    data = make_data()
    recipe = replace(RECIPE, loop=replace(RECIPE.loop, epochs=1))
    result = fit(task, data, recipe, run=tmp_path / "run", device="cpu")
    vitrail.save(result.model, tmp_path / "run" / "model", preprocessing=task.preprocessing)
    found, lines = build_from(tmp_path / "run", decoder_width=16, decoder_heads=4)
    assert [each for each in lines if "the decoder, 2 blocks of width 16" in each]
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name

    convert(str(tmp_path / "run"), tmp_path / "full.pth", to="mae", parts=True)
    written = torch.load(tmp_path / "full.pth")["model"]
    for name, tensor in name_as_authors(task).items():
        assert torch.equal(tensor, written[name]), name
    with pytest.raises(CheckpointError, match=r"^timm has only the model; expected `to` mae"):
        convert(str(tmp_path / "run"), tmp_path / "full.safetensors", to="timm", parts=True)

    source = open_image_source(task, data, recipe, task.preprocessing)
    (figure,) = task.draw_figures(source, torch.device("cpu"))
    assert "4 visible patches of 16" in figure.caption
    assert figure.to_png().startswith(b"\x89PNG")
    images, masked, predicted = (figure.arrays[name] for name in ("images", "masked", "predicted"))
    assert images.shape == (8, 16, 16, 3)
    visible = (masked == images).all(-1)
    assert visible.mean() == pytest.approx(0.25, abs=0.01)
    assert (predicted == images)[visible].all()
    assert not (predicted == images)[~visible].all()


def test_perfect_prediction_reconstructs_the_image() -> None:
    """Predicted pixels that are normalized per patch are put back to the patch's mean and variance."""
    task = make_task()
    images = make_batch()["images"]

    class Oracle(nn.Module):
        def forward(self, _tokens: Tensor, _kept: Tensor, hidden: Tensor) -> Tensor:
            return task.make_targets(task.normalize(images), hidden)

    task.decoder = Oracle()  # pyright: ignore[reportAttributeAccessIssue]
    found = task.reconstruct(images)
    np.testing.assert_allclose(found.predicted, images.permute(0, 2, 3, 1).numpy() / 255, atol=1e-5)
    assert found.hidden.mean() == 0.75
    assert found.errors.max() < 1e-5
