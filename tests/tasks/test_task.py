"""Tasks: resumed as never stopped, the same on two processes, and what they hold reaches optimizer and checkpoint."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.toy_task import RECIPE, SelfDistillation, make_backbone, make_data, make_task
from test_train_fit import StopAt, assert_same, read_checkpoint_and_log
from torch import Tensor, multiprocessing, nn

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.data.batch import Batch
from vitrail.distributed import Ranks
from vitrail.recipes.recipe import SCHEDULED_SETTINGS, OptimizationSettings, Recipe
from vitrail.recipes.schedule import Clock, Schedule, parse_schedule
from vitrail.tasks.image_task import open_image_source
from vitrail.tasks.task import Task
from vitrail.train.fit import fit
from vitrail.train.loop import FitResult
from vitrail.train.optim import create_optimizers
from vitrail.train.plan import Plan
from vitrail.train.run_folder import RunFolder
from vitrail.train.trainer import Trainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"
NOISY = {"dropout": 0.1, "stochastic_depth": 0.3}
SMOOTH = replace(RECIPE, optimization=OptimizationSettings(optimizer="sgd", lr=0.05))  # Adam amplifies rounding errors


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("own_task", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_rotation_task(**fields: Any) -> Any:
    return load_example().RotationPrediction(make_backbone(**fields), width=12)


def train(task: Task, recipe: Recipe, run: Path | None = None, stop: int = 0, workers: int = 0) -> FitResult:
    return fit(task, make_data(), recipe, run=run, workers=workers, callbacks=StopAt(stop), device="cpu")


def make_trainer(task: Task, recipe: Recipe = RECIPE) -> Trainer:
    source = open_image_source(task, make_data(), recipe)
    return Trainer(Plan(task=task, source=source, recipe=recipe))


def change_loop(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, loop=replace(recipe.loop, **settings))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], RunFolder]:
    """The folder of a run that was never stopped, by precision; do not modify it."""
    folder = tmp_path_factory.mktemp("runs")

    def find(precision: str) -> RunFolder:
        if not (folder / precision).exists():
            train(make_task(**NOISY), change_loop(RECIPE, precision=precision), folder / precision)
        return RunFolder(folder / precision)

    return find


@pytest.mark.parametrize(
    ("stop", "workers", "precision"), [(1, 0, "float32"), (4, 2, "float32"), (7, 0, "float32"), (4, 0, "bfloat16")]
)
def test_resume_is_bit_identical(
    stop: int, workers: int, precision: str, uninterrupted: Callable[[Any], RunFolder], tmp_path: Path
) -> None:
    """Teacher, center, optimizer and log, within the epoch of the frozen layer and after it."""
    recipe = change_loop(RECIPE, precision=precision, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        train(make_task(**NOISY), recipe, tmp_path / "run", stop=stop + 1, workers=workers)
    train(make_task(**NOISY), recipe, tmp_path / "run")
    assert_same(uninterrupted(precision), RunFolder(tmp_path / "run"))


def test_checkpoint_has_the_task_and_the_saved_model_only_its_result(
    uninterrupted: Callable[[Any], RunFolder], tmp_path: Path
) -> None:
    tensors, records = read_checkpoint_and_log(uninterrupted("float32"))
    task = make_task()
    trained = {"task.projector.weight", "task.projector.bias", "task.last.weight", *task.backbone.state_dict()}
    teacher = {f"task.{name}" for name in task.state_dict() if name.startswith("teacher.")}
    assert {name for name in tensors if name.startswith("model/")} == {
        f"model/{name}" for name in trained | teacher | {"task.center"}
    }
    assert tensors["model/task.center"].abs().max() > 1e-3
    assert {name.split("/")[1] for name in tensors if name.startswith("optimizer/")} == trained
    assert "val_agreement" in records[-1]
    result = train(make_task(**NOISY), RECIPE)
    vitrail.save(result.model, tmp_path / "model")
    for name, tensor in vitrail.load(tmp_path / "model").state_dict().items():
        assert torch.equal(tensor, tensors[f"model/task.teacher.0.{name}"]), name
        assert name == "pos_embed" or not torch.equal(tensor, tensors[f"model/{name}"]) or not tensor.any(), name


def test_last_layer_is_frozen_in_the_first_epoch() -> None:
    trainer = make_trainer(task := make_task())
    batches, before = trainer_batches(trainer), task.last.weight.detach().clone()
    changed = list[bool]()
    for _ in range(5):
        trainer.step(batches)
        changed.append(not torch.equal(before, task.last.weight))
    assert changed == [False, False, False, True, True]


def trainer_batches(trainer: Trainer) -> Any:
    source = open_image_source(trainer.task, make_data(), trainer.recipe)
    accumulate = trainer.recipe.loop.accumulate
    return source.load_batches(range(trainer.steps), accumulate=accumulate, ranks=trainer.ranks)


def train_on_rank(rank: int, folder: str) -> None:
    """A process of two, forked so that nothing is imported again."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, rank)
    recipe = change_loop(SMOOTH, accumulate=2)
    fit(make_task(), make_data(), recipe, run=Path(folder) / "two", ranks=ranks, device="cpu")
    unused = make_task(classes=3)  # a head that is not used
    try:
        fit(unused, make_data(), recipe, steps=1, ranks=ranks, device="cpu")
    except ConfigError as error:
        Path(f"{folder}/error{rank}.txt").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """With two micro-batches each. A weight that DDP would wait for in vain is a one-line error."""
    processes = [
        multiprocessing.get_context("fork").Process(target=train_on_rank, args=(n, str(tmp_path))) for n in (0, 1)
    ]
    for process in processes:
        process.start()
    train(make_task(), SMOOTH, tmp_path / "one")
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    (one, records), (two, others) = (read_checkpoint_and_log(RunFolder(tmp_path / name)) for name in ("one", "two"))
    names = [name for name in one if name.startswith(("model/", "optimizer/"))]
    assert "model/task.center" in names
    for name in names:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=0, msg=name)
    assert len(records) == len(others) == 12
    for mine, its in zip(records, others, strict=True):
        assert mine == pytest.approx(its, abs=1e-5)
    assert "head.weight of SelfDistillation" in (tmp_path / "error1.txt").read_text()


