"""`fit`: it learns, and a run that is stopped at any step and resumed is bit-identical to one that was not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.augment.config import Augmentation
from vitrail.data.images.datasets import DatasetSplits
from vitrail.recipes.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.tasks.classification import LossInputs, classification_loss
from vitrail.train.callbacks import TrainingStart
from vitrail.train.fit import fit
from vitrail.train.loop import FitResult
from vitrail.train.restore import load_newest_checkpoint_on_ranks
from vitrail.train.run_folder import RunFolder

EVERYTHING = Recipe(
    augmentation=Augmentation(
        crop="resized", flip=0.5, policy="rand", jitter=0.2, erase=0.5, mixup=0.8, cutmix=1.0, repeats=2, smoothing=0.1
    ),
    optimization=OptimizationSettings(lr=1e-3, warmup=0.5, clip=1.0, layer_decay=0.8),
    loop=LoopSettings(epochs=3, batch=8, accumulate=2, ema=0.9, seed=3),
)
PLAIN = Recipe(optimization=OptimizationSettings(lr=3e-3), loop=LoopSettings(epochs=2, batch=16))
NOISY = {"dropout": 0.1, "attention_dropout": 0.1, "stochastic_depth": 0.3}


def color_images(count: int = 40, classes: int = 4, size: int = 20) -> ArrayDataset:
    """One color per class, with noise."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % classes
    colors = random.integers(40, 216, (classes, 1, 1, 3))
    images = np.clip(colors[labels] + random.integers(-40, 40, (count, size, size, 3)), 0, 255).astype(np.uint8)
    return ArrayDataset(images, labels, tuple(f"color {n}" for n in range(classes)), "colors")


def data(count: int = 40) -> DatasetSplits:
    return DatasetSplits(name="colors", train=color_images(count), val=color_images(24), classes=color_images().classes)


def model(**fields: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4, **fields}
    return vitrail.create("vit_tiny_patch16_224", **given)


class StopAt:
    """Raises KeyboardInterrupt after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, start: TrainingStart) -> None: ...
    def on_log(self, record: Mapping[str, float]) -> None: ...
    def on_finish(self) -> None: ...

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt


def train_toy_model(
    recipe: Recipe, run: RunFolder | None = None, stop: int = 0, workers: int = 0, fields: Mapping[str, Any] = NOISY
) -> FitResult:
    watch = StopAt(stop)
    return fit(model(**fields), data(), recipe, run=run, workers=workers, callbacks=watch, device="cpu")


def read_checkpoint_and_log(run: RunFolder) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of the last checkpoint and the log without times."""
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    clocks = ("seconds", "images_per_second", "tokens_per_second")
    return dict(state.tensors), [
        {name: value for name, value in record.items() if name not in clocks} for record in run.read_records()
    ]


def assert_same(one: RunFolder, other: RunFolder) -> None:
    (tensors, records), (others, other_records) = read_checkpoint_and_log(one), read_checkpoint_and_log(other)
    assert records == other_records
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def create_runs(folder: Path) -> tuple[RunFolder, RunFolder]:
    """Empty folders for a run that is never stopped and for one that is."""
    return RunFolder.create(folder / "uninterrupted", {}), RunFolder.create(folder / "stopped", {})


def test_toy_model_learns_all_images() -> None:
    result = fit(model(), data(), replace(PLAIN, loop=LoopSettings(epochs=12, batch=8)), device="cpu")
    assert result.evaluation is not None
    assert result.evaluation.top1 == 1
    assert result.records[-1]["val_top1"] == 1
    assert result.steps == 60
    assert not result.model.training


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run by the recipe EVERYTHING that was never stopped; do not modify it."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs") / "uninterrupted", {})
    train_toy_model(EVERYTHING, run)
    return run


