"""Captions: what is trained, resumed, cached and written; the same on two processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from support.toy_captions import (
    RECIPE,
    make_caption_source,
    make_caption_task,
    make_captions,
    make_encoder,
    make_tokenizer,
)
from test_train_fit import StopAt, assert_same, read_checkpoint_and_log
from torch import multiprocessing

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.captions.captions import CaptionedImages, CaptionSplits
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.formats.class_folders import FileDataset
from vitrail.distributed import Ranks
from vitrail.models.base.text_contract import Memory
from vitrail.models.catalog.families import find_preset
from vitrail.opening import open_model
from vitrail.recipes.recipe import OptimizationSettings, Recipe, open_recipe
from vitrail.recipes.request import Request
from vitrail.recipes.schedule import Clock
from vitrail.tasks.caption import CaptionTask, add_features, create_decoder, prepare_images
from vitrail.tasks.caption_source import CaptionSource
from vitrail.tasks.task import BuildContext, check_task
from vitrail.train.loop import run_training
from vitrail.train.optim import create_optimizers
from vitrail.train.plan import Plan, Runtime, plan_request
from vitrail.train.resume import resume_run
from vitrail.train.run import start_run
from vitrail.train.run_folder import RunFolder

CLOCK = Clock(step=0, steps=10, steps_per_epoch=5)
SMOOTH = replace(RECIPE, optimization=OptimizationSettings(optimizer="sgd", lr=0.05))  # Adam amplifies rounding errors
TOY_FIELDS = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "patch_size": 14}
TOY_TASK = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "decoder_mlp_width": 32, "scored_images": 4}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))


def change_loop(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, loop=replace(recipe.loop, **settings))


def train(
    task: CaptionTask,
    recipe: Recipe = RECIPE,
    run: Path | None = None,
    *,
    stop: int = 0,
    source: CaptionSource | None = None,
    ranks: Ranks | None = None,
) -> Any:
    plan = Plan(task=task, source=source or make_caption_source(recipe), recipe=recipe, ranks=ranks or Ranks())
    folder = None if run is None else RunFolder.open_or_create(run, plan.ranks, {})
    return run_training(plan, folder, StopAt(stop))


def compute_losses(task: CaptionTask, source: CaptionSource, steps: int = 5, **parts: Any) -> list[float]:
    task.setup(source, RECIPE)
    task.eval()
    return [task(batch, CLOCK)[0].item() for batch in source.load_batches(range(steps), **parts)]


def test_loss_is_the_mean_over_real_words() -> None:
    task, source = make_caption_task(), make_caption_source()
    task.setup(source, replace(RECIPE, augmentation=Augmentation(smoothing=0.1)))
    batch = next(source.load_batches(range(1)))
    loss, metrics = task(batch, CLOCK)
    logits = task.predict_words(batch)
    words = [
        (logits[row, place], batch["target_out"][row, place])
        for row in range(batch.size)
        for place in range(batch["target_out"].shape[1])
        if batch["target_out"][row, place] != 0
    ]
    expected = sum(F.cross_entropy(each, target, label_smoothing=0.1) for each, target in words) / len(words)
    torch.testing.assert_close(loss, torch.as_tensor(expected))
    assert 0 <= metrics["accuracy"] <= 1
    assert task.count_units(batch) == len(words)


def test_the_words_of_a_batch_are_those_of_its_images() -> None:
    source, data = make_caption_source(), make_captions()
    tokenizer = make_tokenizer()
    seen = list[int]()
    for batch in source.load_batches(range(source.steps_per_epoch)):
        for row, example in enumerate(batch["indices"].tolist()):
            image = int(source.train.owners[example])
            caption = tokenizer.decode(batch["target_out"][row].tolist())
            assert caption in data.train.captions[image]
            assert batch["target_in"][row, 0] == tokenizer.start
            pixels = np.asarray(data.train.images.source(image)).transpose(2, 0, 1)
            assert np.array_equal(batch["images"][row].numpy(), pixels)
            seen.append(example)
    assert len(set(seen)) == len(seen) == len(source.train) // 8 * 8
    assert len(source.train) == 36


def test_parts_of_a_step_have_the_mean_of_its_words() -> None:
    task = make_caption_task()
    task.setup(source := make_caption_source(), RECIPE)
    whole = compute_losses(task, source, 3)
    for parts in ({"accumulate": 2}, {"accumulate": 4}):
        losses = np.array(compute_losses(task, source, 3, **parts)).reshape(3, -1)
        assert losses.mean(1) == pytest.approx(whole, abs=1e-5)
    ranks = [compute_losses(task, source, 3, ranks=Ranks(rank, 2, rank)) for rank in (0, 1)]
    assert np.mean(ranks, axis=0) == pytest.approx(whole, abs=1e-5)


def test_gradient_reaches_the_encoder_only_if_it_is_trained() -> None:
    source = make_caption_source()
    batch = next(source.load_batches(range(1)))
    for frozen in (False, True):
        task = make_caption_task(freeze_encoder=frozen)
        task.setup(source, RECIPE)
        task(batch, CLOCK)[0].backward()
        reached = {name for name, weight in task.named_parameters() if weight.grad is not None}
        assert {name for name, _ in task.named_parameters() if name.startswith("decoder.")} <= reached
        assert any(name.startswith("backbone.") for name in reached) is not frozen


def test_weights_that_no_token_depends_on_are_frozen() -> None:
    task = make_caption_task({"pool": "mean_norm", "class_token": False})
    frozen = {name for name, weight in task.backbone.named_parameters() if not weight.requires_grad}
    assert frozen == {"fc_norm.weight", "fc_norm.bias"}


def test_a_frozen_encoder_has_no_dropout_and_keeps_its_weights() -> None:
    task = make_caption_task({"dropout": 0.5}, freeze_encoder=True)
    before = {name: weight.clone() for name, weight in task.backbone.state_dict().items()}
    train(task)
    for name, weight in task.backbone.state_dict().items():
        assert torch.equal(weight, before[name]), name
    task.train()
    assert task.decoder.training
    assert not task.backbone.training


def test_cached_tokens_train_as_images_do(tmp_path: Path) -> None:
    task = make_caption_task(freeze_encoder=True)
    source = make_caption_source()
    cached = add_features(source, task, BuildContext())
    assert cached is not None
    assert cached.in_memory
    batch, other = (next(each.load_batches(range(1))) for each in (source, cached))
    assert "images" not in other.tensors
    task.setup(source, RECIPE)
    torch.testing.assert_close(other["tokens"], task.encode(batch).tokens, atol=1e-5, rtol=0)
    assert torch.equal(batch["target_out"], other["target_out"])
    assert compute_losses(task, cached) == pytest.approx(compute_losses(task, source), abs=1e-5)
    one, two = (
        train(make_caption_task(freeze_encoder=True), SMOOTH, tmp_path / name, source=each)
        for name, each in (("images", source), ("tokens", cached))
    )
    assert one.evaluation.metrics == pytest.approx(two.evaluation.metrics, abs=1e-4)
    files = [*(tmp_path / "home" / "features").iterdir()]
    assert len(files) == 2
    add_features(make_caption_source(), make_caption_task(freeze_encoder=True), BuildContext())
    assert [*(tmp_path / "home" / "features").iterdir()] == files  # found again


def test_tokens_are_cached_only_without_random_augmentation() -> None:
    notes = list[str]()
    context = BuildContext(report=notes.append)
    augmented = replace(RECIPE, augmentation=Augmentation(crop="shift", shift=2))
    task = make_caption_task(freeze_encoder=True)
    source = prepare_images(make_caption_source(augmented), task, Request(data="x", recipe=augmented), context)
    assert source.train_features is None
    assert notes == ["note   the images are augmented at random, so the tokens of the encoder are not cached"]
    notes.clear()
    smoothed = replace(RECIPE, augmentation=Augmentation(smoothing=0.1))
    source = prepare_images(make_caption_source(smoothed), task, Request(data="x", recipe=smoothed), context)
    assert source.train_features is not None
    assert notes[0].startswith("note   the tokens of the encoder are kept in ")
    for changes in ({"freeze_encoder": False}, {"cache_features": False}):
        other = make_caption_task(None, **{"freeze_encoder": True, **changes})
        assert prepare_images(make_caption_source(), other, Request(data="x", recipe=RECIPE), context).in_memory


def make_photo_folder(folder: Path) -> CaptionSplits:
    """Twelve gray photos, of which two cannot be read."""
    folder.mkdir()
    for number in range(12):
        Image.fromarray(np.full((56, 56), 20 * number, np.uint8)).save(folder / f"{number}.png")
    for number in (3, 4):
        (folder / f"{number}.png").write_bytes(b"not an image")
    images = FileDataset([f"{number}.png" for number in range(12)], None, (), root=folder)
    captions = tuple((f"a {word}",) for word in ("bag", "boot", "coat") * 4)
    part = CaptionedImages(images, captions, "photos")
    return CaptionSplits(name="photos", train=part, val=part)


def test_an_unreadable_image_is_replaced_with_and_without_the_cache(tmp_path: Path) -> None:
    task, data = make_caption_task(freeze_encoder=True), make_photo_folder(tmp_path / "photos")
    source = make_caption_source(change_loop(RECIPE, batch=12), data)
    cached = add_features(source, task, BuildContext())
    assert cached is not None
    task.setup(source, RECIPE)
    one, two = (next(each.load_batches(range(1))) for each in (source, cached))
    assert torch.equal(one["indices"], two["indices"])
    assert sorted(one["indices"].tolist()) == [0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    assert len(one.skipped) == len(two.skipped) == 3
    torch.testing.assert_close(task.encode(one).tokens, two["tokens"], atol=1e-5, rtol=0)
    for each in (source, cached):
        found = task.evaluate(each, replace(CLOCK, step=10), batch=4, device=torch.device("cpu"))
        assert len(found.skipped) == 2
        assert "bleu" in found.metrics


@pytest.mark.parametrize("frozen", [False, True])
def test_resume_is_bit_identical(frozen: bool, tmp_path: Path) -> None:
    recipe = change_loop(RECIPE, save_every=1, ema=0.9)
    noisy = {"freeze_encoder": frozen, "decoder_dropout": 0.2}
    with pytest.raises(KeyboardInterrupt):
        train(make_caption_task({"dropout": 0.2}, **noisy), recipe, tmp_path / "stopped", stop=4)
    train(make_caption_task({"dropout": 0.2}, **noisy), recipe, tmp_path / "stopped")
    train(make_caption_task({"dropout": 0.2}, **noisy), recipe, tmp_path / "never stopped")
    assert_same(RunFolder(tmp_path / "stopped"), RunFolder(tmp_path / "never stopped"))


def train_on_rank(rank: int, folder: str) -> None:
    """A process of two, forked so that nothing is imported again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, rank)
    train(make_caption_task(), change_loop(SMOOTH, accumulate=2), Path(folder) / "two", ranks=ranks)
    frozen = make_caption_task(freeze_encoder=True)
    cached = add_features(make_caption_source(), frozen, BuildContext(ranks=ranks))
    train(frozen, SMOOTH, Path(folder) / "two frozen", ranks=ranks, source=cached)
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=train_on_rank, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for process in processes:
        process.start()
    train(make_caption_task(), SMOOTH, tmp_path / "one")
    train(make_caption_task(freeze_encoder=True), SMOOTH, tmp_path / "one frozen")
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    for name in ("", " frozen"):
        (one, records), (two, others) = (
            read_checkpoint_and_log(RunFolder(tmp_path / f"{run}{name}")) for run in ("one", "two")
        )
        for key in (key for key in one if key.startswith(("model/", "optimizer/"))):
            torch.testing.assert_close(one[key], two[key], atol=1e-5, rtol=0, msg=key)
        for mine, its in zip(records, others, strict=True):
            assert mine == pytest.approx(its, abs=1e-4)


