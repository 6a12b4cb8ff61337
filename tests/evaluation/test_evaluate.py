"""Evaluation: every image once, compared with a direct computation; matching the classes of data and model."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError, DataError, VitrailError
from vitrail.checkpoint import read
from vitrail.data.images.array_dataset import ArrayDataset
from vitrail.data.images.class_names import match_data_classes_to_model
from vitrail.data.images.datasets import DatasetSubset, open_data
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.distributed import Ranks
from vitrail.evaluation.evaluate import evaluate

CLASSES = tuple("abcdefg")
SEEN_AS = Preprocessing(image_size=32, crop=0.8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def toy(**fields: Any) -> Any:
    fields = {"image_size": 32, "classes": 7, "depth": 2, "width": 16, "heads": 2, **fields}
    return add_weight_noise(vitrail.create("vit_tiny_patch16_224", **fields), std=0.3)


@pytest.fixture
def dataset() -> ArrayDataset:
    draw = np.random.default_rng(0)
    return ArrayDataset(draw.integers(0, 256, (23, 40, 50, 3), dtype=np.uint8), draw.integers(0, 7, 23), CLASSES)


def compute_logits_and_labels(model: Any, dataset: ArrayDataset) -> tuple[Tensor, Tensor]:
    """Logits and labels."""
    inputs = [torch.from_numpy(preprocess_image(open_image(dataset.source(n)), SEEN_AS)) for n in range(len(dataset))]
    with torch.inference_mode():
        return model(torch.stack(inputs)), torch.tensor([dataset.label(n) for n in range(len(dataset))])


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (5, 0), (64, 0), (5, 1)])
def test_metrics_match_a_direct_computation(dataset: ArrayDataset, batch: int, workers: int) -> None:
    model, counts = toy(), list[int]()
    found = evaluate(model, dataset, SEEN_AS, batch=batch, workers=workers, progress=counts.append)
    logits, labels = compute_logits_and_labels(model, dataset)
    assert found.images == sum(counts) == 23
    assert found.top1 == (logits.argmax(1) == labels).double().mean()
    assert found.top5 == (logits.topk(5).indices == labels[:, None]).any(1).double().mean()
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.confusion is not None
    assert found.confusion.sum(1).tolist() == labels.bincount(minlength=7).tolist()
    assert found.labels == CLASSES
    assert found.seconds > 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streams", [1, 2])
def test_an_engine_computes_the_same(dataset: ArrayDataset, streams: int, workers: int) -> None:
    model, seen = toy(), list[int]()
    expected = evaluate(model, dataset, SEEN_AS, batch=5)
    opened = vitrail.open_model(model, preprocessing=SEEN_AS)
    engine = vitrail.Predictor(opened, streams=streams, threads=1).engine
    found = evaluate(
        opened, dataset, batch=5, workers=workers, engine=engine, on_logits=lambda each, _: seen.extend(each.tolist())
    )
    assert seen == list(range(23)), "in order"
    assert (found.top1, found.top5, found.wrong) == (expected.top1, expected.top5, expected.wrong)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_an_engine_takes_pixels_only() -> None:
    class Floats:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.randn(3, 32, 32), index

    model = vitrail.open_model(toy(), preprocessing=SEEN_AS)
    with pytest.raises(ConfigError, match="`engine` for tensors of floats; expected pixels"):
        evaluate(model, Floats(), engine=vitrail.Predictor(model).engine)


@dataclass(frozen=True)
class Pair(Ranks):
    """One of two ranks; adds the sums and the wrong predictions of the other."""

    world_size: int = 2
    sums: tuple[Tensor, ...] = ()
    others: tuple[Any, ...] = ()

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        return torch.stack([values, *self.sums]).sum(0)

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_ranks_share_the_images_and_return_the_same_result(dataset: ArrayDataset) -> None:
    model, sums, wrong = toy(), list[Tensor](), list[Any]()

    class Second(Pair):
        def all_reduce_sum(self, values: Tensor) -> Tensor:
            sums.append(values)
            return values

        def all_gather_objects(self, value: Any) -> list[Any]:
            wrong.append(value)
            return [value]

    half = evaluate(model, dataset, SEEN_AS, batch=4, ranks=Second(rank=1))
    assert half.images == 11
    both, alone = (
        evaluate(model, dataset, SEEN_AS, batch=4, ranks=Pair(sums=(sums[0],), others=(wrong[0],))),
        evaluate(model, dataset, SEEN_AS),
    )
    assert (both.images, both.top1, both.top5) == (23, alone.top1, alone.top5)
    assert both.loss == pytest.approx(alone.loss, rel=1e-5)
    assert both.confusion is not None
    assert alone.confusion is not None
    assert both.confusion.equal(alone.confusion)
    assert [each.name for each in both.wrong] == [each.name for each in alone.wrong]
    assert len(both.wrong) == round(23 * (1 - alone.top1)) > len(half.wrong) > 0


def test_train_and_eval_modes_are_restored(dataset: ArrayDataset) -> None:
    model = toy(dropout=0.5).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    inside = list[bool]()

    def look(*_: object) -> None:
        inside.append(torch.is_inference_mode_enabled())

    model.norm.register_forward_hook(look)
    first, again = (evaluate(model, dataset, SEEN_AS).loss for _ in range(2))
    assert first == again  # without dropout
    assert inside == [True, True]
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    with pytest.raises(VitrailError, match=r"^the model returns NaN or infinity"):
        evaluate(model, dataset, SEEN_AS)
    assert [module.training for module in model.modules()] == modes


def test_bfloat16_and_one_channel_models(dataset: ArrayDataset) -> None:
    model = toy()
    expected = evaluate(model, dataset, SEEN_AS).loss
    assert evaluate(model.bfloat16(), dataset, SEEN_AS).loss == pytest.approx(expected, rel=0.02)
    gray = ArrayDataset(dataset.images[..., :1], dataset.labels, CLASSES)
    assert evaluate(toy(channels=1), gray, Preprocessing(image_size=32, mean=(0.5,), std=(0.5,))).images == 23


def test_unknown_device_is_refused(dataset: ArrayDataset) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a device"):
        evaluate(toy(), dataset, SEEN_AS, device="nowhere")


def test_mapping_to_the_classes_of_the_model(dataset: ArrayDataset) -> None:
    model, mapping = toy(classes=9), (8, 7, 6, 5, 4, 3, 1)
    found = evaluate(model, dataset, SEEN_AS, mapping=mapping)
    logits, labels = compute_logits_and_labels(model, dataset)
    assert found.top1 == (logits.argmax(1) == torch.tensor(mapping)[labels]).double().mean()
    assert found.labels == ("0", "g", "2", "f", "e", "d", "c", "b", "a")
    assert evaluate(model, dataset, SEEN_AS, mapping=mapping, labels="ABCDEFGHI").labels == tuple("ABCDEFGHI")


def photos(folder: Path, count: int = 4) -> Path:
    for name in ("ants", "bees"):
        (folder / "val" / name).mkdir(parents=True)
        for n in range(count):
            pixels = np.random.default_rng(n).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "val" / name / f"{n}.png")
    return folder


def test_unreadable_images_are_skipped_and_listed(tmp_path: Path) -> None:
    photos(tmp_path)
    (tmp_path / "val" / "bees" / "2.png").write_bytes(b"not an image")
    data, counts = open_data(tmp_path), list[int]()
    assert data.val is not None
    found = evaluate(toy(classes=2), data.val, SEEN_AS, batch=3, progress=counts.append)
    assert (found.images, sum(counts)) == (7, 8)
    assert len(found.skipped) == 1
    assert "2.png' is not an image" in found.skipped[0]
    with pytest.raises(DataError, match=r"2\.png' is not an image"):
        evaluate(toy(classes=2), data.val, SEEN_AS, strict=True)
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(b"not an image")
    with pytest.raises(
        DataError, match=r"^no images to evaluate; 8 cannot be read, for instance .*png' is not an image"
    ):
        evaluate(toy(classes=2), data.val, SEEN_AS)


def test_torch_style_dataset() -> None:
    class TorchDataset:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.new("RGB", (40, 30), (index * 50, 0, 0)), index % 3

    data = open_data(TorchDataset(), val_share=1.0)
    assert data.val is not None
    found = evaluate(toy(classes=3), data.val, SEEN_AS)
    assert [(each.label, each.images) for each in found.per_class] == [("0", 2), ("1", 2), ("2", 1)]


def test_label_outside_the_classes_is_refused(dataset: ArrayDataset) -> None:
    with pytest.raises(DataError, match=r"^a label is [56]; expected 0 to 4, the classes of the model$"):
        evaluate(toy(classes=5), dataset, SEEN_AS)


REAL = {  # file, top-1 and top-5 of 1,000 photos as in SOURCES.md
    "vit_tiny_augreg": ("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", 0.759, 0.932),
    "deit_tiny": ("weights/deit_tiny_patch16_224.pth", 0.705, 0.902),
}


def evaluate_imagenet_photos(shared: Callable[[str], Path], key: str, step: int) -> Any:

    found = read(shared(REAL[key][0]))
    data = open_data(shared("imagenet-val-1000"), val_share=1.0, real=shared("imagenet-real.json"))
    assert data.val is not None
    assert found.description.preprocessing is not None
    seen_as = replace(found.description.preprocessing, crop=0.875)  # 224 of the stored 256 pixels
    mapping, _ = match_data_classes_to_model(found.description.labels, 1000, data.classes)
    return evaluate(found.model, DatasetSubset(data.val, range(0, 1000, step)), seen_as, batch=50, mapping=mapping)


@pytest.mark.parametrize("key", REAL)
def test_public_weights_on_real_photos(key: str, shared: Callable[[str], Path]) -> None:

    with shared("imagenet-val-1000-reference.csv").open() as file:
        rows = list(csv.DictReader(file))[::20]
    guesses = [([int(index) for index in row[f"{key}_top5"].split()], int(row["label"])) for row in rows]
    found = evaluate_imagenet_photos(shared, key, step=20)
    assert found.images == len(guesses) == 50
    assert found.top1 == sum(guess[0] == label for guess, label in guesses) / 50
    assert found.top5 == sum(label in guess for guess, label in guesses) / 50


@pytest.mark.slow
@pytest.mark.parametrize("key", REAL)
def test_public_weights_on_all_real_photos(key: str, shared: Callable[[str], Path]) -> None:
    found = evaluate_imagenet_photos(shared, key, step=1)
    assert (found.top1, found.top5) == REAL[key][1:]


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_wrong_predictions_match_a_direct_computation(dataset: ArrayDataset, batch: int) -> None:
    model = toy()
    logits, labels = compute_logits_and_labels(model, dataset)
    probabilities, said = logits.softmax(-1), logits.argmax(-1)
    found = evaluate(model, dataset, SEEN_AS, batch=batch).wrong
    order = sorted((n for n in range(23) if said[n] != labels[n]), key=lambda n: -probabilities[n].max().item())
    assert [each.index for each in found] == order
    for each in found:
        n = each.index
        assert (each.name, each.label) == (dataset.name(n), CLASSES[labels[n]])
        assert each.predicted == CLASSES[said[n]]
        assert each.probability == pytest.approx(probabilities[n, said[n]].item(), abs=1e-5)
        assert each.label_probability == pytest.approx(probabilities[n, labels[n]].item(), abs=1e-5)