@pytest.mark.parametrize("stop", [1, 4, 7, 10, 13])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bit_identical(stop: int, workers: int, uninterrupted: RunFolder, tmp_path: Path) -> None:
    """At any step, within an epoch, with workers, Mixup, CutMix, accumulation, EMA, dropout and stochastic depth."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=1))
    stopped = RunFolder.create(tmp_path / "stopped", {})
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=stop + 1, workers=workers)
    assert [path.name for path in stopped.list_checkpoints()][-1] == f"step-{stop:08}.safetensors"
    train_toy_model(recipe, stopped, workers=2 - workers)
    assert_same(uninterrupted, stopped)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_is_bit_identical_with_every_optimizer(optimizer: Any, precision: Any, tmp_path: Path) -> None:
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer=optimizer, lr=1e-3),
        loop=LoopSettings(epochs=2, batch=8, precision=precision, save_every=3),
    )
    uninterrupted, stopped = create_runs(tmp_path)
    train_toy_model(recipe, uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=8)
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)


@pytest.mark.parametrize("stop", [2, 3])
def test_run_stopped_before_its_first_checkpoint_starts_over(stop: int, tmp_path: Path) -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=1, batch=8, save_every=4))
    uninterrupted, stopped = create_runs(tmp_path)
    train_toy_model(recipe, uninterrupted)
    with pytest.raises(KeyboardInterrupt):
        train_toy_model(recipe, stopped, stop=stop)
    assert stopped.read_records()
    with (stopped.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that a crash truncated
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)


def test_resume_runs_a_missed_evaluation(tmp_path: Path) -> None:
    """A run stopped at the end of an epoch, or killed after its last checkpoint, still gets its evaluation."""
    recipe = replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=5))
    uninterrupted, stopped = create_runs(tmp_path)
    train_toy_model(recipe, uninterrupted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.tasks.classification.evaluate", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_toy_model(recipe, stopped)
    assert not any("val_top1" in each for each in stopped.read_records())
    result = train_toy_model(recipe, stopped)
    assert result.evaluation is not None
    assert_same(uninterrupted, stopped)
    assert train_toy_model(recipe, stopped).evaluation is not None, "a finished run is evaluated again"
    assert_same(uninterrupted, stopped)


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_resume_is_bit_identical_after_many_stops(uninterrupted: RunFolder, tmp_path: Path) -> None:
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=2))
    stopped = RunFolder.create(tmp_path / "stopped", {})
    for stop in (1, 3, 3, 6, 7, 12):
        with pytest.raises(KeyboardInterrupt):
            train_toy_model(recipe, stopped, stop=stop)
    train_toy_model(recipe, stopped)
    assert_same(uninterrupted, stopped)


def test_workers_do_not_change_the_result() -> None:
    one, other = train_toy_model(EVERYTHING), train_toy_model(EVERYTHING, workers=2)
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_gradient_accumulation_changes_only_rounding() -> None:
    """Also with Mixup and CutMix, which mix neighbors of a batch."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, accumulate=1))
    one, other = train_toy_model(EVERYTHING, fields={}), train_toy_model(recipe, fields={})
    for mine, its in zip(one.records, other.records, strict=True):
        assert mine.get("loss") == pytest.approx(its.get("loss"), abs=1e-5)


def test_another_seed_gives_another_result() -> None:
    recipe = replace(PLAIN, loop=replace(PLAIN.loop, seed=1))
    assert train_toy_model(PLAIN).records[-1]["val_loss"] != train_toy_model(recipe).records[-1]["val_loss"]


def test_two_checkpoints_remain_and_old_ones_are_deleted_after_the_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    unlink, seen = Path.unlink, list[int]()

    def count_and_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("step-"):
            seen.append(len(run.list_checkpoints()))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", count_and_unlink)
    train_toy_model(replace(PLAIN, loop=replace(PLAIN.loop, save_every=1)), run)
    assert [path.stem for path in run.list_checkpoints()] == ["step-00000003", "step-00000004"]
    assert seen == [3, 3]


