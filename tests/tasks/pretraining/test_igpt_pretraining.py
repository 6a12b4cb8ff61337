"""Pre-training of Image GPT: its loss, its palette through a run, its completions, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.pretraining_cases import CASES
from support.toy_task import RECIPE, make_backbone, make_data
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.datasets import DatasetSplits
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.distributed import Ranks
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.recipes.task_settings import IgptSettings
from vitrail.tasks import find_task
from vitrail.tasks.image_source import ImageSource
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.pretraining.igpt import SAMPLES, ImageGpt
from vitrail.tasks.task import BuildContext
from vitrail.train.fit import fit

CLOCK = Clock(step=0, steps=10, steps_per_epoch=5)
ONE_EPOCH = replace(RECIPE, loop=replace(RECIPE.loop, epochs=1))


def make_task(objective: str = "autoregressive") -> Any:
    return CASES["igpt" if objective == "autoregressive" else "igpt, bert"].make()


def make_source(task: Any, **preprocessing: Any) -> ImageSource:
    prepared = replace(Preprocessing(image_size=8, mean=(0.5,) * 3, std=(0.5,) * 3), **preprocessing)
    return open_image_source(task, make_data(), RECIPE, prepared)


def prepare(task: Any) -> ImageSource:
    source = make_source(task)
    task.initialize(source, RECIPE)
    task.setup(source, RECIPE)
    return source


def test_the_loss_is_the_cross_entropy_of_all_pixels() -> None:
    task = make_task()
    batch = next(iter(prepare(task).load_batches(range(1))))
    loss, metrics = task(batch, CLOCK)
    assert loss.item() == pytest.approx(np.log(9))  # the output is zero
    torch.nn.init.normal_(task.backbone.output.weight)
    loss, metrics = task(batch, CLOCK)
    colors = task.backbone.quantize(task.normalize(batch["images"]))
    logits = task.backbone.color_logits(colors)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), colors.flatten()))
    torch.testing.assert_close(metrics["relative_loss"], loss.detach() / task.colour_entropy)
    assert metrics["accuracy"] == (logits.argmax(-1) == colors).float().mean()
    assert 0 < task.colour_entropy < np.log(9) + 1e-6


def test_bert_predicts_hidden_pixels_from_the_others() -> None:
    task = make_task("bert")
    batch = next(iter(prepare(task).load_batches(range(1))))
    colors = torch.zeros(len(batch["images"]), 64, dtype=torch.int64)
    hidden: Tensor = task.draw_masks(batch.keys["images"], colors)
    assert (hidden.sum(1) == round(0.15 * 64)).all()
    assert not torch.equal(hidden[0], hidden[1])
    embedded = task.backbone.embed_colors(colors, hidden)
    assert (embedded[hidden] == 0).all()
    assert (embedded[~hidden] != 0).any(-1).all()
    torch.nn.init.normal_(task.backbone.output.weight)
    colors = task.backbone.quantize(task.normalize(batch["images"]))
    logits = task.backbone.color_logits(colors, hidden)
    torch.testing.assert_close(task(batch, CLOCK)[0], F.cross_entropy(logits[hidden], colors[hidden]))


def test_a_run_makes_the_palette_once_and_keeps_it(tmp_path: Path) -> None:
    task = make_task()
    assert task.backbone.has_default_palette
    trained = fit(task, make_data(), ONE_EPOCH, run=tmp_path / "run", device="cpu").model
    palette = trained.palette.clone()
    assert not trained.has_default_palette
    assert palette.abs().max() <= 1
    vitrail.save(trained, tmp_path / "model")
    loaded: Any = vitrail.load(tmp_path / "model")
    again = ImageGpt(loaded)
    other = replace(ONE_EPOCH, loop=replace(ONE_EPOCH.loop, seed=9))
    fit(again, make_data(48), other, device="cpu")  # other images and another seed: the palette belongs to the weights
    assert torch.equal(again.backbone.palette, palette)
    vitrail.save(trained, tmp_path / "theirs", to="imagegpt")
    assert torch.equal(vitrail.load(tmp_path / "theirs").palette, palette)


def test_completions_keep_the_upper_half() -> None:
    task = make_task()
    source = prepare(task)
    (figure,) = task.draw_figures(source, torch.device("cpu"))
    images, samples = figure.arrays["images"], figure.arrays["samples"]
    assert samples.shape == (SAMPLES, *images.shape)
    np.testing.assert_array_equal(samples[:, :, :4], np.broadcast_to(images[:, :4], samples[:, :, :4].shape))
    assert not np.array_equal(samples[0, :, 4:], samples[1, :, 4:])
    (same,) = task.draw_figures(source, torch.device("cpu"))
    np.testing.assert_array_equal(same.arrays["samples"], samples)
    assert figure.to_png().startswith(b"\x89PNG")
    bert = make_task("bert")
    assert bert.draw_figures(prepare(bert), torch.device("cpu")) == []


def test_what_does_not_fit_is_refused() -> None:
    task = make_task()
    with pytest.raises(ConfigError, match="ViT has no palette; use `model` igpt_cpu"):
        ImageGpt(make_backbone()).check(make_source(task), RECIPE, Ranks())
    with pytest.raises(ConfigError, match=r"images of 10×10 pixels for a model of 8×8"):
        task.check(make_source(task, image_size=10), RECIPE, Ranks())
    model: Any = vitrail.create("igpt_cpu", image_size=(64, 65), width=8, depth=1, heads=1)
    large = ImageGpt(model)
    with pytest.raises(ConfigError, match=r"images of 4,160 pixels, .*; expected at most 4,096, as 64×64: set `image_"):
        large.check(make_source(large, image_size=(64, 65)), RECIPE, Ranks())
    with pytest.raises(ConfigError, match=r"mean \(0.4, 0.4, 0.4\)"):
        task.check(make_source(task, mean=(0.4,) * 3), RECIPE, Ranks())
    with pytest.raises(ConfigError, match="`objective` is bert, and the model was built with causal=True"):
        ImageGpt(task.backbone, IgptSettings(objective="bert")).check(make_source(task), RECIPE, Ranks())


def test_gray_images_get_a_palette_of_gray_levels() -> None:
    gray = np.repeat(np.random.default_rng(0).integers(0, 256, (8, 8, 8, 1), np.uint8), 3, axis=3)
    arrays = ArrayDataset(gray, np.zeros(8, np.int64), ("one",), "gray")
    data = DatasetSplits(name="gray", train=arrays, val=arrays, classes=("one",))
    palette = fit(make_task(), data, ONE_EPOCH, device="cpu").model.palette
    assert torch.equal(palette, palette[:, :1].expand_as(palette))
    assert len(palette.unique()) == len(palette)


def test_the_bundled_gray_images_are_trained_on_as_they_are() -> None:
    recipe = replace(vitrail.open_recipe("igpt-cpu"), fields={"image_size": 4, "width": 8, "depth": 1, "heads": 1})
    built = find_task("igpt").build(Request(data="fashion", recipe=recipe), BuildContext())
    built.task.initialize(built.source, recipe)
    assert built.task.backbone.palette.shape == (64, 1)


def test_the_objective_of_a_recipe_decides_whether_the_model_is_causal() -> None:
    recipe = vitrail.open_recipe("igpt-cpu")
    for objective, causal in (("autoregressive", True), ("bert", False)):
        task = {**recipe.task, "objective": objective}
        settings = replace(recipe, task=task, fields={"image_size": 8, "width": 16, "depth": 2})
        built = find_task("igpt").build(Request(data="fashion", recipe=settings), BuildContext())
        assert built.task.backbone.config.causal is causal