def test_copy_has_its_own_weights_and_shares_what_is_declared() -> None:
    task = make_task()
    task.not_copied = (task.settings,)
    copy = task.copy()
    assert copy.settings is task.settings
    for (name, mine), its in zip(task.state_dict().items(), copy.state_dict().values(), strict=True):
        assert torch.equal(mine, its), name
        assert mine.data_ptr() != its.data_ptr(), name


def test_moving_average_of_a_task_with_a_head_resumes(tmp_path: Path) -> None:
    recipe = change_loop(RECIPE, ema=0.9, save_every=1)
    result = train(make_rotation_task(**NOISY), recipe, tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        train(make_rotation_task(**NOISY), recipe, tmp_path / "two", stop=5)
    train(make_rotation_task(**NOISY), recipe, tmp_path / "two")
    assert_same(RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two"))
    tensors, records = read_checkpoint_and_log(RunFolder(tmp_path / "one"))
    assert not torch.equal(tensors["average/task.head.weight"], tensors["model/task.head.weight"])
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, tensors[f"average/{name}"]), name
    assert 0 <= records[-1]["val_accuracy"] <= 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_optimizers_have_the_groups_of_the_backbone_and_the_rest(optimizer: Any) -> None:
    settings = OptimizationSettings(optimizer=optimizer, layer_decay=0.5)
    task = make_task()
    names = {weight: name for name, weight in task.named_parameters()}
    alone, made = create_optimizers(make_rotation_alone(task), settings), create_optimizers(task, settings)
    groups = [(each, group) for each in made for group in each.param_groups]
    found = {names[weight]: (type(each).__name__, group) for each, group in groups for weight in group["params"]}
    assert found.keys() == {name for name in names.values() if not name.startswith("teacher.")}
    expected = {
        names[weight]: (type(each).__name__, group)
        for each in alone
        for group in each.param_groups
        for weight in group["params"]
    }
    for name, (kind, group) in expected.items():
        assert found[name][0] == kind, name
        assert found[name][1]["scale"] == group["scale"], name
        assert found[name][1]["weight_decay"] == group["weight_decay"], name
    for name in ("projector.weight", "projector.bias", "last.weight"):
        kind, group = found[name]
        assert kind == ("SGD" if optimizer == "sgd" else "AdamW")
        assert group["scale"] == 1
        assert group["decays"] == name.endswith("weight")
    assert found["backbone.patch_embed.proj.weight"][1]["scale"] == 0.5**3
    assert (found["backbone.blocks.0.attn.qkv.weight"][0] == "Muon") == (optimizer == "muon")


def make_rotation_alone(task: Task) -> Task:
    """A task that is its backbone alone."""
    alone = Task()
    alone.backbone = task.backbone
    return alone


def test_frozen_backbone_is_in_eval_mode_and_the_rest_is_trained() -> None:
    recipe = replace(RECIPE, optimization=replace(RECIPE.optimization, train_blocks=0))
    task = make_task(**NOISY)
    modes = list[tuple[bool, bool]]()

    def record_modes(*_: object) -> None:
        modes.append((task.backbone.training, task.projector.training))

    task.projector.register_forward_hook(record_modes)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trainer = make_trainer(task, recipe)
    batches = trainer_batches(trainer)
    for _ in range(4):
        trainer.step(batches)
    assert set(modes) == {(False, True)}
    for name, tensor in task.state_dict().items():
        moved = name.startswith(("projector.", "last.", "teacher.1.", "teacher.2.", "center"))
        assert torch.equal(tensor, before[name]) != moved, name


class Exploding(SelfDistillation):
    """Has an infinite gradient in its second step; records the steps that were taken."""

    def __init__(self) -> None:
        super().__init__(make_backbone())
        self.taken = list[int]()

    def forward(self, batch: Batch, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = super().forward(batch, clock)
        if clock.step == 1 and self.training:
            loss.register_hook(torch.full_like(loss, torch.inf).mul)
        return loss, metrics

    def after_step(self, clock: Clock) -> None:
        super().after_step(clock)
        self.taken.append(clock.step)


def test_no_update_after_a_step_that_was_skipped() -> None:
    """In float16 a step with infinite gradients is skipped; the teacher and the center must not move either."""
    trainer = make_trainer(task := Exploding(), change_loop(RECIPE, precision="float16"))
    trainer.scaler = torch.GradScaler("cpu", init_scale=16.0)
    batches = trainer_batches(trainer)
    trainer.step(batches)
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trainer.step(batches)
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    trainer.step(batches)
    assert task.taken == [0, 2]
    assert trainer.scaler.get_scale() == 8
    assert not torch.equal(task.center, before["center"])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_scheduled_settings_reach_the_optimizer(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules: dict[str, Any] = {
        "weight_decay": {"start": 0.1, "end": 0.4, "shape": "linear"},
        "momentum": {"start": 0.8, "warmup": 1, "warmup_start": 0.5},
        "beta2": Schedule(start=0.9, end=0.99, by="epoch"),
        "clip": {"start": 1e-3, "end": 1e-5},
    }
    assert set(schedules) == set(SCHEDULED_SETTINGS)
    recipe = replace(RECIPE, schedules=schedules, optimization=OptimizationSettings(optimizer=optimizer))
    trainer, clips = make_trainer(make_task(), recipe), list[float]()

    def record_clip(_: object, norm: float) -> None:
        clips.append(norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", record_clip)
    batches, value = trainer_batches(trainer), dict[str, float]()
    for step in range(5):
        trainer.step(batches)
        clock = Clock(step=step, steps=9, steps_per_epoch=3)
        value = {name: parse_schedule(each, name).at(clock) for name, each in schedules.items()}
        for group in trainer.optimizers[0].param_groups:
            assert group["weight_decay"] == (value["weight_decay"] if group["decays"] else 0)
            if optimizer == "sgd":
                assert group["momentum"] == value["momentum"]
            else:
                assert group["betas"] == (value["momentum"], value["beta2"])
        assert clips[-1] == value["clip"]
    assert value["weight_decay"] == pytest.approx(0.1 + 0.3 * 4 / 9)
    assert (value["momentum"], len(clips)) == (0.8, 5)