def test_muon_updates_the_matrices_of_encoder_and_decoder() -> None:
    task = make_caption_task()
    settings = OptimizationSettings(optimizer="muon", layer_decay=0.5)
    adam, muon = create_optimizers(task, settings)
    names = {id(weight): name for name, weight in task.named_parameters()}
    moved = {
        names[id(each)]: (group["parts"], group["scale"]) for group in muon.param_groups for each in group["params"]
    }
    assert moved["backbone.blocks.0.attn.qkv.weight"] == (3, 0.5)
    assert moved["decoder.decoder.layers.1.attn.qkv.weight"] == (3, 1.0)
    assert moved["decoder.decoder.layers.1.cross.kv.weight"] == (2, 1.0)
    assert "decoder.target_embed.weight" in {names[id(each)] for group in adam.param_groups for each in group["params"]}


def make_request(data: str = "collages", **settings: Any) -> Request:
    recipe = open_recipe("caption-cpu").with_settings({"epochs": 0.01, "fields": TOY_FIELDS})
    task = {**TOY_TASK, **settings.pop("task", {})}
    return Request(data=data, recipe=recipe.with_settings({**settings, "task": task}))


def test_a_run_writes_two_models_that_other_commands_open(tmp_path: Path) -> None:
    start_run(make_request(), tmp_path / "run", Runtime(threads=1))
    folder = tmp_path / "run" / "model"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "decoder", "encoder"]
    encoder, decoder = vitrail.open_model(folder / "encoder"), open_model(folder / "decoder", kind="text")
    assert encoder.preprocessing.mean == (0.5,)
    assert vitrail.Predictor(encoder).features(np.zeros((56, 56), np.uint8)).shape == (16,)
    assert decoder.tokenizer.decode(decoder.tokenizer.encode(["a boot left of a shirt"])[0]) == "a boot left of a shirt"
    loaded = open_model(tmp_path / "run", kind="caption")
    images = torch.zeros(1, 1, 56, 56)
    assert torch.equal(loaded.model.encode(images).tokens, encoder.module.tokens(images))  # pyright: ignore[reportCallIssue]
    assert vitrail.open_model(folder).kind == "caption"
    assert not resume_run(tmp_path / "run", Runtime(threads=1))


