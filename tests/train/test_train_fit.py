"""The loop: it learns, and stopping at any step and going on gives, bit by bit, what never stopping gives."""

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
from vitrail.data.array_dataset import ArrayDataset
from vitrail.data.augment.config import Augmentation
from vitrail.data.datasets import DatasetSplits
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.train.callbacks import TrainingStart
from vitrail.train.fit import fit
from vitrail.train.loop import FitResult
from vitrail.train.losses import LossInputs, classification_loss
from vitrail.train.recipe import LoopSettings, OptimizationSettings, Recipe
from vitrail.train.resume import load_newest_checkpoint_on_ranks
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


def pictures(count: int = 40, classes: int = 4, size: int = 20) -> ArrayDataset:
    """Each class a colour, with noise."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % classes
    colours = random.integers(40, 216, (classes, 1, 1, 3))
    images = np.clip(colours[labels] + random.integers(-40, 40, (count, size, size, 3)), 0, 255).astype(np.uint8)
    return ArrayDataset(images, labels, tuple(f"colour {n}" for n in range(classes)), "colours")


def data(count: int = 40) -> DatasetSplits:
    return DatasetSplits(name="colours", train=pictures(count), val=pictures(24), classes=pictures().classes)


def model(**fields: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 4, **fields}
    return vitrail.create("vit_tiny_patch16_224", **given)


class StopAt:
    """Stops a training in its tracks after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_start(self, start: TrainingStart) -> None: ...
    def on_log(self, record: Mapping[str, float]) -> None: ...
    def on_finish(self) -> None: ...

    def on_step(self, step: int) -> None:
        if step == self.step:
            raise KeyboardInterrupt


def trained(
    recipe: Recipe, run: RunFolder | None = None, stop: int = 0, workers: int = 0, fields: Mapping[str, Any] = NOISY
) -> FitResult:
    watch = StopAt(stop)
    return fit(model(**fields), data(), recipe, run=run, workers=workers, callback=watch, device="cpu")


def everything(run: RunFolder) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The last checkpoint and the log, but for clocks."""
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    clocks = ("seconds", "images_per_second")
    return dict(state.tensors), [
        {name: value for name, value in record.items() if name not in clocks} for record in run.read_records()
    ]


def assert_same(one: RunFolder, other: RunFolder) -> None:
    (tensors, records), (others, other_records) = everything(one), everything(other)
    assert records == other_records
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def test_it_learns() -> None:
    result = fit(model(), data(), replace(PLAIN, loop=LoopSettings(epochs=12, batch=8)), device="cpu")
    assert result.evaluation is not None
    assert result.evaluation.top1 == 1
    assert result.records[-1]["val_top1"] == 1
    assert result.steps == 60
    assert not result.model.training


@pytest.mark.parametrize("stop", [1, 4, 7, 10, 13])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_equals_never_stopping(stop: int, workers: int, tmp_path: Path) -> None:
    """At any step, amid an epoch, with workers, Mixup, CutMix, accumulation, EMA, dropout and stochastic depth."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=1))
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    trained(EVERYTHING, whole)
    with pytest.raises(KeyboardInterrupt):
        trained(recipe, cut, stop=stop + 1, workers=workers)
    assert [path.name for path in cut.list_checkpoints()][-1] == f"step-{stop:08}.safetensors"
    trained(recipe, cut, workers=2 - workers)
    assert_same(whole, cut)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resuming_equals_never_stopping_by_any_optimizer(optimizer: Any, precision: Any, tmp_path: Path) -> None:
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer=optimizer, lr=1e-3),
        loop=LoopSettings(epochs=2, batch=8, precision=precision, save_every=3),
    )
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    trained(recipe, whole)
    with pytest.raises(KeyboardInterrupt):
        trained(recipe, cut, stop=8)
    trained(recipe, cut)
    assert_same(whole, cut)