def test_linear_probe_trains_only_the_head_without_dropout() -> None:
    start = model(**NOISY)
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    recipe = Recipe(optimization=OptimizationSettings(train_blocks=0), loop=LoopSettings(epochs=1, batch=8))
    after = fit(start, data(), recipe, device="cpu").model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"head.weight", "head.bias"}


def test_fit_takes_an_objective() -> None:
    seen = list[LossInputs]()

    def halved(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        seen.append(inputs)
        loss, metrics = classification_loss(model, inputs)
        return loss / 2, {**metrics, "rows": torch.tensor(float(len(inputs.labels)))}

    recipe = Recipe(augmentation=Augmentation(mixup=1.0), loop=LoopSettings(epochs=1, batch=16))
    result = fit(model(), data(), recipe, objective=halved, device="cpu")
    assert result.records[0]["rows"] == 16
    assert result.records[0]["loss"] == pytest.approx(np.log(4) / 2, rel=0.2)
    assert torch.allclose(seen[0].targets.sum(1), torch.ones(16))
    assert seen[0].images.shape == (16, 3, 16, 16)


def test_compiled_model_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real_compile = torch.compile

    def without_code(model: nn.Module) -> Any:
        return real_compile(model, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code)
    one, other = train_toy_model(PLAIN), train_toy_model(replace(PLAIN, loop=replace(PLAIN.loop, compile=True)))
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)