def test_a_run_is_resumed_from_its_request(tmp_path: Path) -> None:
    request = make_request(save_every=1)
    start_run(request, tmp_path / "run", Runtime(threads=1))
    steps = RunFolder(tmp_path / "run").list_checkpoints()
    before = read_checkpoint_and_log(RunFolder(tmp_path / "run"))
    steps[-1].unlink()
    assert resume_run(tmp_path / "run", Runtime(threads=1))
    after = read_checkpoint_and_log(RunFolder(tmp_path / "run"))
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(each, after[0][name]) for name, each in before[0].items())


def test_wrong_parts_are_one_line() -> None:
    encoder, tokenizer = make_encoder(), make_tokenizer()
    text, _ = find_preset("transformer_tiny")
    model: Any = text.build(text.configure(text.presets["transformer_tiny"], vocabulary=20, width=16, heads=2))
    task = make_caption_task()
    linear: Any = torch.nn.Linear(1, 1)
    cases: tuple[tuple[tuple[Any, Any], str], ...] = (
        ((model, task.decoder), "Transformer reads text; expected a model that reads images"),
        ((encoder, model), "the decoder is a Transformer that does not read another model; expected one without an"),
        ((make_encoder(width=32), task.decoder), "the decoder reads tokens of width 16; expected 32, the width of"),
        ((linear, task.decoder), "the encoder is a Linear; expected an image model"),
    )
    for parts, message in cases:
        with pytest.raises(ConfigError, match=message):
            CaptionTask(*parts)
    with pytest.raises(ConfigError, match="vit_tiny_patch16_224 is a ViT, which reads images; expected a model that"):
        create_decoder(replace(task.settings, decoder="vit_tiny_patch16_224"), encoder, tokenizer)
    with pytest.raises(ConfigError, match="Transformer reads text; expected a model that reads images"):
        plan_request(
            replace(make_request(), recipe=replace(make_request().recipe, model="transformer_tiny", fields={}))
        )