@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_stopped_before_its_first_checkpoint_begins_again(stop: int, tmp_path: Path) -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=1, batch=8, save_every=4))
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    trained(recipe, whole)
    with pytest.raises(KeyboardInterrupt):
        trained(recipe, cut, stop=stop)
    assert cut.read_records()
    with (cut.folder / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # a line that a crash cut off
    trained(recipe, cut)
    assert_same(whole, cut)


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(tmp_path: Path) -> None:
    """A stop at the end of an epoch saves at once; killed after the last checkpoint, the result is still measured."""
    recipe = replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=5))
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    trained(recipe, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.train.loop.evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained(recipe, cut)
    assert not any("val_top1" in each for each in cut.read_records())
    result = trained(recipe, cut)
    assert result.evaluation is not None
    assert_same(whole, cut)
    assert trained(recipe, cut).evaluation is not None, "finished, and measured again"
    assert_same(whole, cut)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_run_may_be_stopped_many_times(tmp_path: Path) -> None:
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, save_every=2))
    whole, cut = RunFolder.create(tmp_path / "whole", {}), RunFolder.create(tmp_path / "cut", {})
    trained(recipe, whole)
    for stop in (1, 3, 3, 6, 7, 12):
        with pytest.raises(KeyboardInterrupt):
            trained(recipe, cut, stop=stop)
    trained(recipe, cut)
    assert_same(whole, cut)


def test_workers_change_nothing() -> None:
    one, other = trained(EVERYTHING), trained(EVERYTHING, workers=2)
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_accumulating_changes_nothing_but_rounding() -> None:
    """Also with Mixup and CutMix, since partners stand side by side."""
    recipe = replace(EVERYTHING, loop=replace(EVERYTHING.loop, accumulate=1))
    one, other = trained(EVERYTHING, fields={}), trained(recipe, fields={})
    for mine, its in zip(one.records, other.records, strict=True):
        assert mine.get("loss") == pytest.approx(its.get("loss"), abs=1e-5)


def test_another_seed_is_another_training() -> None:
    recipe = replace(PLAIN, loop=replace(PLAIN.loop, seed=1))
    assert trained(PLAIN).records[-1]["val_loss"] != trained(recipe).records[-1]["val_loss"]


def test_only_two_checkpoints_are_kept_and_the_new_one_is_there_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    unlink, seen = Path.unlink, list[int]()

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("step-"):
            seen.append(len(run.list_checkpoints()))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    trained(replace(PLAIN, loop=replace(PLAIN.loop, save_every=1)), run)
    assert [path.stem for path in run.list_checkpoints()] == ["step-00000003", "step-00000004"]
    assert seen == [3, 3]


def test_a_linear_probe_moves_the_head_alone_and_without_chance() -> None:
    start = model(**NOISY)
    before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    recipe = Recipe(optimization=OptimizationSettings(train_blocks=0), loop=LoopSettings(epochs=1, batch=8))
    after = fit(start, data(), recipe, device="cpu").model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"head.weight", "head.bias"}


def test_a_loss_is_a_function_given_to_it() -> None:
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


def test_compiled_it_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real_compile = torch.compile

    def without_code(model: nn.Module) -> Any:
        return real_compile(model, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code)
    one, other = trained(PLAIN), trained(replace(PLAIN, loop=replace(PLAIN.loop, compile=True)))
    for mine, its in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)