class TorchvisionDataset:
    """A data set in torchvision's convention, with its own random transform."""

    def __init__(self, transform: Callable[[Image.Image], Tensor] | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(color_images().images[index])
        return (self.transform(image) if self.transform else image), index % 4


def random_crop(image: Image.Image) -> Tensor:
    from torchvision.transforms import v2

    steps: Any = v2.Compose([v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    return steps(image).as_subclass(Tensor)


def test_fit_takes_torchvision_datasets_and_transforms() -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=1, batch=8))
    for workers in (0, 2):
        by_set = fit(model(), TorchvisionDataset(random_crop), recipe, workers=workers, device="cpu")
        by_transform = fit(model(), TorchvisionDataset(), recipe, transform=random_crop, workers=workers, device="cpu")
        assert by_set.records[0]["loss"] == by_transform.records[0]["loss"]
    assert fit(model(), TorchvisionDataset(), recipe, device="cpu").steps == 2, (
        "a fifth of the 24 images is used for validation"
    )


def test_float_tensors_are_not_normalized_again_in_validation() -> None:
    as_tensors = TorchvisionDataset(
        lambda image: torch.from_numpy(np.asarray(image.resize((16, 16))) / 51.0 - 2).movedim(2, 0).float()
    )
    both = DatasetSplits(name="floats", train=as_tensors, val=as_tensors, classes=tuple("abcd"))  # pyright: ignore[reportArgumentType]
    result = fit(model(), both, replace(PLAIN, loop=LoopSettings(epochs=1, batch=8)), device="cpu")
    inputs = torch.stack([as_tensors[index][0] for index in range(24)])
    loss = F.cross_entropy(result.model(inputs), torch.arange(24) % 4)
    assert result.records[-1]["val_loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = vitrail.evaluate(result.model, as_tensors, vitrail.Preprocessing(image_size=16))
    assert found.loss == pytest.approx(loss.item(), abs=1e-5)


def test_invalid_arguments_are_one_line_errors() -> None:
    with pytest.raises(ConfigError, match="`batch` 64 is more than the 40 training images"):
        fit(model(), data(), replace(PLAIN, loop=LoopSettings(batch=64)), device="cpu")
    with pytest.raises(DataError, match="no images to train on"):
        fit(model(), replace(data(), train=None), PLAIN, device="cpu")
    with pytest.raises(ConfigError, match="gpu is not a device"):
        fit(model(), data(), PLAIN, device="gpu")
    with pytest.raises(ConfigError, match="a model of 3 classes; expected 4"):
        fit(model(classes=3), data(), PLAIN, device="cpu")
    with pytest.raises(ConfigError, match="3 means for a model of 1 channels"):
        fit(model(channels=1), data(), PLAIN, device="cpu", preprocessing=vitrail.Preprocessing(image_size=16))
    for recipe in ({"epochs": 1}, 3):
        with pytest.raises(ConfigError, match="recipe is a"):
            fit(model(), data(), recipe, device="cpu")  # pyright: ignore[reportArgumentType]
    for wrong in ("ViT-Ti/16", nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="has no config"):
            fit(wrong, data(), PLAIN, device="cpu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="unknown recipe"):
        fit(model(), data(), "scratched", device="cpu")
    mixing = Recipe(augmentation=Augmentation(mixup=1.0), loop=LoopSettings(batch=6, accumulate=2))
    with pytest.raises(ConfigError, match="parts of an even size"):
        fit(model(), data(), mixing, device="cpu")


def test_nan_loss_stops_training_and_the_last_checkpoint_is_intact(tmp_path: Path) -> None:
    calls = 0

    def nan_at_step_4(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        nonlocal calls
        calls += 1
        loss, metrics = classification_loss(model, inputs)
        return loss * (float("nan") if calls == 4 else 1), metrics

    run = RunFolder.create(tmp_path / "run", {})
    recipe = replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=1))
    with pytest.raises(VitrailError, match="the loss became nan at step 4") as caught:
        fit(model(), data(), recipe, objective=nan_at_step_4, run=run, device="cpu")
    assert str(run.list_checkpoints()[-1]) in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert state.metadata["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state.tensors_with_prefix("model").values())


def test_weights_with_nan_are_never_saved(tmp_path: Path) -> None:
    """The loss is finite, but its gradient is not: only the next loss would show it."""

    def infinite_gradient_at_step_3(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = classification_loss(model, inputs)
        return loss + (loss - loss.detach()) * (1e38 if steps.pop() else 0), metrics

    steps = [False, False, True, False, False]  # popped from the end
    run = RunFolder.create(tmp_path / "run", {})
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer="sgd", lr=100.0), loop=LoopSettings(epochs=1, batch=8, save_every=1)
    )
    with pytest.raises(VitrailError, match="step 3") as caught:
        fit(model(), data(), recipe, objective=infinite_gradient_at_step_3, run=run, device="cpu")
    assert "step-00000002" in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert all(tensor.isfinite().all() for tensor in state.tensors_with_prefix("model").values())


def test_full_disk_stops_training_and_the_last_checkpoint_is_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, writes = RunFolder.create(tmp_path / "run", {}), 0

    def save_until_full(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            target.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, target, metadata)

    monkeypatch.setattr("vitrail.train.training_state.save_file", save_until_full)
    with pytest.raises(VitrailError, match="No space left on device") as caught:
        train_toy_model(replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=1)), run)
    assert str(run.list_checkpoints()[-1]) in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert state.metadata["step"] == 2
    assert [path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    train_toy_model(PLAIN, run)
    with pytest.raises(VitrailError, match="does not fit its model"):
        train_toy_model(PLAIN, run, fields={"depth": 3})


def test_filters_are_whitened_if_the_model_supports_it() -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=1, batch=8, whiten=True))
    with pytest.raises(ConfigError, match="`whiten` is true; expected false"):
        fit(model(), data(), recipe, device="cpu")
    torch.manual_seed(0)
    small = {"image_size": 20, "width": 16, "depth": 1, "heads": 8, "classes": 4, "stem": (8, 8)}
    first = vitrail.create("cct_cpu_32", **small)
    before = first.patch_embed.layers[0].weight.clone()
    still = replace(recipe, optimization=OptimizationSettings(lr=1e-12, weight_decay=0.0))
    after = fit(first, data(), still, device="cpu").model.patch_embed.layers[0].weight
    assert torch.allclose(after[:4], -after[4:8], atol=1e-6)
    assert not torch.allclose(before, after, atol=1e-3)
