"""Translation: an exact loss over parts of a batch, resumed as never stopped, the same on two processes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.toy_translation import RECIPE, make_model, make_pairs, make_source, make_task, make_tokenizer
from test_train_fit import StopAt, assert_same, read_checkpoint_and_log
from torch import multiprocessing

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.text.pairs import PairSplits, SentencePairs
from vitrail.data.text.tokenizer import TextTokenizer
from vitrail.distributed import Ranks
from vitrail.evaluation.text_scores import score_translations
from vitrail.opening import Opened
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.recipes.schedule import Clock, lr_factor
from vitrail.tasks.task import MeanMetrics, Task
from vitrail.tasks.translation import TextSource, TranslationTask, open_tokenizer
from vitrail.train.fit import fit
from vitrail.train.loop import FitResult
from vitrail.train.plan import Plan
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import Trainer

CLOCK = Clock(step=0, steps=10, steps_per_epoch=5)
SGD = replace(RECIPE, optimization=OptimizationSettings(optimizer="sgd", lr=0.1))  # Adam amplifies rounding errors
SMOOTH = Augmentation(smoothing=0.1)
MODELS = ("transformer_cpu", "lstm_cpu", "lstm_bahdanau_cpu", "lstm_luong_cpu")


def change_loop(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, loop=replace(recipe.loop, **settings))


def train(task: Task, recipe: Recipe, run: Path | None = None, stop: int = 0, **options: Any) -> FitResult:
    return fit(task, make_source(recipe.loop.batch), recipe, run=run, callbacks=StopAt(stop), device="cpu", **options)


def first_batch(**options: Any) -> Batch:
    return next(make_source().load_batches(range(1), **options))


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_that_of_torch_over_the_real_tokens(name: str) -> None:
    task, batch = make_task(name, dropout=0.0), first_batch()
    task.setup(make_source(), replace(RECIPE, augmentation=SMOOTH))
    loss, metrics = task(batch, CLOCK)
    logits = task.backbone(batch["source"], batch["target_in"])
    expected = F.cross_entropy(logits.transpose(1, 2), batch["target_out"], ignore_index=0, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    kept = batch["target_out"] != 0
    assert not kept.all(), "the batch has no padding"
    hits = (logits.argmax(-1) == batch["target_out"])[kept].float().mean()
    torch.testing.assert_close(metrics["accuracy"], hits)
    assert task.count_units(batch) == int(kept.sum())


def test_padding_has_no_influence() -> None:
    task, batch = make_task(dropout=0.0), first_batch()
    task.setup(make_source(), RECIPE)
    wider = {name: F.pad(batch[name], (0, 3)) for name in ("source", "target_in", "target_out")}
    padded = replace(batch, tensors={**batch.tensors, **wider})
    torch.testing.assert_close(task(padded, CLOCK)[0], task(batch, CLOCK)[0])


def list_gradients(accumulate: int) -> Iterator[tuple[str, torch.Tensor]]:
    recipe = change_loop(replace(SGD, augmentation=SMOOTH), accumulate=accumulate)
    source = make_source(recipe.loop.batch)
    trainer = Trainer(Plan(task=make_task(dropout=0.0), source=source, recipe=recipe))
    trainer.step(source.load_batches(range(1), accumulate=accumulate))
    for name, weight in trainer.task.named_parameters():
        assert weight.grad is not None
        yield name, weight.grad
    yield "loss", trainer.metric_window["loss"]
    yield "accuracy", trainer.metric_window["accuracy"]


@pytest.mark.parametrize("parts", [2, 4, 64])
def test_gradient_of_micro_batches_is_that_of_the_batch(parts: int) -> None:
    """Also if there are more micro-batches than sentences."""
    for (name, one), (_, other) in zip(list_gradients(1), list_gradients(parts), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was never stopped, with a moving average; do not modify it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(make_task(), change_loop(RECIPE, ema=0.9), folder)
    return RunFolder(folder)


@pytest.mark.parametrize("stop", [1, 6])
def test_resume_is_bit_identical(stop: int, uninterrupted: RunFolder, tmp_path: Path) -> None:
    recipe = change_loop(RECIPE, ema=0.9)
    with pytest.raises(KeyboardInterrupt):
        train(make_task(), recipe, tmp_path / "run", stop=stop + 1)
    train(make_task(), recipe, tmp_path / "run")
    assert_same(uninterrupted, RunFolder(tmp_path / "run"))


def test_log_has_perplexity_and_at_the_end_bleu(uninterrupted: RunFolder) -> None:
    records = [each for each in uninterrupted.read_records() if "val_loss" in each]
    assert len(records) == 2
    for each in records:
        assert each["val_perplexity"] == pytest.approx(torch.tensor(each["val_loss"]).exp().item())
    assert ["val_bleu" in each for each in records] == [False, True]
    assert any("tokens_per_second" in each for each in uninterrupted.read_records())


def test_evaluation_is_the_mean_over_all_tokens() -> None:
    """Whatever the batch, and without label smoothing; BLEU is that of greedy translations, at the end only."""
    task, source = make_task(), make_source()
    task.setup(source, replace(RECIPE, augmentation=SMOOTH))
    device, last = torch.device("cpu"), replace(CLOCK, step=10)
    found = [task.evaluate(source, CLOCK, batch=batch, device=device).metrics for batch in (1, 7, 20)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[0].keys() == {"perplexity", "loss"}
    ended = task.evaluate(source, last, batch=20, device=device).metrics
    loaded = Opened(source="toy", kind="text", model=task.backbone.eval(), tokenizer=make_tokenizer())
    texts = vitrail.Translator(loaded).translate(list(make_pairs().val.sources[:5]), beam=1)
    scores = score_translations([each.text for each in texts], make_pairs().val.targets[:5])
    assert (ended["bleu"], ended["chrf"]) == (scores.bleu, scores.chrf)


def train_on_rank(rank: int, folder: str) -> None:
    """A process of two, forked so that nothing is imported again."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recipe = change_loop(replace(SGD, augmentation=SMOOTH), accumulate=2)
    train(make_task(dropout=0.0), recipe, Path(folder) / "two", ranks=Ranks(rank, 2, rank))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """With two micro-batches each, and sentences that both translate at the end."""
    make_tokenizer()  # before the processes are forked: the library's threads do not survive it
    processes = [
        multiprocessing.get_context("fork").Process(target=train_on_rank, args=(n, str(tmp_path))) for n in (0, 1)
    ]
    for process in processes:
        process.start()
    train(make_task(dropout=0.0), replace(SGD, augmentation=SMOOTH), tmp_path / "one")
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    (one, records), (two, others) = (read_checkpoint_and_log(RunFolder(tmp_path / name)) for name in ("one", "two"))
    for name in one:
        if name.startswith(("model/", "optimizer/")):
            torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=0, msg=name)
    for mine, its in zip(records, others, strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_learns(name: str) -> None:
    recipe = change_loop(RECIPE, epochs=4)
    result = train(make_task(name, dropout=0.0), recipe)
    values = [each["val_perplexity"] for each in result.records if "val_perplexity" in each]
    assert values[-1] < values[0] < make_tokenizer().vocabulary * 1.5
    assert "perplexity" in repr(result)


def test_a_transformer_of_one_layer_and_one_head_learns_to_reverse() -> None:
    rows = [" ".join(row) for length in (2, 3) for row in product("123456", repeat=length)]
    random.Random(0).shuffle(rows)
    val, train_pairs = (SentencePairs(part, [row[::-1] for row in part]) for part in (rows[:40], rows[40:]))
    tokenizer = TextTokenizer.train_bpe(rows, 20)
    splits = PairSplits(name="toy", languages=("a", "b"), train=train_pairs, val=val)
    source = TextSource.encode(splits, tokenizer, batch=32, batch_tokens=256, max_length=20)
    torch.manual_seed(0)
    model = make_model(vocabulary=tokenizer.vocabulary, width=32, heads=1, mlp_width=64, dropout=0.0)
    loop = LoopSettings(epochs=25, batch=32, eval_every=0)
    settings = OptimizationSettings(lr=1e-2, weight_decay=0.0, warmup=2)
    result = fit(TranslationTask(model), source, Recipe(loop=loop, optimization=settings), device="cpu")
    loaded = Opened(source="toy", kind="text", model=result.model, tokenizer=tokenizer)
    found = vitrail.Translator(loaded).translate(list(val.sources))
    assert sum(each.text == target for each, target in zip(found, val.targets, strict=True)) >= 36


def test_muon_updates_the_layers_of_the_transformer() -> None:
    recipe = replace(RECIPE, optimization=OptimizationSettings(optimizer="muon"))
    trainer = Trainer(Plan(task=make_task(), source=make_source(), recipe=recipe))
    names = {weight: name for name, weight in trainer.task.named_parameters()}
    rest, muon = (
        {names[weight]: group for group in each.param_groups for weight in group["params"]}
        for each in trainer.optimizers
    )
    assert "backbone.target_embed.weight" in rest
    assert {name.removeprefix("backbone."): group["parts"] for name, group in muon.items() if "decoder" in name} == {
        "decoder.layers.0.attn.qkv.weight": 3,
        "decoder.layers.0.attn.proj.weight": 1,
        "decoder.layers.0.cross.q.weight": 1,
        "decoder.layers.0.cross.kv.weight": 2,
        "decoder.layers.0.cross.proj.weight": 1,
        "decoder.layers.0.mlp.fc1.weight": 1,
        "decoder.layers.0.mlp.fc2.weight": 1,
    }


def test_inverse_sqrt_is_the_schedule_of_the_paper() -> None:
    """d^-0.5 · min(t^-0.5, t·4000^-1.5), with d = 512 and the peak as `lr`."""
    settings, peak = OptimizationSettings(schedule="inverse_sqrt"), 512**-0.5 * 4000**-0.5
    for step in (1, 100, 4000, 4001, 100_000):
        expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert peak * lr_factor(step - 1, 100_000, 4000, settings) == pytest.approx(expected, rel=1e-12)
    assert peak == pytest.approx(6.98771e-4, rel=1e-5)


class ScriptedPerplexity(TranslationTask):
    """Returns given perplexities, one per epoch, and one more metric at the end."""

    def __init__(self, *values: float) -> None:
        super().__init__(make_model())
        self.values = values

    def evaluate(self, source: Any, clock: Clock, **options: Any) -> MeanMetrics:  # noqa: ARG002
        metrics = {"perplexity": self.values[clock.epoch - 1], "loss": 1.0}
        return MeanMetrics(metrics={**metrics, "bleu": 7.0} if clock.step >= clock.steps else metrics)


@pytest.mark.parametrize(
    ("patience", "values", "epochs"),
    [(1, (3, 2, 2), 3), (2, (5, 3, 4, 3.5), 4), (2, (5, 6, 4, 5, 3), 5), (0, (1,) * 5, 5)],
)
def test_a_run_stops_if_the_perplexity_is_not_better(
    patience: int, values: tuple[float, ...], epochs: int, tmp_path: Path
) -> None:
    recipe = change_loop(RECIPE, epochs=5, patience=patience, keep_best=True)
    source = make_source()
    result = fit(ScriptedPerplexity(*values), source, recipe, run=tmp_path / "run", device="cpu")
    assert result.steps == epochs * source.steps_per_epoch
    assert result.evaluation.metrics["bleu"] == 7.0
    assert result.records[-1]["val_bleu"] == 7.0
    assert [each["val_perplexity"] for each in result.records if "val_perplexity" in each] == list(values[:epochs])
    stop = StopAt(source.steps_per_epoch * epochs - 1)
    with pytest.raises(KeyboardInterrupt):
        fit(ScriptedPerplexity(*values), source, recipe, run=tmp_path / "other", callbacks=stop, device="cpu")
    for _ in range(2):  # resuming a run that has stopped changes nothing
        fit(ScriptedPerplexity(*values), source, recipe, run=tmp_path / "other", device="cpu")
        assert_same(RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other"))


def test_wrong_settings_are_one_line() -> None:
    source = make_source()
    with pytest.raises(ConfigError, match="`mixup` changes images, but toy has sentences; remove it"):
        train(make_task(), replace(RECIPE, augmentation=Augmentation(mixup=0.2)))
    with pytest.raises(ConfigError, match="a model of 99 tokens and padding 0; expected 25 and 0, as the tokenizer"):
        train(make_task(vocabulary=99), RECIPE)
    with pytest.raises(ConfigError, match="the model is a ViT, which reads images; expected a model that reads text"):
        fit(TranslationTask(vitrail.create("ViT-Ti/16")), source, RECIPE, device="cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ConfigError, match=r"TranslationTask trains on sentence pairs; expected a .*TextSource, not 'fa"
    ):
        fit(make_task(), "fashion", RECIPE, device="cpu")
    with pytest.raises(ConfigError, match="`tokenizer` is 'words'; expected bpe, wordpiece, or a tokenizer"):
        open_tokenizer("words", 30, [])