class Foreign:
    """A data set by torchvision's convention, with a random transform of its own."""

    def __init__(self, transform: Callable[[Image.Image], Tensor] | None = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(pictures().images[index])
        return (self.transform(image) if self.transform else image), index % 4


def random_crop(image: Image.Image) -> Tensor:
    from torchvision.transforms import v2

    steps: Any = v2.Compose([v2.RandomCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    return steps(image).as_subclass(Tensor)


def test_torchvisions_data_sets_and_transforms_are_taken() -> None:
    recipe = replace(PLAIN, loop=LoopSettings(epochs=1, batch=8))
    for workers in (0, 2):
        by_set = fit(model(), Foreign(random_crop), recipe, workers=workers, device="cpu")
        by_transform = fit(model(), Foreign(), recipe, transform=random_crop, workers=workers, device="cpu")
        assert by_set.records[0]["loss"] == by_transform.records[0]["loss"]
    assert fit(model(), Foreign(), recipe, device="cpu").steps == 2, "of 24 pictures a fifth is held out"


def test_tensors_of_floats_are_the_models_input_in_validation_too() -> None:
    as_tensors = Foreign(
        lambda image: torch.from_numpy(np.asarray(image.resize((16, 16))) / 51.0 - 2).movedim(2, 0).float()
    )
    both = DatasetSplits(name="floats", train=as_tensors, val=as_tensors, classes=tuple("abcd"))  # pyright: ignore[reportArgumentType]
    result = fit(model(), both, replace(PLAIN, loop=LoopSettings(epochs=1, batch=8)), device="cpu")
    inputs = torch.stack([as_tensors[index][0] for index in range(24)])
    loss = F.cross_entropy(result.model(inputs), torch.arange(24) % 4)
    assert result.records[-1]["val_loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = vitrail.evaluate(result.model, as_tensors, vitrail.Preprocessing(image_size=16))
    assert found.loss == pytest.approx(loss.item(), abs=1e-5)


def test_bad_requests_are_one_line() -> None:
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


def test_a_loss_that_is_no_number_stops_it_at_its_step_with_the_last_checkpoint_whole(tmp_path: Path) -> None:
    calls = 0

    def bad(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        nonlocal calls
        calls += 1
        loss, metrics = classification_loss(model, inputs)
        return loss * (float("nan") if calls == 4 else 1), metrics

    run = RunFolder.create(tmp_path / "run", {})
    recipe = replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=1))
    with pytest.raises(VitrailError, match="the loss became nan at step 4") as caught:
        fit(model(), data(), recipe, objective=bad, run=run, device="cpu")
    assert str(run.list_checkpoints()[-1]) in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert state.metadata["step"] == 3
    assert all(tensor.isfinite().all() for tensor in state.tensors_with_prefix("model").values())


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    """The loss is finite, its gradient is not: the step after would be the first to show it."""

    def steep(model: nn.Module, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, metrics = classification_loss(model, inputs)
        return loss + (loss - loss.detach()) * (1e38 if steps.pop() else 0), metrics

    steps = [False, False, True, False, False]  # from the last
    run = RunFolder.create(tmp_path / "run", {})
    recipe = Recipe(
        optimization=OptimizationSettings(optimizer="sgd", lr=100.0), loop=LoopSettings(epochs=1, batch=8, save_every=1)
    )
    with pytest.raises(VitrailError, match="step 3") as caught:
        fit(model(), data(), recipe, objective=steep, run=run, device="cpu")
    assert "step-00000002" in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert all(tensor.isfinite().all() for tensor in state.tensors_with_prefix("model").values())


def test_a_full_disk_stops_it_with_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, writes = RunFolder.create(tmp_path / "run", {}), 0

    def filling(tensors: dict[str, Tensor], place: Path, metadata: dict[str, str]) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            place.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, place, metadata)

    monkeypatch.setattr("vitrail.train.training_state.save_file", filling)
    with pytest.raises(VitrailError, match="No space left on device") as caught:
        trained(replace(PLAIN, loop=LoopSettings(epochs=2, batch=8, save_every=1)), run)
    assert str(run.list_checkpoints()[-1]) in str(caught.value)
    state = load_newest_checkpoint_on_ranks(run)
    assert state is not None
    assert state.metadata["step"] == 2
    assert [path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    trained(PLAIN, run)
    with pytest.raises(VitrailError, match="does not fit its model"):
        trained(PLAIN, run, fields={"depth": 3})


def test_filters_are_whitened_only_where_they_can_be() -> None:
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