@pytest.mark.parametrize(
    ("augmentation", "loop", "message"),
    [
        ({"mixup": 0.8}, {}, "`mixup` changes what a caption describes; expected 0"),
        ({"erase": 0.5}, {}, "`erase` changes what a caption describes"),
        ({}, {"compile": True}, "`compile` is True; captions are trained without it"),
        ({}, {"early_size": 28}, "`early_size` is 28; captions are trained without it"),
        ({}, {"batch": 64}, "`batch` 64 is more than the 36 training captions"),
    ],
)
def test_unsuited_settings_are_one_line(augmentation: Any, loop: Any, message: str) -> None:
    recipe = replace(change_loop(RECIPE, **loop), augmentation=Augmentation(**augmentation))
    with pytest.raises(ConfigError, match=message):
        check_task(make_caption_task(), make_caption_source(recipe), recipe, Ranks())


def test_a_decoder_of_another_vocabulary_is_refused() -> None:
    task = make_caption_task()
    task.decoder = create_decoder(task.settings, make_encoder(), make_tokenizer())
    source = make_caption_source()
    task.check(source, RECIPE, Ranks())
    other = replace(source, tokenizer=type(source.tokenizer).train_bpe(["some other text"], 30))
    with pytest.raises(ConfigError, match=r"a decoder of .* tokens and padding 0; expected .* as the tokenizer has"):
        task.check(other, RECIPE, Ranks())


def test_batches_without_images_have_tokens_of_the_memory() -> None:
    task = make_caption_task()
    tokens = torch.randn(2, 16, 16)
    batch = Batch({"tokens": tokens, "target_in": torch.ones(2, 3, dtype=torch.int64)}, {}, 2)
    assert torch.equal(task.predict_words(batch), task.decoder.decode(Memory(tokens), batch["target_in"]))
